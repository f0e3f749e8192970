"""Multi-head latent attention (DeepSeek-V2, 2405.04434) on compressed latents.

The cache holds, per token, the normalized latent and the rotated rope key. The up-projections of
keys and values are absorbed: a query is mapped into latent space (`q_nope @ W_uk`), attention runs
on latents, and the result is mapped to values (`W_uv`). Same mathematics as expanding every cached
key and value, without doing so.
"""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.products import einsum
from specter_jax.config import ModelConfig
from specter_jax.models.kv import KVLayer, append, readable, token_positions
from specter_jax.models.linear import Linear
from specter_jax.models.norms import RMSNorm
from specter_jax.models.rope import rotate, rotation

LATENT_NORM_EPS = 1e-6
"""The norms of latents take this whatever the checkpoint's rms_norm_eps (as in transformers)."""


class LatentAttention(nn.Module):
    """Queries directly from the hidden state or through a low-rank latent of their own."""

    config: ModelConfig
    window: int

    @nn.compact
    def __call__(
        self, x: jax.Array, kv: KVLayer, lengths: jax.Array, lengths_seen: jax.Array
    ) -> tuple[jax.Array, KVLayer]:
        """Appends x's latents, attends, projects.

        x: [batch, tokens, hidden]. lengths: int32 [batch]. lengths_seen: see `rope.rotation`.
        Returns float32 [batch, tokens, hidden] and the updated cache layer.
        """
        c = self.config
        positions = token_positions(lengths, x.shape[1])
        cos, sin = rotation(c.rope, positions, lengths_seen)
        q = self._queries(x).reshape(*x.shape[:2], c.num_heads, c.head_dim)
        q_nope, q_rope = q[..., : c.qk_nope_head_dim], q[..., c.qk_nope_head_dim :]
        q_rope = rotate(q_rope, cos, sin, interleaved=c.rope.interleaved).astype(x.dtype)

        width = c.kv_lora_rank + c.rope.dim
        compressed = Linear(c.hidden_size, width, c.qkv_bias, name="kv_a_proj")(x).astype(x.dtype)
        latent, k_rope = compressed[..., : c.kv_lora_rank], compressed[..., c.kv_lora_rank :]
        latent = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS, name="kv_a_norm")(latent)
        k_rope = rotate(k_rope[:, :, None], cos, sin, interleaved=c.rope.interleaved)[:, :, 0]
        kv = {
            "latent": append(kv["latent"], latent, positions),
            "rope": append(kv["rope"], k_rope, positions),
        }
        mask = readable(positions, kv["latent"].shape[1], self.window)

        key_up, value_up = KVUpProjection(c, name="kv_b_proj")()
        q_latent = einsum("bthd,hdr->bthr", q_nope, key_up).astype(x.dtype)
        attended = latent_attention(
            q_latent, q_rope, kv["latent"], kv["rope"], mask, c.softmax_scale
        )
        output = einsum("bthr,hvr->bthv", attended.astype(x.dtype), value_up)
        output = output.astype(x.dtype).reshape(*x.shape[:2], -1)
        width = c.num_heads * c.v_head_dim
        return Linear(width, c.hidden_size, c.output_bias, name="o_proj")(output), kv

    def _queries(self, x: jax.Array) -> jax.Array:
        """[batch, tokens, heads * head_dim] in x's dtype."""
        c = self.config
        width = c.num_heads * c.head_dim
        if not c.q_lora_rank:
            return Linear(c.hidden_size, width, name="q_proj")(x).astype(x.dtype)
        latent = Linear(c.hidden_size, c.q_lora_rank, c.qkv_bias, name="q_a_proj")(x)
        latent = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS, name="q_a_norm")(latent.astype(x.dtype))
        return Linear(c.q_lora_rank, width, name="q_b_proj")(latent).astype(x.dtype)


class KVUpProjection(nn.Module):
    """`weight` [heads * (nope + v), rank], seen as the two projections it stacks per head."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array]:
        """Keys [heads, nope, rank] and values [heads, v, rank]."""
        c = self.config
        per_head = c.qk_nope_head_dim + c.v_head_dim
        shape = (c.num_heads * per_head, c.kv_lora_rank)
        weight = self.param("weight", nn.initializers.normal(0.02), shape)
        weight = weight.reshape(c.num_heads, per_head, c.kv_lora_rank)
        return weight[:, : c.qk_nope_head_dim], weight[:, c.qk_nope_head_dim :]


def latent_attention(
    q_latent: jax.Array,
    q_rope: jax.Array,
    latent: jax.Array,
    rope: jax.Array,
    mask: jax.Array,
    scale: float,
) -> jax.Array:
    """Softmax attention over latents, scores and sums in float32.

    q_latent: [batch, tokens, heads, rank]. q_rope: [batch, tokens, heads, rope_dim]. latent:
    [batch, capacity, rank]. rope: [batch, capacity, rope_dim]. mask: bool [batch, tokens,
    capacity], at least one true per token. Returns float32 [batch, tokens, heads, rank].
    """
    scores = einsum("bthr,bsr->bths", q_latent, latent) + einsum("bthe,bse->bths", q_rope, rope)
    scores = jnp.where(mask[:, :, None, :], scores * scale, -jnp.inf)
    probabilities = jax.nn.softmax(scores, -1).astype(latent.dtype)
    return einsum("bths,bsr->bthr", probabilities, latent)
