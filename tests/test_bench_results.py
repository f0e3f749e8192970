"""The result file of the benchmarks: merging, what the parts write, and the README's table."""

import copy
import json
import textwrap
from pathlib import Path

import pytest

from scripts.bench import h200, results_file, table
from tests.conftest import ROOT

DATE = "2026-01-02T03:04:05+00:00"
LATER = "2026-02-03T04:05:06+00:00"


def cell(tpot: float, **changes):
    entry = {
        "model": "m",
        "budget_gib": 16,
        "expert_format": "plain",
        "policy": "lookahead",
        "depth": 8,
        "dataset": "d",
        "batch": 1,
        "date": DATE,
        "stats": {"tpot_ms": tpot},
    }
    return entry | changes


def test_a_rerun_replaces_its_cells_and_keeps_the_others():
    old = {"meta": {"date": DATE, "gpu": "g"}, "cells": [cell(1.0), cell(2.0, depth=4)]}
    before = copy.deepcopy(old)
    new = {
        "meta": {"date": LATER},
        "cells": [cell(3.0, date=LATER), cell(4.0, budget_gib=24, date=LATER)],
    }
    result = results_file.merged(old, new)
    assert old == before
    assert result["cells"] == [new["cells"][0], old["cells"][1], new["cells"][1]]
    assert result["meta"] == {"date": LATER, "gpu": "g"}
    assert results_file.merged(result, new) == result
    assert results_file.merged(result, {})["cells"] == result["cells"]


@pytest.mark.parametrize(
    "field", ["model", "budget_gib", "expert_format", "policy", "depth", "dataset", "batch"]
)
def test_cells_that_differ_in_one_field_of_the_key_are_two(field):
    other = cell(2.0, **{field: "another"})
    result = results_file.merged({"cells": [cell(1.0)]}, {"cells": [other]})
    assert result["cells"] == [cell(1.0), other]


def test_mappings_merge_by_name_and_unknown_sections_stay():
    old = {"machine": {"m plain": {"a": 1}, "n plain": {"a": 2}}, "planner": [1], "cells": []}
    new = {"machine": {"m plain": {"b": 3}}, "overlap": {"m plain": {"both_ms": 4}}}
    result = results_file.merged(old, new)
    assert result["machine"] == {"m plain": {"b": 3}, "n plain": {"a": 2}}
    assert result["overlap"] == {"m plain": {"both_ms": 4}}
    assert result["planner"] == [1]


def test_a_file_survives_writing_and_has_a_line_per_entry(tmp_path):
    path = tmp_path / "new" / "h200.json"
    assert results_file.read(path) == {}
    content = results_file.merged(
        {"meta": {"date": DATE}, "other": 3}, {"cells": [cell(1.0), cell(2.0, depth=4)]}
    )
    results_file.write(path, content)
    assert results_file.read(path) == content
    assert sum('"tpot_ms"' in line for line in path.read_text().splitlines()) == 2
    assert [file.name for file in path.parent.iterdir()] == ["h200.json"]
    path.write_text("[1]")
    with pytest.raises(ValueError, match="expected a JSON object"):
        results_file.read(path)


def test_sections_of_what_cells_wrote():
    measured = {
        "cells": [cell(1.0, tokens=[[1, 2]])],
        "prefill": [{"model": "m", "prompt_tokens": 512, "ttft_ms": 3.0}],
        "machine": {"gpu": "g"},
    }
    sections = results_file.from_cells(measured, "m", "plain", LATER)
    assert sections["cells"] == [cell(1.0)]
    assert sections["prefill"][0]["date"] == LATER
    assert sections["machine"] == {"m plain": {"gpu": "g", "date": LATER}}
    assert "overlap" not in sections
    assert results_file.from_cells({}, "m", "plain", LATER) == {"cells": [], "prefill": []}


def test_sections_of_what_kernels_wrote():
    rows = [{"kernel": "ffn", "shape": "s", "num_rows": 9, "us": 2.0}]
    content = {"device": "g", "jax": "1", "bandwidth": {"copy": 4e12}, "rows": rows}
    sections = results_file.from_kernels(content, DATE)
    assert sections["kernels"] == [rows[0] | {"date": DATE}]
    machine = {"gpu": "g", "jax": "1", "copy_bytes_per_s": 4e12, "date": DATE}
    assert sections["machine"] == {"kernels": machine}


