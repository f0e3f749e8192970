"""Which policies can be predicted: those that know nothing but what a routing trace tells."""

from __future__ import annotations

from specter_jax.errors import InvalidRequestError
from specter_jax.offload import get_policy
from specter_jax.offload.policies import POLICIES, SYSTEM_POLICIES

PREDICTABLE = tuple(
    name
    for name, spec in (POLICIES | SYSTEM_POLICIES).items()
    # What the next layer's router makes of this layer's hidden state is in no trace.
    if spec.prefetch != "next_layer"
)
"""Names of policies, the runtime's own first."""


def check_policy(policy: str) -> None:
    """Raises InvalidRequestError if a policy's time cannot be predicted from a routing trace."""
    name = get_policy(policy).name
    if name not in PREDICTABLE:
        raise InvalidRequestError(
            f"policy {name} guesses the next layer's experts, which a routing trace does not "
            f"tell: its time cannot be predicted; choose one of {', '.join(PREDICTABLE)}"
        )
