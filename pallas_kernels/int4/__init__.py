"""The 4-bit draft format: encoding on the host, exact decoding in numpy and JAX."""

from pallas_kernels.int4.layout import (
    BUCKET_FRACTIONS,
    CODES_PER_WORD,
    NUM_BUCKETS,
    decode,
    decode_numpy,
    encode,
    group_edges,
    unpack_codes,
)

__all__ = [
    "BUCKET_FRACTIONS",
    "CODES_PER_WORD",
    "NUM_BUCKETS",
    "decode",
    "decode_numpy",
    "encode",
    "group_edges",
    "unpack_codes",
]
