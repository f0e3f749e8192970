"""Made-up records of every section of the report, for tests that draw."""

from specter_jax.report import SECTIONS
from specter_jax.report.evaluation import SCHEMA

MODELS = ("alpha", "beta")
TASKS = ("stories", "sums")
SYSTEMS = ("mo", "specter")


def growth(**fields):
    return {**fields, "mean": 5.0, "p10": 3.0, "p90": 7.0, "min": 2, "max": 8, "verifications": 9}


def made_up_records(setting):
    """Two models in every section; figures are invented and mean nothing."""
    records = {section: [] for section in SECTIONS}
    for number, model in enumerate(MODELS, start=1):
        common = {"model": model, "setting": setting, "experts": 16, "top_k": 2}
        budget = {"budget": "a quarter"}
        records["match"].append(
            {
                **common,
                "observations": 100,
                "matched_counts": [1, 9, 90],
                "mean": 0.945,
                "per_layer": [0.99, 0.9],
                "per_request": [0.93, 0.96],
            }
        )
        records["distinct"].append({**common, "points": [growth(depth=1), growth(depth=4)]})
        records["batch_experts"].append(
            {**common, "depth": 4, "points": [growth(batch=1), growth(batch=2)]}
        )
        records["diversity"].append(
            {
                **common,
                "depth": 16,
                "tasks": [growth(task=task, requests=2) for task in TASKS],
                "distances": [[0.0, 0.3], [0.3, 0.0]],
                "halves": [0.1, None],
            }
        )
        records["depth"].append(
            {
                **common,
                **budget,
                "points": [{"depth": d, "tpot_ms": 10.0 / (d + number)} for d in (0, 1, 4)],
                "auto": {"depth": 4, "tpot_ms": 2.5},
            }
        )
        records["timeline"].append({**common, **budget, "depth": 4, "spans": made_up_spans()})
        for system in SYSTEMS:
            cell = {**common, **budget, "system": system, "tpot_ms": 4.0 * number}
            records["prefill"].append(
                {**cell, "tokens": 32, "prefill_ms": 9.0, "peak_device_bytes": 2**20}
            )
            records["batch"].append({**cell, "batch": 1, "tokens_per_s": 250.0})
            records["batch"].append({**cell, "batch": 2, "tokens_per_s": 400.0})
            for task in TASKS:
                records["end_to_end"].append({**cell, "dataset": task, "batch": 1})
            records["planner"].append(
                {**cell, "dataset": "x", "predicted_tpot_ms": 4.4, "measured_tpot_ms": 4.0}
            )
        for variant, time in (("full precision", 2.0), ("INT4, fused", 1.0)):
            step = {"format": variant, "batch": 1, "tpot_ms": time, "tokens_per_s": 1e3 / time}
            records["draft"].append({**common, **step})
        for order, time in (("token-wise", 3.0), ("expert-wise", 2.0)):
            layer = {"order": order, "positions": 5, "layer_ms": time}
            records["verification"].append({**common, **layer})
        for policy in ("lru", "lookahead"):
            shares = {"hit_rate": 0.9, "resident": 0.4, "prefetched": 0.5, "waited": 0.1}
            records["hit_rate"].append({**common, **budget, "policy": policy, "depth": 4, **shares})
    return records


def made_up_spans():
    def span(track, name, begin, end, **more):
        return {
            "track": track,
            "name": name,
            "args": {},
            "begin_us": begin,
            "end_us": end,
            **more,
        }

    return [
        span("draft", "chunk", 0.0, 400.0),
        span("transfers", "expert", 100.0, 500.0, in_flight=True),
        span("transfers", "expert", 450.0, 700.0, in_flight=True),
        span("verification", "verify", 600.0, 1000.0),
        span("waits", "routing", 650.0, 700.0),
    ]


def made_up_report(setting):
    """A report of those records, as `evaluation.measure` would have returned it."""
    return {
        "schema": SCHEMA,
        "meta": {
            "date": "2000-01-01T00:00:00+00:00",
            "processor": "abacus",
            "cores": 2,
            "memory_gib": 1.0,
            "system": "none",
            "device": "cpu",
            "python": "3",
            "versions": {"jax": "0"},
            "load_average_before": 0.1,
            "load_average_after": 2.0,
        },
        "settings": {"new_tokens": 4, "prompt_tokens": 8, "dtype": "float32"},
        "tasks": [{"task": task, "prompts": 2} for task in TASKS],
        "models": [{"model": model, "setting": setting, "expert_bytes": 2**20} for model in MODELS],
        "results": [],
        "records": made_up_records(setting),
    }


def cell(**fields):
    """A cell of a result file; figures are invented."""
    stats = {
        "tpot_ms": 5.0,
        "hit_rate": 0.9,
        "resident_hits": 4,
        "prefetch_hits": 5,
        "demand_misses": 1,
        "depths": {"8": 3, "4": 1},
        "decode_ms": 100.0,
        "new_tokens": 21,
        "sequences": 1,
    }
    common = {"model": "big", "budget_gib": 16, "batch": 1, "dataset": "qa", "baseline": False}
    return {**common, "stats": stats | fields.pop("stats", {}), **fields}
