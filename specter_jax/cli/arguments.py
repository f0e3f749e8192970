"""What the `specter` command accepts. Loads neither JAX nor transformers."""

import argparse
import importlib.metadata
from collections.abc import Iterable
from typing import Any, NoReturn

from specter_jax.cli.option_types import checked, depth_option, positive
from specter_jax.cli.plan_arguments import add_plan
from specter_jax.cli.report_arguments import add_report
from specter_jax.controller import AUTO
from specter_jax.offload import DEFAULT_POLICY, POLICIES, get_policy
from specter_jax.runtime_config import DTYPES
from specter_jax.sampling_config import SamplingConfig
from specter_jax.sizes import parse_size
from specter_jax.systems import SYSTEMS, get_system

EXIT_ERROR = 2
DEFAULT_NEW_TOKENS = 64


class Parser(argparse.ArgumentParser):
    """Reports a bad argument in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_ERROR, f"error: {message} (see {self.prog} --help)\n")


class _SystemAction(argparse.Action):
    """Sets the policy and the depth of a named system."""

    def __call__(self, parser, namespace, value, option_string=None) -> None:
        for name, setting in value.options.items():
            setattr(namespace, name, setting)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `specter`; `options.command` names the module of `specter_jax.cli` to run."""
    parser = Parser(prog="specter", description="Mixture-of-experts inference on one GPU.")
    parser.add_argument("--version", action="version", version=f"specter {_version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_generate(commands)
    _add_info(commands)
    _add_profile(commands)
    add_plan(commands, _add_policy, _add_context)
    add_report(commands)
    return parser


def _version() -> str:
    """The installed version; "(not installed)" when run from a checkout."""
    try:
        return importlib.metadata.version("specter-jax")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"


def sampling_config(options: argparse.Namespace) -> SamplingConfig:
    """The sampling options, checked; raises InvalidRequestError."""
    return SamplingConfig(
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=options.seed,
    )


def _add_generate(commands: Any) -> None:
    parser = commands.add_parser("generate", help="generate text from prompts")
    _add_model(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument(
        "--prompt", action="append", metavar="TEXT", help="a prompt; may be given several times"
    )
    source.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help='a JSON object a line, with "prompt", or "turns" of which the first is taken',
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=DEFAULT_NEW_TOKENS,
        metavar="N",
        help=f"most tokens per prompt (default {DEFAULT_NEW_TOKENS})",
    )
    parser.add_argument(
        "--depth",
        type=checked(depth_option),
        default=AUTO,
        metavar="K|auto",
        help="tokens drafted before each verification, 0 to 16; 0 is plain decoding (default auto)",
    )
    _add_policy(parser)
    parser.add_argument(
        "--system",
        action=_SystemAction,
        type=checked(get_system),
        metavar="NAME",
        help="--policy and --depth of a system of the evaluation, which may follow to change them: "
        f"one of {', '.join(SYSTEMS)}",
    )
    _add_memory(parser)
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 (default) is greedy"
    )
    sampling.add_argument(
        "--top-p",
        type=float,
        default=1.0,
        metavar="P",
        help="sample among the most probable tokens that make up P (default 1: all)",
    )
    sampling.add_argument(
        "--top-k",
        type=int,
        default=0,
        metavar="K",
        help="sample among the K most probable tokens (default 0: all)",
    )
    sampling.add_argument(
        "--seed",
        type=int,
        default=0,
        metavar="S",
        help="equal seeds give equal samples (default 0)",
    )
    text = parser.add_argument_group("text")
    text.add_argument("--chat", action="store_true", help="use the tokenizer's chat template")
    text.add_argument(
        "--stop",
        action="append",
        default=[],
        metavar="TEXT",
        help="end the output before this text; may be given several times",
    )
    text.add_argument(
        "--ignore-eos", action="store_true", help="go on after the end-of-sequence token"
    )
    parser.add_argument(
        "--batch-size",
        type=positive,
        default=1,
        metavar="B",
        help="prompts decoded together (default 1)",
    )
    output = parser.add_argument_group("output")
    output.add_argument(
        "--json", action="store_true", help="one JSON object a prompt: text, tokens, stats"
    )
    output.add_argument("--stats", metavar="FILE.json", help="write the statistics")
    output.add_argument("--trace", metavar="FILE.json", help="write a timeline for Perfetto")
    output.add_argument("--quiet", action="store_true", help="no table of statistics")


def _add_info(commands: Any) -> None:
    parser = commands.add_parser("info", help="what a model is and what a memory budget buys")
    _add_model(parser)
    parser.add_argument(
        "--gpu-memory", type=checked(parse_size), metavar="SIZE", help="a budget, such as 16GiB"
    )
    _add_context(parser)
    parser.add_argument(
        "--batch-size", type=positive, default=1, metavar="B", help="sequences at once (default 1)"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help=f"of computation (default {DTYPES[0]})"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object")


def _add_profile(commands: Any) -> None:
    parser = commands.add_parser(
        "profile", help="time per token, working set and acceptance over depth"
    )
    _add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt to measure on")
    source.add_argument(
        "--prompts", metavar="FILE.jsonl", help="prompts to measure on (default: built-in ones)"
    )
    parser.add_argument(
        "--max-new-tokens",
        type=positive,
        default=DEFAULT_NEW_TOKENS,
        metavar="N",
        help=f"most tokens per prompt (default {DEFAULT_NEW_TOKENS})",
    )
    _add_policy(parser)
    _add_memory(parser)
    parser.add_argument(
        "--batch-size", type=positive, default=1, metavar="B", help="sequences at once (default 1)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object, no table")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        help="where to draw it, .svg, .png or .pdf (default specter-profile.svg)",
    )


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="a converted directory, or a Hugging Face one"
    )
    parser.add_argument(
        "--cache-dir", metavar="DIR", help="where a Hugging Face model's conversion is kept"
    )


def _add_policy(
    parser: argparse.ArgumentParser, names: Iterable[str] = tuple(POLICIES), note: str = ""
) -> None:
    """names: those that help offers; every policy's name is read. note: said behind them."""
    parser.add_argument(
        "--policy",
        type=checked(lambda name: get_policy(name).name),
        default=DEFAULT_POLICY,
        metavar="NAME",
        help=f"one of {', '.join(names)} (default {DEFAULT_POLICY}){note}",
    )


def _add_memory(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("memory")
    budget = group.add_mutually_exclusive_group()
    budget.add_argument(
        "--gpu-memory", type=checked(parse_size), metavar="SIZE", help="a budget, such as 16GiB"
    )
    budget.add_argument(
        "--expert-slots",
        type=positive,
        metavar="N",
        help="full-precision experts on the device (default, without a budget: all)",
    )
    group.add_argument(
        "--dtype", choices=DTYPES, default=DTYPES[0], help=f"of computation (default {DTYPES[0]})"
    )
    _add_context(group)
    group.add_argument(
        "--verify",
        choices=("sizes", "checksums"),
        default="sizes",
        help="how the model's files are checked (default sizes)",
    )


def _add_context(parser: Any) -> None:
    parser.add_argument(
        "--max-context",
        type=positive,
        metavar="N",
        help="longest prompt and output, tokens (default: the model's, at most 4096)",
    )
