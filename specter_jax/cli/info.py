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
        parts.add_row(name, format_size(value) if name.endswith("_bytes") else str(value))
    console.print(parts)
    table = Table(title="What a memory budget buys", title_justify="left")
    for heading in ("GPU memory", "expert slots", "share of experts"):
        table.add_column(heading, justify="right")
    for row in fields["budgets"]:
        size = row["gpu_memory_bytes"]
        cells = (format_size(size), f"{row['expert_slots']:,}", f"{row['share']:.1%}")
        table.add_row(*cells, style="bold" if size == marked else "")
    console.print(table)
