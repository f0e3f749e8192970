"""Once one request of a shape has run, later ones compile nothing, whatever they accept or miss."""

import pytest

from specter_jax.offload import POLICIES
from tests.engine_cases import (
    ALL,
    FEW,
    PROMPTS,
    QUARTER,
    count_compilations,
    load_in_stretches,
    load_tiny,
    run,
    wrong_draft,
)

# One token, and as many as the smallest prefill takes: a few experts, or nearly all.
SHORT, LONG = [[100]], [list(range(100, 116))]
SAMPLED = {"temperature": 0.9, "top_p": 0.95}


def test_the_counter_counts():
    import jax

    with count_compilations() as compiled:
        jax.jit(lambda x: x * 3.25)(7.5)
    assert compiled


@pytest.mark.parametrize(
    ("slots", "first"),
    [
        (FEW, SHORT),
        (QUARTER, SHORT),
        (QUARTER, LONG),
        pytest.param(157, SHORT, marks=pytest.mark.long),
        (ALL, SHORT),
    ],
)
def test_acceptance_misses_and_prompts_compile_nothing(tiny_directory, slots, first):
    model = load_in_stretches(tiny_directory, slots)
    model.warm.clear()
    run(model, first, max_new_tokens=1)
    with count_compilations() as compiled:
        for prompts in (SHORT, LONG, PROMPTS[:2]):
            run(model, prompts, max_new_tokens=12)
            with wrong_draft(model):
                run(model, prompts, max_new_tokens=12)
    assert compiled == []


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_warms_up_what_it_runs(tiny_directory, policy):
    model = load_tiny(tiny_directory)
    run(model, SHORT, policy=policy, max_new_tokens=1)
    with count_compilations() as compiled, wrong_draft(model):
        run(model, PROMPTS[:2], policy=policy, max_new_tokens=12)
    assert compiled == []


def test_a_policy_that_runs_more_programs_is_warmed_up_after_one_that_runs_fewer(tiny_directory):
    model = load_in_stretches(tiny_directory)
    model.warm.clear()
    run(model, SHORT, policy="specmoeoff", max_new_tokens=1)
    warmed = set(model.warm)
    run(model, SHORT, policy="lookahead", max_new_tokens=1)
    assert model.warm > warmed


def test_sampling_arguments_compile_nothing(tiny_directory):
    model = load_tiny(tiny_directory)
    run(model, SHORT, max_new_tokens=1, **SAMPLED)
    with count_compilations() as compiled:
        for temperature, top_k, top_p, seed in [(0.5, 0, 1.0, 1), (2, 7, 0.5, 2), (1, 1, 1, 3)]:
            sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
            run(model, PROMPTS[:2], max_new_tokens=8, **sampling)
        with wrong_draft(model):
            run(model, PROMPTS[:1], max_new_tokens=12, **SAMPLED)
    assert compiled == []


def test_rows_that_end_one_after_another_compile_nothing(tiny_directory):
    model = load_tiny(tiny_directory)
    run(model, SHORT * 3, max_new_tokens=1, batch_size=3)
    with count_compilations() as compiled, wrong_draft(model):
        run(model, PROMPTS[:3], max_new_tokens=12, batch_size=3, stop=["e"])
    assert compiled == []
