"""The nested format of full-precision experts: what the draft does not already say."""

from pallas_kernels.nested.codec import (
    BASE_FRACTIONS,
    decode,
    decode_numpy,
    encode,
    num_escapes,
    with_capacity,
)
from pallas_kernels.nested.layout import (
    CAPACITY_STEP,
    LEAST_SCALE_BITS,
    MAX_DIMENSION,
    REMAINDERS,
    NestedLayout,
    padded_capacity,
)

__all__ = [
    "BASE_FRACTIONS",
    "CAPACITY_STEP",
    "LEAST_SCALE_BITS",
    "MAX_DIMENSION",
    "REMAINDERS",
    "NestedLayout",
    "decode",
    "decode_numpy",
    "encode",
    "num_escapes",
    "padded_capacity",
    "with_capacity",
]
