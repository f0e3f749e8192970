"""`generate`: lengths, ends, stop strings, streaming, statistics and refusals."""

import numpy as np
import pytest

from specter_jax.errors import InvalidRequestError, PromptError, UnknownPolicyError
from specter_jax.text import encode_prompts, load_tokenizer
from tests.engine_cases import ALL, CONTEXT, NEW_TOKENS, PROMPTS, load_tiny, run, wrong_draft

SAMPLED = {"temperature": 1.0, "top_p": 0.95}


@pytest.fixture(scope="module")
def model(tiny_directory):
    return load_tiny(tiny_directory)


@pytest.fixture
def eos(model, monkeypatch):
    """Makes a token of the caller's choice the end of the sequence."""

    def end_at(token):
        class Config:
            eos_token_ids = (token,)

            def __getattr__(self, name):
                return getattr(original, name)

        original = model.config
        monkeypatch.setattr(model, "config", Config())

    return end_at


def tokenizer(model):
    return load_tokenizer(model.path)


@pytest.mark.parametrize("count", [1, 2, 5])
def test_max_new_tokens_is_exact_whatever_was_accepted(model, plain, count):
    result = run(model, PROMPTS[:2], max_new_tokens=count)
    assert result.tokens == [tokens[:count] for tokens in plain[:2]]
    assert result.stats.new_tokens == 2 * count


def test_texts_are_the_decoded_tokens(model, plain):
    result = run(model, PROMPTS[:2])
    assert result.texts == [tokenizer(model).decode(tokens) for tokens in plain[:2]]


def test_token_ids_give_the_same_as_their_text(model, plain):
    ids = encode_prompts(tokenizer(model), PROMPTS[:1])
    assert run(model, ids).tokens == plain[:1]
    assert run(model, [ids[0].tolist()]).tokens == plain[:1]


@pytest.mark.parametrize("depth", [0, 3])
def test_a_sequence_ends_with_its_end_token(model, plain, eos, depth):
    end = plain[0][5]
    eos(end)
    result = run(model, PROMPTS[:1], depth=depth)
    assert result.tokens[0] == plain[0][: plain[0].index(end) + 1]
    assert run(model, PROMPTS[:1], depth=depth, ignore_eos=True).tokens[0] == plain[0]


def test_rows_of_a_batch_end_at_different_times(model, plain, eos):
    end = next(t for t in plain[0][2:8] if t not in plain[1] + plain[2])
    eos(end)
    result = run(model, PROMPTS[:3], batch_size=3)
    assert result.tokens == [plain[0][: plain[0].index(end) + 1], *plain[1:3]]
    assert result.stats.new_tokens == sum(map(len, result.tokens))


