"""Grouped-query attention (Ainslie et al., 2305.13245) with the options of five families."""

from __future__ import annotations

import flax.linen as nn
import jax
import jax.numpy as jnp

from pallas_kernels.decode_attention import attend_grouped
from pallas_kernels.small_dense import Normalized
from specter_jax.config import ModelConfig
from specter_jax.models.kv import KVLayer, token_positions
from specter_jax.models.linear import Linear, together
from specter_jax.models.norms import RMSNorm
from specter_jax.models.rope import rotation


class GroupedQueryAttention(nn.Module):
    """Query heads share key and value heads in equal groups."""

    config: ModelConfig
    window: int

    @nn.compact
    def __call__(
        self,
        x: jax.Array | Normalized,
        kv: KVLayer,
        lengths: jax.Array,
        lengths_seen: jax.Array,
        residual: jax.Array | None = None,
    ) -> tuple[jax.Array, KVLayer]:
        """Appends x's keys and values, attends, projects.

        x: [batch, tokens, hidden]. lengths: int32 [batch]. lengths_seen: see `rope.rotation`.
        residual: a stream [batch, tokens, hidden] to add to, or None. Returns [batch, tokens,
        hidden], the stream in its dtype or float32, and the updated cache layer.
        """
        c = self.config
        rows = x.shape[:2]
        cos, sin = rotation(c.rope, token_positions(lengths, rows[1]), lengths_seen)
        output, keys, values = attend_grouped(
            *self._project(x),
            cos,
            sin,
            kv["k"],
            kv["v"],
            lengths,
            window=self.window,
            scale=c.softmax_scale,
            interleaved=c.rope.interleaved,
            compute_dtype=x.dtype,
        )
        projection = Linear(c.num_heads * c.v_head_dim, c.hidden_size, c.output_bias, name="o_proj")
        output = output.reshape(*rows, -1)
        if residual is None:
            projected = projection(output)
        else:
            projected = projection(output, add=(residual,), dtype=residual.dtype)
        return projected, {"k": keys, "v": values}

    def _project(self, x: jax.Array | Normalized) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Queries, keys and values [batch, tokens, heads, head_dim] before rotation."""
        c = self.config
        widths = {
            "q": c.num_heads * c.head_dim,
            "k": c.num_kv_heads * c.head_dim,
            "v": c.num_kv_heads * c.v_head_dim,
        }
        q, k, v = together(
            x,
            [
                Linear(c.hidden_size, width, c.qkv_bias, name=f"{part}_proj")
                for part, width in widths.items()
            ],
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
