"""`specter generate`: text to standard output as it comes, statistics to standard error."""

import argparse
import json
import sys
from typing import TYPE_CHECKING, TextIO

from specter_jax.cli.arguments import sampling_config
from specter_jax.cli.session import (
    check_distinct,
    check_model,
    check_output,
    load_model,
    prepare_environment,
    prompts_of,
)
from specter_jax.output import write_text_atomically
from specter_jax.text import check_stop

if TYPE_CHECKING:
    from specter_jax.api import GenerationResult
    from specter_jax.trace import Trace

HEADER_WIDTH = 60


def run(options: argparse.Namespace) -> None:
    """Generate from the prompts; raises SpecterError or OSError."""
    sampling = sampling_config(options)
    stop = check_stop(options.stop)
    prompts = prompts_of(options)
    check_model(options.model)
    check_output("--stats", options.stats)
    check_output("--trace", options.trace)
    check_distinct(
        {"--prompts": options.prompts, "--stats": options.stats, "--trace": options.trace}
    )

    prepare_environment()
    _note_unused_depth(options)
    from specter_jax.api import generate
    from specter_jax.trace import Trace

    batch_size = options.batch_size = min(options.batch_size, len(prompts))
    model = load_model(options)
    trace = Trace() if options.trace else None
    printer = None if options.json else StreamPrinter(prompts, batch_size, sys.stdout)
    result = generate(
        model,
        prompts,
        max_new_tokens=options.max_new_tokens,
        depth=options.depth,
        policy=options.policy,
        temperature=sampling.temperature,
        top_k=sampling.top_k,
        top_p=sampling.top_p,
        seed=sampling.seed,
        stop=stop,
        chat=options.chat,
        ignore_eos=options.ignore_eos,
        batch_size=batch_size,
        on_text=printer,
        trace=trace,
    )
    # Results first: a full disk must not lose them. Nor may a reader that goes away lose the files.
    try:
        _print_results(result, printer)
        if not options.quiet and not options.json:
            print_statistics(result.stats)
    finally:
        _write_files(options, result, trace)


def _print_results(result: "GenerationResult", printer: "StreamPrinter | None") -> None:
    """What the printer still has, or one JSON object a prompt."""
    if printer is None:
        rows = zip(result.texts, result.tokens, result.prompt_stats, strict=True)
        for text, tokens, stats in rows:
            line = {"text": text, "tokens": tokens, "stats": stats.to_dict()}
            print(json.dumps(line, ensure_ascii=False))
    else:
        printer.finish()
    sys.stdout.flush()


def _write_files(
    options: argparse.Namespace, result: "GenerationResult", trace: "Trace | None"
) -> None:
    """Both files, though one of them cannot be written; raises OSError."""
    try:
        if options.stats:
            text = json.dumps(result.stats.to_dict(), indent=1) + "\n"
            write_text_atomically(options.stats, text)
    finally:
        if trace is not None:
            trace.write(options.trace)


def _note_unused_depth(options: argparse.Namespace) -> None:
    """Says so if a depth was asked for that the policy has no use for."""
    from specter_jax.offload import get_policy

    if options.depth and options.depth != "auto" and not get_policy(options.policy).speculative:
        print(f"note: {options.policy} does not draft; --depth is not used", file=sys.stderr)


def print_statistics(stats) -> None:
    """The table of statistics, on standard error."""
    from rich.console import Console

    from specter_jax.stats import render_table

    sys.stdout.flush()
    Console(stderr=True).print(render_table(stats))


class StreamPrinter:
    """Writes the first unfinished prompt's text as it comes, and that of others when its turn is.

    Prompts come in batches, in order: text of a later batch means that earlier ones are finished.
    With several prompts each output begins with a line that shows its prompt.
    """

    def __init__(self, prompts: list[str], batch_size: int, file: TextIO):
        self._prompts = prompts
        self._batch_size = batch_size
        self._file = file
        self._waiting = [""] * len(prompts)
        self._current = 0
        self._num_begun = 0

    def __call__(self, index: int, text: str) -> None:
        """New text of a prompt."""
        while self._current < index - index % self._batch_size:
            self._next()
        if index == self._current:
            self._begin()
            self._write(text)
        else:
            self._waiting[index] += text

    def finish(self) -> None:
        """Write what still waits."""
        while self._current < len(self._prompts):
            self._next()

    def _next(self) -> None:
        self._begin()
        self._write("\n")
        self._current += 1

    def _begin(self) -> None:
        """Open the current prompt's output, once: its header and what has waited."""
        if self._num_begun > self._current:
            return
        self._num_begun = self._current + 1
        if len(self._prompts) > 1:
            number = f"{self._current + 1}/{len(self._prompts)}"
            self._write(f"--- {number}: {_shortened(self._prompts[self._current])}\n")
        self._write(self._waiting[self._current])

    def _write(self, text: str) -> None:
        if text:
            self._file.write(text)
            self._file.flush()


def _shortened(prompt: str) -> str:
    line = " ".join(prompt.split())
    return line if len(line) <= HEADER_WIDTH else line[: HEADER_WIDTH - 3] + "..."