def test_sections_of_what_steps_printed():
    output = """[  31.0 s] copy 4.13 TB/s, step reads 2.90 GB, 0.70 ms
[  46.0 s] draft of 4 steps {}: lower 3.5 s, compile 20.1 s, 2.060 to 2.113 ms a step, 2.94 x its \
bytes; issued in 6.20 ms
[  46.2 s] verification of 9 {'xla_gpu_autotune_level': 0}: lower 11.8 s, compile 4.3 s, 6.67 to \
7.09 ms, 940 experts, 1.48 x its bytes
[  50.0 s] peak 41.20 GiB
"""
    draft, verification = results_file.from_steps(output, "m", DATE)["steps"]
    times = {"lower_s": 3.5, "compile_s": 20.1, "least_ms": 2.06, "most_ms": 2.113}
    assert draft == times | {
        "model": "m",
        "part": "draft",
        "count": 4,
        "options": "{}",
        "times_bytes": 2.94,
        "issued_ms": 6.2,
        "date": DATE,
    }
    assert (verification["part"], verification["count"], verification["experts"]) == (
        "verification",
        9,
        940,
    )
    assert (verification["least_ms"], verification["times_bytes"]) == (6.67, 1.48)
    assert results_file.from_steps("error", "m", DATE) == {"steps": []}


def test_steps_still_prints_what_is_read():
    # The pieces of the two lines in the script itself: a change of them must change the reader.
    source = (ROOT / "scripts" / "bench" / "steps.py").read_text()
    for piece in ("draft of {args.steps} steps", "verification of {args.tokens}", "x its bytes"):
        assert piece in source


def test_the_readme_shows_the_table_of_the_results():
    results = ROOT / "scripts" / "bench" / "results"
    assert table.between_markers((ROOT / "README.md").read_text()) == table.render(results)


def test_rows_of_the_table(tmp_path):
    stats = {
        "tpot_ms": 20.0,
        "ttft_ms": 500.0,
        "acceptance_rate": 0.9,
        "hit_rate": 0.5,
        "new_tokens": 12,
        "sequences": 2,
        "bytes_host_to_device": 30e6,
        "prefill_bytes_host_to_device": 10e6,
        "peak_device_bytes": 15 * 2**30,
    }
    beside = {"tpot_ms": 40.0, "identical": 1, "of": 2}
    entry = cell(0.0, stats=stats, floor_ms={"tpot_ms": 10.0}, plain=beside)
    baseline = cell(0.0, stats={"tpot_ms": 900.0, "ttft_ms": 1000.0}, system="transformers")
    baseline = {k: v for k, v in baseline.items() if k not in ("expert_format", "policy", "depth")}
    results_file.write(tmp_path / "h200.json", {"cells": [entry], "baseline": [baseline]})
    other = {"system": "llama.cpp", "model": "m", "budget_gib": 16, "tpot_ms": 26.1}
    (tmp_path / "others.json").write_text(json.dumps({"others": [other | {"ttft_ms": 2100}]}))
    rows = [line for line in table.render(tmp_path).splitlines() if line.startswith("| m ")]
    assert rows == [
        "| m | 16 | lookahead, plain | 8 | 12 | 20.0 | 500 | 90 % | 50 % | 2 | 15.0 | 10.0 | 2.0 "
        "| 40.0, 1 of 2 |",
        "| m | 16 | transformers | - | - | 900 | 1000 | - | - | - | - | - | - | - |",
        "| m | 16 | llama.cpp * | - | - | 26.1 | 2100 | - | - | - | - | - | - | - |",
    ]


def test_the_table_leaves_sweeps_batches_and_other_texts_out():
    cells = [
        cell(1.0),
        cell(2.0, dataset="e"),
        cell(3.0, depth=4),
        cell(4.0, depth="auto"),
        cell(5.0, batch=4),
        cell(6.0, policy="sp-l"),
        cell(7.0, policy="lru", depth=0),
    ]
    assert [entry["stats"]["tpot_ms"] for entry in table._shown(cells)] == [1.0, 4.0, 6.0, 7.0]


def test_a_table_without_results_is_an_error(tmp_path):
    with pytest.raises(SystemExit, match=r"h200\.json"):
        table.render(tmp_path)
    with pytest.raises(SystemExit, match="markers"):
        table.between_markers("no table here")
    assert Path(table.__file__).parent == ROOT / "scripts" / "bench"


def test_tasks_cover_models_and_formats_in_order():
    args = h200.parse(["--data", "d", "--models", "phi-3.5-moe", "qwen1.5-moe-a2.7b"])
    names = [task.name for task in h200.tasks(args)]
    models = ["phi-3.5-moe", "qwen1.5-moe-a2.7b"]
    assert names == [
        *(f"steps {model}" for model in models),
        *(f"cells {model} {form}" for model in models for form in ("nested", "plain")),
        "kernels",
        "formats",
        *(f"baseline {model}" for model in models),
        "planner",
    ]
    options = ["--parts", "cells", "--formats", "plain", "--budgets", "16", "24", "--depths", "4"]
    quick = h200.parse(["--data", "d", "--quick", *options])
    (first, *_) = h200.tasks(quick)
    line = " ".join(first.arguments)
    assert "--format plain --budgets 16 24 --policies lookahead sp-l --depths 4" in line
    with pytest.raises(SystemExit):
        h200.parse(["--data", "d", "--parts", "everything"])


