"""Letting a kernel be launched while the one before it still runs (Hopper on)."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental.pallas import triton as plgpu

_KINDS = ("H100", "H200", "H20", "GH200", "H800")


def supports_early_launch(device_kind: str) -> bool:
    """Whether a device of this name is a Hopper GPU, the kind that this was seen to work on."""
    return any(kind in device_kind.split() for kind in _KINDS)


def let_next_start(value: jax.Array, enabled: bool) -> jax.Array:
    """`value`, an int32 scalar that the kernel depends on; the next kernel may be launched.

    XLA makes kernels wait for their predecessor before their first access to memory, so this only
    hides the time a launch takes. enabled: static; false on devices before compute capability 9
    and in interpret mode.
    """
    if not enabled:
        return value
    [out] = plgpu.elementwise_inline_asm(
        "griddepcontrol.launch_dependents;\n mov.b32 $0, $1;",
        args=[jnp.full((1,), value, jnp.int32)],
        constraints="=r,r",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct((1,), jnp.int32)],
    )
    return jnp.sum(out)
