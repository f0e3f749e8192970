"""`specter info`: what a model is and what a memory budget buys."""

import argparse
import json
from typing import Any

from specter_jax.cli.session import check_model, prepare_environment
from specter_jax.sizes import format_size


def run(options: argparse.Namespace) -> None:
    """Print a table or a JSON object; raises SpecterError."""
    check_model(options.model)
    prepare_environment()
    from specter_jax.info import info

    fields = info(
        options.model,
        gpu_memory=options.gpu_memory,
        dtype=options.dtype,
        max_context=options.max_context,
        max_batch=options.batch_size,
        cache_dir=options.cache_dir,
    )
    if options.json:
        print(json.dumps(fields, indent=1))
    else:
        _print_tables(fields, marked=options.gpu_memory)


def _print_tables(fields: dict[str, Any], marked: int | None) -> None:
    from rich.console import Console
    from rich.table import Table

    console = Console()
    parts = Table(title=fields["path"], title_justify="left", show_header=False)
    for name, value in fields.items():
        if name in ("path", "budgets"):
            continue
        if value is not None:
            parts.add_row(name, _shown(name, value))
    console.print(parts)
    nested = fields["expert_format"] == "nested"
    table = Table(title="What a memory budget buys", title_justify="left")
    headings = ("GPU memory", "expert slots", "share of experts")
    if nested:
        headings += ("if plain", "share if plain")
    for heading in headings:
        table.add_column(heading, justify="right")
    for row in fields["budgets"]:
        size = row["gpu_memory_bytes"]
        cells = (format_size(size), f"{row['expert_slots']:,}", f"{row['share']:.1%}")
        if nested:
            slots, share = row["plain_expert_slots"], row["plain_share"]
            cells += ("-", "-") if slots is None else (f"{slots:,}", f"{share:.1%}")
        table.add_row(*cells, style="bold" if size == marked else "")
    console.print(table)


def _shown(name: str, value: Any) -> str:
    """A field for people: sizes and shares with their units."""
    if name.endswith("_bytes"):
        return format_size(value)
    if "_share" in name:
        return f"{value:.2%}"
    return f"{value:.2f}" if isinstance(value, float) else str(value)
