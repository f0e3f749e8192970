"""What a caller asks of sampling, checked; free of JAX, so that errors need not wait for it."""

import dataclasses
import math

import numpy as np

from specter_jax.arguments import as_integer
from specter_jax.config.checks import shown
from specter_jax.errors import InvalidRequestError

TOP_K_OFF = 0
TOP_P_OFF = 1.0
MAX_SEED = 2**32 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen from the target's logits.

    Whether decoding is greedy is a static choice (two compiled programs); the numbers themselves
    are traced, so changing them compiles nothing.

    Raises:
        InvalidRequestError: a field is out of range; the message names it.
    """

    # 0 is greedy decoding; anything above divides the logits.
    temperature: float = 0.0
    # Keep the k most probable tokens; 0 keeps all.
    top_k: int = TOP_K_OFF
    # Keep the smallest set of most probable tokens whose probability reaches p; 1 keeps all.
    top_p: float = TOP_P_OFF
    # Equal seeds give equal samples for the same request, whatever its batch neighbours.
    seed: int = 0

    def __post_init__(self) -> None:
        temperature = _as_float("temperature", self.temperature)
        if not (math.isfinite(temperature) and temperature >= 0):
            raise InvalidRequestError(
                f"temperature is {temperature}; expected a finite number >= 0 (0 is greedy)"
            )
        as_integer("top_k", self.top_k, TOP_K_OFF)
        top_p = _as_float("top_p", self.top_p)
        if not 0.0 < top_p <= 1.0:
            raise InvalidRequestError(
                f"top_p is {top_p}; expected a number above 0 and at most 1 (1 keeps every token)"
            )
        as_integer("seed", self.seed, 0, MAX_SEED)

    @property
    def greedy(self) -> bool:
        """True where the most probable token is taken and no randomness is used."""
        return self.temperature == 0.0

    def scalars(self) -> tuple[np.float32, np.int32, np.float32]:
        """(temperature, top_k, top_p) with fixed dtypes, so that jit never sees a new type.

        A Python number would be traced as weakly typed, and 1 and 1.0 as two different types.
        """
        # Values beyond float32's range would become 0 or infinity there.
        smallest = float(np.finfo(np.float32).tiny)
        temperature = min(max(float(self.temperature), smallest), float(np.finfo(np.float32).max))
        top_k = min(self.top_k, int(np.iinfo(np.int32).max))
        return np.float32(temperature), np.int32(top_k), np.float32(self.top_p)


def _as_float(name: str, value: object) -> float:
    """`value` as a float; an integer beyond a float's range is infinite."""
    if isinstance(value, bool) or not isinstance(value, (int, float, np.integer, np.floating)):
        raise InvalidRequestError(f"{name} is {shown(value)}; expected a number")
    try:
        return float(value)
    except OverflowError:
        return math.inf if value > 0 else -math.inf
