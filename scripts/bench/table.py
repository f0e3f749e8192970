"""The README's table of true-size runs, made from the JSON under `results/`.

    python scripts/bench/table.py [--results DIR] [--write]

Prints it, or with `--write` puts it into README.md between its markers. `h200.json` has what was
measured by `h200.py`, of which single sequences on each model's first dataset are shown, without
the sweep over depths; `others.json` has figures of other systems that were measured earlier on the
same kind of machine, which the table marks with a star.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from scripts.bench import results_file

RESULTS = Path(__file__).with_name("results")
README = Path(__file__).parents[2] / "README.md"
BEGIN = "<!-- true-size table, by scripts/bench/table.py -->"
END = "<!-- end of true-size table -->"
GIB = 2**30

COLUMNS = (
    *("model", "GiB", "system, experts", "depth", "tokens", "TPOT, ms", "TTFT, ms"),
    *("acceptance", "hit rate", "MB moved a token", "peak GiB", "floor, ms", "TPOT / floor"),
    "plain decoding: TPOT, identical",
)


def render(results: Path) -> str:
    """The table as markdown; raises SystemExit where there is nothing to show."""
    content = results_file.read(results / "h200.json")
    entries = [*_shown(content.get("cells") or []), *(content.get("baseline") or [])]
    if not entries:
        raise SystemExit(f"{results / 'h200.json'}: nothing measured there")
    rows = [(_place(entry), _measured(entry)) for entry in entries]
    rows += [(_place(entry), _other(entry)) for entry in _others(results / "others.json")]
    # Stable: within a model and budget what was measured here comes first, in its order.
    rows.sort(key=lambda row: row[0])
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(cells for _, cells in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _shown(cells: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Cells of one sequence and a model's first dataset; of fixed depths the most common one."""
    single = [cell for cell in cells if (cell.get("batch") or 1) == 1]
    dataset: dict[str, Any] = {}
    for cell in single:
        dataset.setdefault(cell["model"], cell.get("dataset"))
    fixed = Counter(cell.get("depth") for cell in single if cell.get("depth") not in (0, "auto"))
    depths = [0, "auto", None, *(depth for depth, _ in fixed.most_common(1))]
    return [
        cell
        for cell in single
        if cell.get("dataset") == dataset[cell["model"]] and cell.get("depth") in depths
    ]


def _place(entry: Mapping[str, Any]) -> tuple[str, float]:
    """By what rows are ordered; what is all on the GPU comes last."""
    budget = entry.get("budget_gib")
    return str(entry["model"]), float("inf") if budget is None else float(budget)


def _budget(entry: Mapping[str, Any]) -> str:
    budget = entry.get("budget_gib")
    return "all on the GPU" if budget is None else f"{budget:g}"


def _measured(cell: Mapping[str, Any]) -> list[str]:
    stats = cell["stats"]
    kinds = (cell.get("system") or cell.get("policy"), cell.get("expert_format"))
    floor = (cell.get("floor_ms") or {}).get("tpot_ms")
    peak = stats.get("peak_device_bytes")
    beside = cell.get("plain")
    tpot = stats.get("tpot_ms")
    return [
        str(cell["model"]),
        _budget(cell),
        ", ".join(str(kind) for kind in kinds if kind),
        _or_dash(cell.get("depth"), "{}"),
        _or_dash(stats.get("new_tokens"), "{}"),
        _milliseconds(tpot),
        _or_dash(stats.get("ttft_ms"), "{:.0f}"),
        _percent(stats.get("acceptance_rate")),
        _percent(stats.get("hit_rate")),
        _or_dash(_moved(stats), "{:.0f}"),
        _or_dash(peak and peak / GIB, "{:.1f}"),
        _milliseconds(floor),
        _or_dash(floor and tpot and tpot / floor, "{:.1f}"),
        f"{_milliseconds(beside['tpot_ms'])}, {beside['identical']} of {beside['of']}"
        if beside
        else "-",
    ]


def _moved(stats: Mapping[str, Any]) -> float | None:
    """Megabytes over the link for each token after the first of its sequence."""
    names = ("bytes_host_to_device", "prefill_bytes_host_to_device", "new_tokens", "sequences")
    moved, prefill, tokens, sequences = (stats.get(name) for name in names)
    if None in (moved, prefill, tokens, sequences) or tokens == sequences:
        return None
    return (moved - prefill) / (tokens - sequences) / 1e6


def _other(entry: Mapping[str, Any]) -> list[str]:
    row = [str(entry["model"]), _budget(entry), f"{entry['system']} *", "-", "-"]
    row += [_milliseconds(entry.get("tpot_ms")), _or_dash(entry.get("ttft_ms"), "{:.0f}")]
    return row + ["-"] * (len(COLUMNS) - len(row))


def _others(path: Path) -> Iterable[Mapping[str, Any]]:
    return json.loads(path.read_text(encoding="utf-8"))["others"] if path.exists() else []


def _milliseconds(value: float | None) -> str:
    return _or_dash(value, "{:.0f}" if value is not None and value >= 100 else "{:.1f}")


def _percent(share: float | None) -> str:
    # Not rounded up to all of them.
    digits = 1 if share is not None and share > 0.995 else 0
    return "-" if share is None else f"{100 * share:.{digits}f} %"


def _or_dash(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def between_markers(readme: str) -> str:
    """The table as it stands in the README; raises SystemExit without markers."""
    begin, end = readme.find(BEGIN), readme.find(END)
    if not 0 <= begin < end:
        raise SystemExit(f"README.md: the markers {BEGIN} and {END} are not there")
    return readme[begin + len(BEGIN) : end].strip("\n")


def with_table(readme: str, table: str) -> str:
    """The README with another table between its markers."""
    old = between_markers(readme)
    return readme.replace(f"{BEGIN}\n{old}\n{END}", f"{BEGIN}\n{table}\n{END}")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--write", action="store_true", help="into README.md")
    args = parser.parse_args(argv)
    table = render(args.results)
    if args.write:
        README.write_text(with_table(README.read_text(encoding="utf-8"), table), encoding="utf-8")
    else:
        print(table)


if __name__ == "__main__":
    main()
