"""The engine on a GPU: drafts in a graph, stretches and drafts begun early change no output."""

import jax
import pytest

import specter_jax as sj
from specter_jax.offload import POLICIES
from tests.engine_cases import ALL, MANY, NEW_TOKENS, PROMPTS, QUARTER, run

pytestmark = pytest.mark.gpu

LONG = " ".join(PROMPTS) * 6
"""A prompt long enough to need every expert: it runs in stretches."""


@pytest.fixture(scope="module", params=[QUARTER, MANY, ALL])
def model(request, tiny_directory):
    if jax.default_backend() != "gpu":
        pytest.skip("needs a GPU")
    return sj.load(
        tiny_directory,
        expert_slots=request.param,
        dtype="float32",
        max_context=512,
        max_batch=3,
    )


@pytest.mark.parametrize("depth", [1, 3, 8, "auto"])
def test_every_policy_gives_the_plain_output(model, depth):
    plain = run(model, PROMPTS, depth=0).tokens
    for policy in POLICIES:
        assert run(model, PROMPTS, depth=depth, policy=policy).tokens == plain, policy


def test_long_prompts_and_batches_too(model):
    prompts = [LONG, PROMPTS[0], LONG[: len(LONG) // 2]]
    for batch_size in (1, 3):
        options = dict(batch_size=batch_size, max_new_tokens=2 * NEW_TOKENS)
        plain = run(model, prompts, depth=0, **options).tokens
        assert run(model, prompts, depth=5, **options).tokens == plain


def test_the_books_add_up(model):
    stats = run(model, [LONG], depth=8).stats
    assert stats.peak_device_bytes > 0
    assert stats.accepted <= stats.judged <= stats.drafted
    uses = stats.resident_hits + stats.prefetch_hits + stats.demand_misses
    assert uses > 0
    if model.pool.num_slots == ALL:
        assert stats.resident_hits == uses
        assert stats.bytes_host_to_device == 0
