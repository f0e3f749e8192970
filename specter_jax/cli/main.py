"""Entry of the `specter` command: picks the subcommand and turns errors into exit codes."""

import importlib
import os
import sys
from collections.abc import Sequence

from specter_jax.entry import EXIT_INTERRUPTED, importing, interrupts

with importing():
    from specter_jax.cli.arguments import EXIT_ERROR, build_parser
    from specter_jax.errors import SpecterError
    from specter_jax.output import warnings_as_notes

EXIT_OK = 0
# What a shell reports for a process ended by SIGPIPE.
EXIT_BROKEN_PIPE = 141

_OUT_OF_MEMORY = "RESOURCE_EXHAUSTED"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code.

    0 is success, 2 an error told in one line on standard error, 130 an interruption, 141 a reader
    of the output that went away.
    """
    try:
        options = build_parser().parse_args(arguments)
        with importing():
            command = importlib.import_module(f"specter_jax.cli.{options.command}")
        with interrupts(), warnings_as_notes():
            command.run(options)
            sys.stdout.flush()
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # Nothing can be written any more; keep the interpreter from trying when it exits.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_BROKEN_PIPE
    except SpecterError as error:
        return _fail(str(error))
    except OSError as error:
        place = f"{error.filename}: " if error.filename else ""
        return _fail(f"{place}{error.strerror or error}")
    except RuntimeError as error:
        if _OUT_OF_MEMORY not in str(error):
            raise
        return _fail(
            "the device is out of memory; give a smaller --gpu-memory, fewer --expert-slots or a "
            "smaller --max-context"
        )
    return EXIT_OK


def _fail(message: str) -> int:
    print(f"error: {' '.join(message.split())}", file=sys.stderr)
    return EXIT_ERROR


if __name__ == "__main__":
    sys.exit(main())
