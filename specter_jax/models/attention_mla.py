"""Multi-head latent attention (DeepSeek-V2, 2405.04434) on compressed latents.

The cache holds, per token, the normalized latent and the rotated rope key. The up-projections of
keys and values are absorbed: a query is mapped into latent space (`q_nope @ W_uk`), attention runs
on latents, and the result is mapped to values (`W_uv`). Same mathematics as expanding every cached
key and value, without doing so.
"""

from __future__ import annotations

import flax.linen as nn
import jax

from pallas_kernels.decode_attention import attend_latent
from pallas_kernels.small_dense import Normalized
from specter_jax.config import ModelConfig
from specter_jax.models.kv import KVLayer, token_positions
from specter_jax.models.linear import Linear, together
from specter_jax.models.norms import RMSNorm
from specter_jax.models.rope import rotation

LATENT_NORM_EPS = 1e-6
"""The norms of latents take this whatever the checkpoint's rms_norm_eps (as in transformers)."""


class LatentAttention(nn.Module):
    """Queries directly from the hidden state or through a low-rank latent of their own."""

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
        """Appends x's latents, attends, projects.

        x: [batch, tokens, hidden]. lengths: int32 [batch]. lengths_seen: see `rope.rotation`.
        residual: a stream [batch, tokens, hidden] to add to, or None. Returns [batch, tokens,
        hidden], the stream in its dtype or float32, and the updated cache layer.
        """
        c = self.config
        rows = x.shape[:2]
        cos, sin = rotation(c.rope, token_positions(lengths, rows[1]), lengths_seen)
        q, compressed = self._project(x)
        norm = RMSNorm(c.kv_lora_rank, LATENT_NORM_EPS, name="kv_a_norm").norm()
        output, latent, rope = attend_latent(
            q.reshape(*rows, c.num_heads, c.head_dim),
            compressed,
            norm.weight,
            KVUpProjection(c, name="kv_b_proj")(),
            cos,
            sin,
            kv["latent"],
            kv["rope"],
            lengths,
            window=self.window,
            scale=c.softmax_scale,
            interleaved=c.rope.interleaved,
            eps=norm.eps,
            compute_dtype=x.dtype,
        )
        projection = Linear(c.num_heads * c.v_head_dim, c.hidden_size, c.output_bias, name="o_proj")
        output = output.reshape(*rows, -1)
        if residual is None:
            projected = projection(output)
        else:
            projected = projection(output, add=(residual,), dtype=residual.dtype)
        return projected, {"latent": latent, "rope": rope}

    def _project(self, x: jax.Array | Normalized) -> list[jax.Array]:
        """Queries and compressed keys and values: [batch, tokens, ...] in x's dtype."""
        c = self.config
        width = c.num_heads * c.head_dim
        kv_width = c.kv_lora_rank + c.rope.dim
        kv_proj = Linear(c.hidden_size, kv_width, c.qkv_bias, name="kv_a_proj")
        if not c.q_lora_rank:
            return together(x, [Linear(c.hidden_size, width, name="q_proj"), kv_proj])
        q_a_proj = Linear(c.hidden_size, c.q_lora_rank, c.qkv_bias, name="q_a_proj")
        latent, compressed = together(x, [q_a_proj, kv_proj])
        latent = RMSNorm(c.q_lora_rank, LATENT_NORM_EPS, name="q_a_norm").deferred(latent)
        [q] = together(latent, [Linear(c.q_lora_rank, width, name="q_b_proj")])
        return [q, compressed]


class KVUpProjection(nn.Module):
    """`weight` [heads * (nope + v), rank]: per head the projection of keys, then that of values."""

    config: ModelConfig

    @nn.compact
    def __call__(self) -> jax.Array:
        """[heads, nope + v, rank]."""
        c = self.config
        per_head = c.qk_nope_head_dim + c.v_head_dim
        shape = (c.num_heads * per_head, c.kv_lora_rank)
        weight = self.param("weight", nn.initializers.normal(0.02), shape)
        return weight.reshape(c.num_heads, per_head, c.kv_lora_rank)