def test_text_is_cut_before_a_stop_string(model, plain):
    whole = tokenizer(model).decode(plain[0])
    stop = whole[len(whole) // 2 :][:3]
    result = run(model, PROMPTS[:1], stop=[stop])
    assert result.texts[0] == whole[: whole.index(stop)]
    assert result.tokens[0] == plain[0][: len(result.tokens[0])]
    assert len(result.tokens[0]) < NEW_TOKENS


def test_streamed_pieces_join_to_the_texts(model):
    pieces = {}
    result = run(
        model,
        PROMPTS[:3],
        batch_size=2,
        on_text=lambda prompt, text: pieces.setdefault(prompt, []).append(text),
    )
    assert ["".join(pieces[number]) for number in range(3)] == result.texts
    assert all(len(parts) > 1 for parts in pieces.values())


def test_a_prompt_may_leave_room_for_one_token(model):
    prompt = [100 + n for n in range(CONTEXT - 1)]
    result = run(model, [prompt])
    assert len(result.tokens[0]) == 1
    assert result.tokens == run(model, [prompt], depth=0).tokens


def test_a_long_neighbour_does_not_shorten_a_row(model, plain):
    long = [100 + n for n in range(CONTEXT - 3)]
    result = run(model, [PROMPTS[0], long], batch_size=2, ignore_eos=True)
    assert result.tokens[0] == plain[0]
    assert len(result.tokens[1]) == 3
    assert result.tokens[1] == run(model, [long], ignore_eos=True).tokens[0]


@pytest.mark.parametrize(
    ("prompts", "options", "error", "says"),
    [
        ([[]], {}, PromptError, "empty"),
        ([""], {}, PromptError, "empty"),
        ([], {}, PromptError, "no prompts"),
        ([[5] * CONTEXT], {}, PromptError, f"the context holds {CONTEXT}"),
        ([[5, 4096]], {}, PromptError, "vocabulary"),
        (["a"], {"policy": "fifo"}, UnknownPolicyError, "lookahead"),
        (["a"], {"depth": 17}, InvalidRequestError, "0 to 16"),
        (["a"], {"depth": -1}, InvalidRequestError, "0 to 16"),
        (["a"], {"depth": "deep"}, InvalidRequestError, "auto"),
        (["a"], {"temperature": -0.5}, InvalidRequestError, "temperature"),
        (["a"], {"top_p": 0.0}, InvalidRequestError, "top_p"),
        (["a"], {"max_new_tokens": 0}, InvalidRequestError, "max_new_tokens"),
        (["a"], {"batch_size": 4}, InvalidRequestError, "max_batch"),
        (["a"], {"batch_size": 0}, InvalidRequestError, "batch_size"),
        (["a"], {"stop": [""]}, InvalidRequestError, "stop"),
    ],
)
def test_a_request_out_of_range_is_refused_in_one_line(model, prompts, options, error, says):
    with pytest.raises(error, match=says) as raised:
        run(model, prompts, **options)
    assert "\n" not in str(raised.value)


def test_the_same_seed_gives_the_same_samples_in_any_batch(model):
    single = run(model, PROMPTS[:3], seed=7, **SAMPLED).tokens
    run(model, PROMPTS[3:], seed=8, **SAMPLED)
    assert run(model, PROMPTS[:3], seed=7, batch_size=3, **SAMPLED).tokens == single
    assert run(model, PROMPTS[:3], seed=8, **SAMPLED).tokens != single


def test_equal_prompts_get_different_samples(model):
    first, second = run(model, PROMPTS[:1] * 2, seed=3, **SAMPLED).tokens
    assert first != second


def test_sampling_at_a_tiny_temperature_is_greedy(model, plain):
    assert run(model, PROMPTS[:2], temperature=1e-6).tokens == plain[:2]


def test_sampling_survives_a_wrong_draft(model):
    with wrong_draft(model):
        stats = run(model, PROMPTS[:2], **SAMPLED).stats
    assert stats.new_tokens == 2 * NEW_TOKENS
    assert stats.acceptance_rate < 0.9


def test_expert_uses_are_hits_or_misses_and_nothing_else(model):
    uses = []
    eviction_type = type(model.pool.cache.eviction)
    original = eviction_type.observe_layer

    def observe(self, layer, used, *rest, **options):
        uses.append(len(used))
        return original(self, layer, used, *rest, **options)

    with wrong_draft(model), pytest.MonkeyPatch.context() as patch:
        patch.setattr(eviction_type, "observe_layer", observe)
        patch.setattr("specter_jax.engine.prefill._seed_statistics", lambda *_: None)
        stats = run(model, PROMPTS[:2]).stats
    assert stats.resident_hits + stats.prefetch_hits + stats.demand_misses == sum(uses)
    assert stats.demand_misses > 0
    assert 0 < stats.hit_rate < 1


def test_everything_resident_moves_nothing(tiny_directory):
    stats = run(load_tiny(tiny_directory, ALL), PROMPTS[:2]).stats
    assert stats.hit_rate == 1.0
    assert stats.bytes_host_to_device == 0
    assert stats.resumes == 0


def test_bytes_are_those_of_the_experts_taken_from_the_store(model, monkeypatch):
    run(model, PROMPTS[:1])
    taken = []
    original = type(model.pool.store).get

    def get(self, layer, expert):
        taken.append((layer, expert))
        return original(self, layer, expert)

    monkeypatch.setattr(type(model.pool.store), "get", get)
    stats = run(model, PROMPTS[1:3]).stats
    assert taken
    assert stats.bytes_host_to_device == len(taken) * model.pool.store.expert_bytes


def test_depths_and_iterations_are_counted(model):
    stats = run(model, PROMPTS[:1], depth=3).stats
    assert stats.depths == {3: stats.iterations}
    assert stats.accepted + stats.iterations >= NEW_TOKENS - 1
    assert run(model, PROMPTS[:1], depth=8, policy="lru").stats.depths == {0: NEW_TOKENS - 1}


def test_the_trained_model_is_drafted_well(model):
    stats = run(model, PROMPTS).stats
    assert stats.acceptance_rate > 0.85
    assert stats.expert_match_rate > 0.95


def test_matches_are_complete_where_draft_and_target_agree(model, monkeypatch):
    """The draft's own routing, handed to the count as the target's, matches everywhere."""
    from specter_jax.engine import verification

    original = verification._count_matches

    def count(ctx, state, drafted, chosen):
        steps = min(drafted.experts.shape[2], chosen[0].shape[1])
        same = {m: np.array(drafted.experts[m][:, :steps]) for m in chosen}
        original(ctx, state, drafted, same)

    monkeypatch.setattr(verification, "_count_matches", count)
    assert run(model, PROMPTS[:1]).stats.expert_match_rate == 1.0


def test_statistics_of_each_prompt_add_up(model):
    result = run(model, PROMPTS[:3])
    assert [one.new_tokens for one in result.prompt_stats] == [NEW_TOKENS] * 3
    assert sum(one.iterations for one in result.prompt_stats) == result.stats.iterations
