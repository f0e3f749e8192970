"""Rotary frequencies against transformers, and which set a token gets."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.decode_attention.reference import rotate
from specter_jax.config import ModelConfig
from specter_jax.models.decoder import lengths_seen
from specter_jax.models.rope import attention_factor, inverse_frequencies, rotation
from tests.checkpoints import tiny_config

FACTORS = {
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [3.0 + 0.2 * i for i in range(8)],
    "original_max_position_embeddings": 32,
}
ORIGINAL = {"original_max_position_embeddings": 64}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL},
    "yarn_all": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "beta_fast": 20, "beta_slow": 2,
                 "mscale": 1.2, "mscale_all_dim": 0.8, "truncate": False},
    "yarn_given": {"rope_type": "yarn", "factor": 4.0, **ORIGINAL, "attention_factor": 1.5},
    "longrope": {"rope_type": "longrope", **FACTORS},
    "longrope_given": {"rope_type": "longrope", **FACTORS, "factor": 2.0, "attention_factor": 1.7},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, **ORIGINAL},
}  # fmt: skip


def rope_of(**parameters):
    config = tiny_config("mixtral", head_dim=16, rope_parameters=parameters)
    return ModelConfig.from_hf(config).rope


@pytest.mark.torch
@pytest.mark.parametrize("name", KINDS)
def test_frequencies_match_transformers(name):
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = {"rope_theta": 700.0, **KINDS[name]}
    rope = rope_of(**parameters)
    theirs = transformers.MixtralConfig(
        **tiny_config("mixtral", head_dim=16, rope_parameters=parameters)
    )
    for long, length in ((False, None), (True, 10_000)):
        if name == "default":
            frequencies, factor = 700.0 ** -(np.arange(0, 16, 2) / 16), 1.0
        else:
            initialize = ROPE_INIT_FUNCTIONS[KINDS[name]["rope_type"]]
            frequencies, factor = initialize(theirs, seq_len=length)
        # One float32 rounding of the exponent is worth a few units in the last place.
        np.testing.assert_allclose(inverse_frequencies(rope, long), frequencies, rtol=1e-6)
        assert attention_factor(rope, long) == pytest.approx(float(factor), rel=1e-7)


def test_yarn_ramp_by_hand():
    # dim 4, theta 100, original 64: channel of r rotations is 4 log(64 / (2 pi r)) / (2 log 100);
    # r = 32 gives a negative one, r = 1 gives 1.008, so the ramp is (i - 0) / (2 - 0).
    config = tiny_config("mixtral", head_dim=4, rope_theta=100.0)
    config["rope_scaling"] = {"type": "yarn", "factor": 4.0, **ORIGINAL}
    frequencies = inverse_frequencies(ModelConfig.from_hf(config).rope)
    np.testing.assert_allclose(frequencies, [1.0, 0.5 * 0.1 / 4 + 0.5 * 0.1], rtol=1e-6)


def test_each_token_takes_the_factors_of_its_own_position_except_in_a_prompt():
    config = ModelConfig.from_hf(
        tiny_config("mixtral", head_dim=16, rope_parameters={"rope_type": "longrope", **FACTORS})
    )
    lengths, mask = jnp.array([30]), jnp.array([[True, True, True, False]])
    own = lengths_seen(config, lengths, mask, prompt=False)
    assert own.tolist() == [[31, 32, 33, 34]]
    assert lengths_seen(config, lengths, mask, prompt=True).tolist() == [[33, 33, 33, 33]]

    positions = jnp.array([[30, 31, 32, 33]])
    cos, _ = rotation(config.rope, positions, own)
    scale = attention_factor(config.rope)
    for i, long in enumerate((False, False, True, True)):
        angles = (30 + i) * inverse_frequencies(config.rope, long)
        np.testing.assert_allclose(cos[0, i], np.cos(angles) * scale, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotation_turns_pairs_as_complex_numbers(interleaved):
    rng = np.random.default_rng(0)
    x, angles = rng.standard_normal((1, 3, 2, 8)), rng.standard_normal((1, 3, 4))
    turned = rotate(jnp.asarray(x), jnp.cos(angles), jnp.sin(angles), interleaved=interleaved)
    first, second = (x[..., 0::2], x[..., 1::2]) if interleaved else np.split(x, 2, -1)
    expected = (first + 1j * second) * np.exp(1j * angles)[:, :, None]
    parts = (turned[..., 0::2], turned[..., 1::2]) if interleaved else jnp.split(turned, 2, -1)
    np.testing.assert_allclose(parts[0], expected.real, atol=1e-5)
    np.testing.assert_allclose(parts[1], expected.imag, atol=1e-5)
