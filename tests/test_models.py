"""The model functions agree with each other: bit for bit wherever exact decoding needs it."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.constants import NOT_RESIDENT
from pallas_kernels.int4.layout import decode_numpy
from specter_jax.config import ModelConfig, layer_name
from specter_jax.models import (
    accumulate_experts,
    close_layer,
    dense_layer,
    draft_step,
    embed,
    finish_layer,
    head,
    init_kv,
    prefill,
    route_layer,
    verify,
)
from tests.checkpoints import (
    all_resident,
    draft_tree,
    random_tensors,
    shared_tree,
    tiny_config,
)

CAPACITY, START = 48, 12
FAMILIES = ("deepseek_v2", "qwen2_moe", "phimoe")
LAYERS = {"num_hidden_layers": 2}

run_verify = jax.jit(verify, static_argnums=0)
run_prefill = jax.jit(prefill, static_argnums=0)
run_draft = jax.jit(draft_step, static_argnums=0)
run_route = jax.jit(route_layer, static_argnums=(0, 1))
run_dense = jax.jit(dense_layer, static_argnums=(0, 1))
run_accumulate = jax.jit(accumulate_experts, static_argnums=0)
run_close = jax.jit(close_layer, static_argnums=0)
run_finish = jax.jit(finish_layer, static_argnums=0)
run_head = jax.jit(head, static_argnums=0)
run_embed = jax.jit(embed, static_argnums=0)


class Example:
    """A tiny model with every expert resident and a cache that holds `START` tokens."""

    def __init__(self, family: str):
        self.config = ModelConfig.from_hf(tiny_config(family, **LAYERS))
        self.tensors = random_tensors(tiny_config(family, **LAYERS))
        self.params = jax.device_put({"shared": shared_tree(self.config, self.tensors)})
        self.slots, self.table = map(jnp.asarray, all_resident(self.config, self.tensors))
        rng = np.random.default_rng(1)
        self.tokens = rng.integers(0, self.config.vocab_size, (1, 20)).astype(np.int32)
        prompt = rng.integers(0, self.config.vocab_size, (1, START)).astype(np.int32)
        self.kv = init_kv(self.config, 1, CAPACITY)
        _, self.kv = self.prefill(prompt)
        self.lengths = np.array([START], np.int32)

    def prefill(self, tokens: np.ndarray):
        lengths, last = np.zeros(1, np.int32), np.array([tokens.shape[1] - 1], np.int32)
        mask = np.ones(tokens.shape, bool)
        tables = (self.slots, self.table)
        return run_prefill(self.config, self.params, self.kv, *tables, tokens, lengths, mask, last)

    def verify(self, num_tokens: int, num_real: int | None = None, **changed):
        """Verifies the first tokens; those beyond `num_real` are masked."""
        mask = np.arange(num_tokens)[None] < (num_tokens if num_real is None else num_real)
        values = {
            "kv": self.kv,
            "slots": self.slots,
            "slot_table": self.table,
            "tokens": self.tokens[:, :num_tokens],
            "lengths": self.lengths,
            "token_mask": mask,
            **changed,
        }
        return run_verify(self.config, self.params, *values.values())


example = cache(Example)


def assert_same_bits(first, second, num_tokens: int, axis: int) -> None:
    window = [slice(None)] * axis + [slice(num_tokens)]
    np.testing.assert_array_equal(
        np.asarray(first)[tuple(window)], np.asarray(second)[tuple(window)]
    )


@pytest.mark.parametrize(
    ("family", "counts"),
    [("deepseek_v2", (2, 3, 5, 9)), ("qwen2_moe", (2, 9)), ("phimoe", (2, 9))],
)
def test_a_token_has_the_same_bits_however_many_are_verified_with_it(family, counts):
    model = example(family)
    full, full_kv = model.verify(17)
    for num_tokens in counts:
        num_real = 1 if num_tokens == 2 else num_tokens
        part, kv = model.verify(num_tokens, num_real)
        assert_same_bits(part.logits, full.logits, num_real, 1)
        assert_same_bits(part.hidden, full.hidden, num_real, 2)
        assert_same_bits(part.experts, full.experts, num_real, 2)
        for layer, expected in zip(kv, full_kv, strict=True):
            for name in layer:
                assert_same_bits(layer[name], expected[name], START + num_real, 1)


@pytest.mark.parametrize("family", FAMILIES)
def test_decoding_one_by_one_gives_the_bits_of_verifying_at_once(family):
    model = example(family)
    full, _ = model.verify(9)
    kv = model.kv
    for i in range(6):
        step = np.array([[model.tokens[0, i], 0]], np.int32)
        outputs, kv = model.verify(2, 1, kv=kv, tokens=step, lengths=model.lengths + i)
        np.testing.assert_array_equal(outputs.logits[0, 0], full.logits[0, i])


@pytest.mark.parametrize("family", FAMILIES)
def test_layer_by_layer_gives_the_bits_of_one_program(family):
    model = example(family)
    config, shared = model.config, model.params["shared"]
    outputs, full_kv = model.verify(5, 4)
    mask = np.arange(5)[None] < 4
    hidden = run_embed(config, shared, model.tokens[:, :5])
    for layer in range(config.num_layers):
        args = (config, layer, shared[layer_name(layer)], model.kv[layer], hidden)
        if not config.is_moe(layer):
            hidden, kv = run_dense(*args, model.lengths, mask)
        else:
            index = config.moe_index(layer)
            assert_same_bits(hidden, outputs.hidden[index], 4, 1)
            routed, kv = run_route(*args, model.lengths, mask)
            np.testing.assert_array_equal(routed.experts, outputs.experts[index])
            hidden = run_finish(config, args[2], routed, model.slots, model.table[index])
        for name in kv:
            assert_same_bits(kv[name], full_kv[layer][name], START + 4, 1)
    assert_same_bits(run_head(config, shared, hidden, mask), outputs.logits, 4, 1)


def test_experts_added_in_ascending_groups_give_the_bits_of_one_pass():
    model = example("qwen2_moe")
    config, weights = model.config, model.params["shared"]["layers_00"]
    hidden = run_embed(config, model.params["shared"], model.tokens[:, :12])
    routed, _ = run_route(
        config, 0, weights, model.kv[0], hidden, model.lengths, np.ones((1, 12), bool)
    )
    once = run_finish(config, weights, routed, model.slots, model.table[0])
    ids = np.arange(config.num_experts)
    total = run_accumulate(config, routed, model.slots, model.table[0], ids < 3, None)
    total = run_accumulate(config, routed, model.slots, model.table[0], ids >= 3, total)
    np.testing.assert_array_equal(run_close(config, weights, routed, total), once)


def test_the_slot_an_expert_sits_in_does_not_matter():
    model = example("qwen2_moe")
    order = np.random.default_rng(4).permutation(model.table.size)
    slots, table = all_resident(model.config, model.tensors, order)
    expected, _ = model.verify(5)
    moved, _ = model.verify(5, slots=slots, slot_table=table)
    np.testing.assert_array_equal(moved.logits, expected.logits)


def test_masked_tokens_route_nowhere_and_change_nothing():
    model = example("deepseek_v2")
    expected, _ = model.verify(9, 6)
    other = model.tokens[:, :9].copy()
    other[:, 6:] = 3
    changed, _ = model.verify(9, 6, tokens=other)
    assert (expected.experts[:, :, 6:] == model.config.no_expert).all()
    assert (expected.experts[:, :, :6] < model.config.num_experts).all()
    assert_same_bits(changed.logits, expected.logits, 6, 1)


def test_misses_count_distinct_absent_experts_of_real_tokens():
    model = example("qwen2_moe")
    expected, _ = model.verify(9, 6)
    assert expected.misses.tolist() == [0, 0]
    absent = np.array(model.table)
    absent[0, ::2] = NOT_RESIDENT
    outputs, _ = model.verify(9, 6, slot_table=absent)
    chosen = set(np.asarray(expected.experts[0, 0, :6]).ravel().tolist())
    assert outputs.misses[0] == len({e for e in chosen if e % 2 == 0}) > 0
    np.testing.assert_array_equal(outputs.experts[0], expected.experts[0])
    np.testing.assert_array_equal(outputs.hidden[0], expected.hidden[0])


def test_rows_of_a_batch_match_single_sequences_of_other_lengths():
    model = example("deepseek_v2")
    lengths = np.array([START, 5, 9], np.int32)
    tokens = np.stack([model.tokens[0, i : i + 5] for i in (0, 3, 6)])
    kv = jax.tree.map(lambda x: jnp.concatenate([x] * 3), model.kv)
    mask = np.arange(5)[None] < np.array([[5], [3], [1]])
    batch, _ = model.verify(5, kv=kv, tokens=tokens, lengths=lengths, token_mask=mask)
    for row in range(3):
        single, _ = model.verify(
            5, tokens=tokens[row, None], lengths=lengths[row, None], token_mask=mask[row, None]
        )
        real = mask[row].sum()
        np.testing.assert_array_equal(batch.logits[row, :real], single.logits[0, :real])
        np.testing.assert_array_equal(batch.experts[:, row], single.experts[:, 0])


def test_prefill_gives_the_logits_and_cache_of_verification():
    model = example("phimoe")
    empty = init_kv(model.config, 1, CAPACITY)
    tokens, zero = model.tokens[:, :9], np.zeros(1, np.int32)
    expected, expected_kv = model.verify(9, 7, kv=empty, tokens=tokens, lengths=zero)
    outputs, kv = run_prefill(
        model.config, model.params, empty, model.slots, model.table, tokens, zero,
        np.arange(9)[None] < 7, np.array([6], np.int32),
    )  # fmt: skip
    np.testing.assert_array_equal(outputs.logits[0], expected.logits[0, 6])
    for layer, other in zip(kv, expected_kv, strict=True):
        assert_same_bits(layer["k"], other["k"], 7, 1)


@pytest.mark.parametrize("family", ["deepseek_v2", "mixtral"])
def test_the_draft_is_the_target_with_decoded_experts(family):
    model = example(family)
    config = model.config
    draft = draft_tree(config, model.tensors)
    tensors = dict(model.tensors)
    inner = config.expert_intermediate_size
    for layer in config.moe_layers:
        part = draft[layer_name(layer)]
        for e in range(config.num_experts):
            codes, scales, tables = (
                part["gate_up_codes"][e], part["gate_up_scales"][e], part["tables"][e]
            )  # fmt: skip
            prefix = f"model.layers.{layer}.mlp.experts.{e}."
            for name, rows, table in (("gate", slice(inner), 0), ("up", slice(inner, None), 1)):
                decoded = decode_numpy(codes[rows], scales[rows], tables[table])
                tensors[f"{prefix}{name}_proj.weight"] = decoded
            tensors[f"{prefix}down_proj.weight"] = decode_numpy(
                part["down_codes"][e], part["down_scales"][e], tables[2]
            )
    slots, table = all_resident(config, tensors)
    expected, _ = model.verify(2, 1, slots=slots, slot_table=table)

    params = {**model.params, "draft": draft}
    kv = jax.tree.map(lambda x: jnp.concatenate([x] * 2), model.kv)
    tokens, lengths = np.repeat(model.tokens[0, :1], 2), np.repeat(model.lengths, 2)
    logits, experts, kv = run_draft(config, params, kv, tokens, lengths, np.array([True, False]))
    np.testing.assert_allclose(logits[0], expected.logits[0, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(experts[:, 0], expected.experts[:, 0, 0])
    assert (experts[:, 1] == config.no_expert).all()


def test_prediction_is_the_next_router_applied_to_this_residual():
    model = example("qwen2_moe")
    shared = model.params["shared"]
    hidden = run_embed(model.config, shared, model.tokens[:, :5])
    mask = np.arange(5)[None] < 4
    routed, _ = run_route(
        model.config, 0, shared["layers_00"], model.kv[0], hidden, model.lengths, mask,
        shared["layers_01"],
    )  # fmt: skip
    x = np.asarray(routed.residual[0, :4])
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + model.config.norm_eps)
    x = x * np.asarray(shared["layers_01"]["post_norm"]["weight"])
    scores = x @ np.asarray(shared["layers_01"]["router"]["weight"]).T
    expected = np.argsort(-scores, -1)[:, : model.config.top_k]
    np.testing.assert_array_equal(routed.next_experts[0, :4], expected)
    assert (routed.next_experts[0, 4] == model.config.no_expert).all()


def test_entries_beyond_the_cache_are_dropped():
    model = example("qwen2_moe")
    _, kv = model.verify(5, 1, lengths=np.array([CAPACITY - 1], np.int32))
    np.testing.assert_array_equal(
        kv[0]["k"][:, : CAPACITY - 1], model.kv[0]["k"][:, : CAPACITY - 1]
    )
    assert np.abs(kv[0]["k"][:, CAPACITY - 1]).max() > 0


def test_parameters_of_the_wrong_shape_are_refused():
    model = example("qwen2_moe")
    bad = jax.tree.map(lambda x: x, model.params["shared"])
    bad["layers_00"]["attention"]["q_proj"]["weight"] = jnp.zeros((3, 3))
    with pytest.raises(Exception, match="shape"):
        jax.eval_shape(
            partial(route_layer, model.config, 0), bad["layers_00"], model.kv[0],
            jnp.zeros((1, 2, 64)), model.lengths, jnp.ones((1, 2), bool),
        )  # fmt: skip
