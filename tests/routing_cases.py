"""The routing kernel against the plain rule, interpreted or on a GPU."""

import dataclasses

import jax.numpy as jnp
import numpy as np

from pallas_kernels import routing
from specter_jax.config import ModelConfig
from specter_jax.models.router import choose_plainly, routing_rule
from tests.checkpoints import tiny_config

KINDS = ("softmax", "group_limited", "sparse_mixer")


def check_routing(kind, interpret):
    """The kernel's choices against the plain rule's, ties and masked rows included."""
    config = dataclasses.replace(
        ModelConfig.from_hf(tiny_config("mixtral")),
        routing=kind,
        num_experts=60,
        top_k=2 if kind == "sparse_mixer" else 6,
        num_groups=6,
        top_groups=3,
        normalize_weights=kind == "group_limited",
        routed_scaling_factor=1.0 if kind == "softmax" else 2.5,
        router_jitter=0.05,
    )
    logits = np.random.default_rng(0).standard_normal((3, 5, 60)).astype(np.float32)
    logits[0, 0] = 1.0
    logits[1, :, 20:40] = logits[1, :, :20]
    mask = np.ones((3, 5), bool)
    mask[2, 3:] = False
    rule = routing_rule(config)
    experts, weights = routing.choose_experts(
        jnp.asarray(logits), jnp.asarray(mask), rule, interpret=interpret
    )
    expected, expected_weights = choose_plainly(config, jnp.asarray(logits))
    np.testing.assert_array_equal(experts, np.where(mask[..., None], expected, 60))
    np.testing.assert_allclose(weights, expected_weights, rtol=1e-5)
