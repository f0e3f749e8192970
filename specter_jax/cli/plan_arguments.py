"""What `specter plan` accepts."""

from collections.abc import Callable
from typing import Any

from specter_jax.cli.option_types import checked, depth_option, positive, rate
from specter_jax.planner.cards import CARDS, get_card
from specter_jax.planner.policies import PREDICTABLE
from specter_jax.sizes import parse_size

DEFAULT_PROMPTS, DEFAULT_TOKENS = 4, 64
DEFAULT_TEXT = "greedy"

Add = Callable[..., None]


def add_plan(commands: Any, add_policy: Add, add_context: Add) -> None:
    """Adds the subcommand; the functions add the options that others have too."""
    parser = commands.add_parser(
        "plan", help="predict time per token, best depth and hit rate on other hardware"
    )
    parser.add_argument(
        "model", metavar="MODEL", help="a converted directory, or one with a config.json"
    )
    hardware = parser.add_argument_group("hardware, by its nominal figures")
    hardware.add_argument(
        "--card",
        type=checked(get_card),
        metavar="NAME",
        help=f"one of {', '.join(CARDS)}",
    )
    hardware.add_argument(
        "--bandwidth", type=rate, metavar="TB/s", help="of device memory (default: the card's)"
    )
    hardware.add_argument(
        "--link",
        type=rate,
        metavar="GB/s",
        help="from host to device, one direction (default: the card's)",
    )
    hardware.add_argument(
        "--gpu-memory",
        type=checked(parse_size),
        action="append",
        metavar="SIZE",
        help="a budget, such as 16GiB; may be given several times (default: usual sizes up to the "
        "card's memory)",
    )
    parser.add_argument(
        "--expert-format",
        choices=("nested", "plain"),
        help="of full-precision experts (default: the model's own, or nested)",
    )
    parser.add_argument(
        "--depth",
        type=checked(depth_option),
        action="append",
        metavar="K|auto",
        help="a depth; may be given several times (default 0, 1, 2, 4, 8 and 16)",
    )
    # Others are names all the same, so that their refusal can say why.
    add_policy(
        parser,
        PREDICTABLE,
        "; those that guess the next layer's experts cannot be predicted from a routing trace",
    )
    add_context(parser)
    routing = parser.add_argument_group("routing")
    source = routing.add_mutually_exclusive_group()
    source.add_argument("--trace", metavar="FILE.npz", help="a recorded routing trace")
    source.add_argument(
        "--record",
        metavar="FILE.npz",
        help="run the model here, with all experts on the device, and keep its routing",
    )
    routing.add_argument(
        "--text",
        choices=("greedy", "sampled"),
        default=DEFAULT_TEXT,
        help=f"which text of the --trace file (default {DEFAULT_TEXT}, all that other traces have)",
    )
    texts = routing.add_mutually_exclusive_group()
    texts.add_argument("--prompt", action="append", metavar="TEXT", help="a prompt to record")
    texts.add_argument(
        "--prompts",
        metavar="FILE.jsonl",
        help="prompts to record (default: built-in ones)",
    )
    routing.add_argument(
        "--num-prompts",
        type=positive,
        default=DEFAULT_PROMPTS,
        metavar="N",
        help=f"most prompts to replay (default {DEFAULT_PROMPTS})",
    )
    routing.add_argument(
        "--max-new-tokens",
        type=positive,
        default=DEFAULT_TOKENS,
        metavar="N",
        help=f"most tokens of each prompt (default {DEFAULT_TOKENS})",
    )
    parser.add_argument(
        "--calibration", metavar="FILE.json", help="measured costs (default: those of an H200)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object, no table")
