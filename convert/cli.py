"""`specter-convert SRC DST`, also `python -m convert SRC DST`."""

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Sequence
from typing import NoReturn

from specter_jax.entry import EXIT_INTERRUPTED, importing, interrupts

EXIT_ERROR = 2
# Being asked to terminate is handled like Ctrl-C: the finished parts stay.
_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line like every other error: one line, exit code 2."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"error: {message}; see {self.prog} --help\n")


def _group_size(text: str) -> int | tuple[int, int]:
    """ "64" -> 64, "128,64" -> (128, 64)."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (1, 2):
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor two, such as 128,64")
    return sizes[0] if len(sizes) == 1 else (sizes[0], sizes[1])


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="specter-convert",
        description="Converts a Hugging Face mixture-of-experts model for the specter runtime.",
        epilog="An interrupted conversion leaves DST.partial; the same command goes on from there.",
    )
    parser.add_argument("source", metavar="SRC", help="Hugging Face directory (safetensors)")
    parser.add_argument("destination", metavar="DST", help="directory to create")
    parser.add_argument(
        "--group-size",
        type=_group_size,
        metavar="N[,M]",
        help="weights per INT4 scale along the hidden axis, and M along the expert axis "
        "(default: 128, or 64 where 128 does not divide)",
    )
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="type of the stored full-precision weights (default: the source's)",
    )
    parser.add_argument(
        "--expert-format",
        choices=("nested", "plain"),
        help="nested: full-precision experts as what their INT4 draft does not say, half the bytes "
        "without loss, for bfloat16; plain: as they are (default: nested if possible)",
    )
    parser.add_argument("--force", action="store_true", help="replace another conversion at DST")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code."""
    options = _parser().parse_args(arguments)
    try:
        with interrupts(_SIGNALS):
            return _convert(options)
    except KeyboardInterrupt:
        print(_interrupted_message(options.destination), file=sys.stderr)
        return EXIT_INTERRUPTED


def _convert(options: argparse.Namespace) -> int:
    """Converts and reports; JAX is imported only here."""
    with importing(_SIGNALS):
        import orbax.checkpoint  # noqa: F401  # seconds; writing the first part would import it

        from convert.conversion import convert_checkpoint
        from convert.progress import TerminalProgress
        from specter_jax.errors import SpecterError

    started = time.perf_counter()
    try:
        with contextlib.nullcontext() if options.quiet else TerminalProgress() as progress:
            result = convert_checkpoint(
                options.source,
                options.destination,
                group_size=options.group_size,
                dtype=options.dtype,
                expert_format=options.expert_format,
                force=options.force,
                progress=progress,
            )
    except (SpecterError, OSError) as error:
        note = _state_note(options.destination) if isinstance(error, OSError) else ""
        print(f"error: {_one_line(error)}{note}", file=sys.stderr)
        return EXIT_ERROR
    if options.quiet:
        return 0
    if result.already_there:
        print(f"{result.path}: already converted from this source with these options")
        return 0
    total_bytes = sum(record.bytes for record in result.manifest.files.values())
    seconds = time.perf_counter() - started
    kept = f", {result.num_resumed} parts kept from before" if result.num_resumed else ""
    print(f"{result.path}: {total_bytes / 1e6:.1f} MB in {seconds:.1f} s{kept}")
    return 0


def _one_line(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return " ".join(str(error).split())


def _interrupted_message(destination: str) -> str:
    return f"interrupted{_state_note(destination) or ': nothing was finished, nothing is left'}"


def _state_note(destination: str) -> str:
    """Says what is there of a conversion that did not come to its end, and how to go on."""
    from pathlib import Path

    from convert.destination import is_finished
    from convert.workspace import is_resumable, partial_path

    try:
        partial = partial_path(Path(destination))
        if is_resumable(partial):
            return f"; finished parts are in {partial}, the same command goes on from there"
        if is_finished(Path(destination)):
            return f"; {destination} is complete, the same command tidies up"
    except (OSError, ValueError):  # a name that cannot exist
        pass
    return ""
