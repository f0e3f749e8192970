"""The evaluation: every figure of the paper on this runtime, as one page and the JSON behind it.

Three steps, each of which knows only the one before: `measure_*` runs models and yields records,
`figures_*` draws records, `page` puts figures on a page. What is not in the JSON is not on the
page. `results` adds records measured elsewhere: a GPU's, and routing recorded at true size.

A record is a JSON object with `model`, `setting` ("small": run here on the given checkpoints;
"true_size": read from results) and the figure's own fields; records are kept by section, see
`SECTIONS`.
"""

SECTIONS = (
    "match",
    "distinct",
    "depth",
    "timeline",
    "prefill",
    "draft",
    "verification",
    "diversity",
    "end_to_end",
    "batch",
    "batch_experts",
    "hit_rate",
    "planner",
)
"""Kinds of records, in the order of the paper's figures; the last one is not the paper's."""

SMALL, TRUE_SIZE = "small", "true_size"
"""The settings a record can come from."""
