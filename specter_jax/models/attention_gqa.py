"""Grouped-query attention (Ainslie et al., 2305.13245) with the options of five families."""

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


class GroupedQueryAttention(nn.Module):
    """Query heads share key and value heads in equal groups."""

    config: ModelConfig
    window: int

    @nn.compact
    def __call__(
        self, x: jax.Array, kv: KVLayer, lengths: jax.Array, lengths_seen: jax.Array
    ) -> tuple[jax.Array, KVLayer]:
        """Appends x's keys and values, attends, projects.

        x: [batch, tokens, hidden]. lengths: int32 [batch]. lengths_seen: see `rope.rotation`.
        Returns float32 [batch, tokens, hidden] and the updated cache layer.
        """
        c = self.config
        positions = token_positions(lengths, x.shape[1])
        q, k, v = self._project(x)
        cos, sin = rotation(c.rope, positions, lengths_seen)
        q = rotate(q, cos, sin, interleaved=c.rope.interleaved).astype(x.dtype)
        k = rotate(k, cos, sin, interleaved=c.rope.interleaved)
        kv = {"k": append(kv["k"], k, positions), "v": append(kv["v"], v, positions)}
        mask = readable(positions, kv["k"].shape[1], self.window)
        output = grouped_attention(q, kv["k"], kv["v"], mask, c.softmax_scale)
        output = output.astype(x.dtype).reshape(*x.shape[:2], -1)
        width = c.num_heads * c.v_head_dim
        projected = Linear(width, c.hidden_size, c.output_bias, name="o_proj")(output)
        return projected, kv

    def _project(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [batch, tokens, heads, head_dim] before rotation."""
        c = self.config
        widths = {
            "q": c.num_heads * c.head_dim,
            "k": c.num_kv_heads * c.head_dim,
            "v": c.num_kv_heads * c.v_head_dim,
        }
        q, k, v = (
            Linear(c.hidden_size, width, c.qkv_bias, name=f"{part}_proj")(x).astype(x.dtype)
            for part, width in widths.items()
        )
        if c.qk_norm == "full":
            q = RMSNorm(widths["q"], c.norm_eps, name="q_norm")(q)
            k = RMSNorm(widths["k"], c.norm_eps, name="k_norm")(k)
        if c.qkv_clip is not None:
            q, k, v = (jnp.clip(part, -c.qkv_clip, c.qkv_clip) for part in (q, k, v))
        q = q.reshape(*x.shape[:2], c.num_heads, c.head_dim)
        k = k.reshape(*x.shape[:2], c.num_kv_heads, c.head_dim)
        v = v.reshape(*x.shape[:2], c.num_kv_heads, c.v_head_dim)
        if c.qk_norm == "head":
            q = RMSNorm(c.head_dim, c.norm_eps, name="q_norm")(q)
            k = RMSNorm(c.head_dim, c.norm_eps, name="k_norm")(k)
        return q, k, v


def grouped_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array, scale: float
) -> jax.Array:
    """Softmax attention with scores and sums in float32.

    q: [batch, tokens, heads, dim]. k: [batch, capacity, kv_heads, dim]. v: [batch, capacity,
    kv_heads, v_dim]. mask: bool [batch, tokens, capacity], at least one true per token. Returns
    float32 [batch, tokens, heads, v_dim].
    """
    batch, tokens, heads, dim = q.shape
    groups = heads // k.shape[2]
    q = q.reshape(batch, tokens, k.shape[2], groups, dim)
    scores = einsum("btngd,bsnd->bntgs", q, k)
    scores = jnp.where(mask[:, None, :, None, :], scores * scale, -jnp.inf)
    probabilities = jax.nn.softmax(scores, -1).astype(q.dtype)
    output = einsum("bntgs,bsnd->btngd", probabilities, v)
    return output.reshape(batch, tokens, heads, v.shape[-1])
