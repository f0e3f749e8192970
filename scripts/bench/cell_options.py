"""The options of `cells.py` that say what is measured, which `h200.py` passes on."""

from __future__ import annotations

import argparse
from pathlib import Path

from specter_jax.controller import AUTO
from specter_jax.offload import DEFAULT_POLICY
from specter_jax.systems import SYSTEMS

PREFILL_SYSTEMS = ["specter", "specmoeoff", "mo"]
"""Of figure 10, in the order of measuring; the others' prefill is one of these."""


def add_cell_options(parser: argparse.ArgumentParser) -> None:
    """Adds them; `with_defaults` fills in what depends on others."""
    add = parser.add_argument
    add("--budgets", type=int, nargs="+", help="GiB (default: the model's)")
    add("--policies", nargs="+", default=[DEFAULT_POLICY])
    add("--policies-at", type=int, nargs="+", help="GiB (default: every budget)")
    add("--exact-at", type=int, nargs="+", help="GiB (default: every budget)")
    add("--depths", type=depth, nargs="+", default=[8], help="the first for every policy")
    add("--systems", nargs="*", default=[], choices=SYSTEMS, help="on every dataset")
    add("--auto-at", type=int, nargs="*", help="GiB where systems choose their depth (sweep's)")
    add("--datasets", nargs="+", default=["mt_bench"], help="the first for everything")
    add("--sweep-at", type=int, help="GiB of sweeps, prefill and overlap (default: middle budget)")
    add("--sweep-depths", type=depth, nargs="*", default=[])
    add("--batches", type=int, nargs="*", default=[], help="sequences decoded together")
    add("--batch-policies", nargs="+", default=[DEFAULT_POLICY])
    add("--prefill", type=int, nargs="*", default=[], help="prompt lengths, below the context")
    add("--prefill-systems", nargs="+", default=PREFILL_SYSTEMS, choices=SYSTEMS)
    add("--overlap", action="store_true")
    add("--prompts", type=int, default=3)
    add("--slow-prompts", type=int, default=1, help="of a cell that would take too long")
    add("--new-tokens", type=int, default=128)
    add("--batch-new-tokens", type=int, default=32)
    add("--warm-tokens", type=int, default=32)
    add("--cell-s", type=float, default=15.0, help="seconds that a cell may take")
    add("--limit-s", type=float, default=float("inf"), help="for everything, loading included")
    add("--missing", type=Path, metavar="FILE", help="leave out what this result file has")


def depth(text: str) -> int | str:
    """A number, or "auto"; raises ValueError."""
    return text if text == AUTO else int(text)


def with_defaults(args: argparse.Namespace) -> argparse.Namespace:
    """Budgets in ascending order, sweeps at the middle one unless another was given."""
    args.budgets = sorted(args.budgets)
    if args.sweep_at is None:
        args.sweep_at = args.budgets[len(args.budgets) // 2]
    if args.auto_at is None:
        args.auto_at = [args.sweep_at]
    return args