def test_formats_of_the_draft_leave_the_machine_alone():
    rows = [{"kernel": "draft, INT4", "shape": "s", "num_rows": 1, "us": 2.0}]
    sections = results_file.from_kernels({"device": "g", "jax": "1", "rows": rows}, DATE)
    assert sections == {"kernels": [rows[0] | {"date": DATE}]}


FAKE_ANY = """
    import json, os, sys, time
    out = sys.argv[sys.argv.index("--out") + 1]
    limit = float(sys.argv[sys.argv.index("--limit-s") + 1])
    model = sys.argv[sys.argv.index("--model") + 1]
    about = {"gpu": os.environ["CUDA_VISIBLE_DEVICES"], "limit": limit}
    json.dump({"baseline": [{"model": model, "stats": about}]}, open(out, "w"))
    time.sleep(1)
"""


def test_parts_run_side_by_side_and_share_the_time(tmp_path, monkeypatch, capfd):
    (tmp_path / "transformers_baseline.py").write_text(textwrap.dedent(FAKE_ANY))
    monkeypatch.setattr(h200, "BENCH", tmp_path)
    monkeypatch.setattr(h200, "SPARE_S", 1.0)
    models = ["deepseek-v2-lite", "qwen1.5-moe-a2.7b", "phi-3.5-moe"]
    options = ["--data", "d", "--models", *models, "--parts", "baseline", "--gpus", "2", "5"]
    assert h200.main([*options, "--out", str(tmp_path), "--limit-s", "90"]) == 0
    assert "== " in capfd.readouterr().out
    found = results_file.read(tmp_path / "h200.json")["baseline"]
    assert {entry["model"] for entry in found} == set(models)
    stats = [entry["stats"] for entry in found]
    assert {one["gpu"] for one in stats} == {"2", "5"}
    # Two lanes for three parts: two thirds of the time for the first, all of it at the end.
    limits = sorted(one["limit"] for one in stats)
    assert limits[0] == pytest.approx(2 / 3 * 90 - 1, abs=5)
    assert limits[-1] > 80


FAKE_CELLS = """
    import json, os, sys, time
    out = sys.argv[sys.argv.index("--out") + 1]
    form = sys.argv[sys.argv.index("--format") + 1]
    cell = {"model": "deepseek-v2-lite", "budget_gib": 16, "expert_format": form, "stats": {}}
    json.dump({"cells": [cell], "machine": {"gpu": "g"}}, open(out, "w"))
    open(out.replace(".json", ".timeline.json"), "w").write("{}")
    print("measured", form, flush=True)
    if form == "plain":
        time.sleep(60)
"""


def test_a_part_that_runs_out_of_time_keeps_what_it_measured(tmp_path, monkeypatch, capfd):
    (tmp_path / "cells.py").write_text(textwrap.dedent(FAKE_CELLS))
    monkeypatch.setattr(h200, "BENCH", tmp_path)
    monkeypatch.setattr(h200, "SPARE_S", 0.1)
    out = tmp_path / "results"
    options = ["--data", "d", "--models", "deepseek-v2-lite", "--parts", "cells"]
    assert h200.main([*options, "--out", str(out), "--limit-s", "4"]) == 1
    printed = capfd.readouterr().out
    assert "measured nested" in printed
    assert "failed: cells deepseek-v2-lite plain" in printed
    content = results_file.read(out / "h200.json")
    assert [cell["expert_format"] for cell in content["cells"]] == ["nested", "plain"]
    assert all(cell["date"] for cell in content["cells"])
    assert set(content["machine"]) == {"deepseek-v2-lite nested", "deepseek-v2-lite plain"}
    assert content["meta"]["command"].endswith("--limit-s 4")
    assert content["meta"]["versions"]["jax"]
    assert (out / "deepseek-v2-lite.timeline.json").exists()


def test_files_from_elsewhere_are_taken_in(tmp_path):
    results_file.write(tmp_path / "new.json", {"cells": [cell(2.0), cell(3.0, depth=4)]})
    results_file.write(tmp_path / "h200.json", {"cells": [cell(1.0)], "planner": [5]})
    results_file.main([str(tmp_path / "new.json"), "--into", str(tmp_path / "h200.json")])
    content = results_file.read(tmp_path / "h200.json")
    assert content["cells"] == [cell(2.0), cell(3.0, depth=4)]
    assert content["planner"] == [5]
