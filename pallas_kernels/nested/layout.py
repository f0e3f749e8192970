"""The nested format: a bf16 expert, given its 4-bit draft, as one remainder byte a weight.

The draft (`pallas_kernels.int4.layout`) knows a weight's sign, its group's scale `s` and the bucket
its magnitude lies in. Read as a 15-bit integer, a non-negative bf16 number is ordered like its
value, so that a bucket is a run of integers, and a weight is the run's first integer plus a
remainder. Let `E[0..7]` be the group's bucket edges as integers. Then

    base[b] = E[b]  for b = 1..7,     base[0] = max(E[1] - 256, 0),
    bits    = sign << 15 | (base[b] + remainder).

**Why 8 bits are enough.** Doubling a normal bf16 number adds 128 to its integer, multiplying it by
four adds 256. The widest bucket above the lowest is the first, `[0.03 s, 0.12 s)`. In float32, too,
0.12 is exactly four times 0.03, and rounding to bf16 commutes with a factor of four as long as
nothing is subnormal. So `E[2] - E[1] = 256`, and a magnitude in the bucket is at most 255 above
`E[1]`. Bucket 2 ends at `0.2667 s`, less than 2.3 times its beginning, and the others' edges are
closer still; the last bucket ends with `s` itself. They span less than two octaves, hence less than
256 integers. The lowest bucket is counted from 256 below its end, two octaves down: `0.0075 s`.

**Escapes.** What lies below that does not fit, 1.7 % of normally distributed weights. Such a weight
has remainder 0; its position and all its 16 bits go into a list. So whoever takes escapes for
ordinary weights can correct that from the list and the group's scale alone, without a look at the
code and the remainder among all the others: on a GPU these single bytes would cost more traffic
than the whole list.

**Tiny scales.** Products with a fraction may be subnormal if `s < 2^-120`, and processors differ in
whether they compute these or take them for 0. There all bases are 0 instead (`LEAST_SCALE_BITS`),
and weights above 255 are escapes, in whatever bucket they are. This covers groups of zeros too.

An expert is one array of int32 words, little endian; R = 2F + H rows: gate, up and down rows.

| section | contents | words |
|---|---|---|
| remainders | uint8, one a weight: gate `[F, H]`, up `[F, H]`, down `[H, F]` | 3FH / 4 |
| row starts | int32 `[R + 1]`: escapes before each row, and all of them | R + 1, padded to 4 |
| escapes | uint16 pairs `[capacity]`: input index within the row, ascending, and bits | capacity |

Capacity is a multiple of 128, the same for all experts that lie in slots of one size. Unused places
are 0.
"""

from __future__ import annotations

import dataclasses

CAPACITY_STEP = 128
"""Capacities are multiples of this, so that every section begins on 16 bytes."""
REMAINDERS = 256
"""Values a remainder has."""
LEAST_SCALE_BITS = 7 << 7
"""2^-120 as bf16 bits; groups whose scale is smaller have bases 0."""
MAX_DIMENSION = 1 << 16
"""Positions have 16 bits."""


def padded_capacity(num_escapes: int) -> int:
    """The least capacity that holds so many escapes."""
    return -(-num_escapes // CAPACITY_STEP) * CAPACITY_STEP


@dataclasses.dataclass(frozen=True)
class NestedLayout:
    """Where the sections of a nested expert lie; all offsets and sizes in words.

    Args:
        hidden, inner: sizes of the expert, multiples of 8 of at most `MAX_DIMENSION`.
        capacity: escapes there is room for, a multiple of `CAPACITY_STEP`.

    Raises:
        ValueError: a size is none of these.
    """

    hidden: int
    inner: int
    capacity: int

    def __post_init__(self) -> None:
        for name in ("hidden", "inner"):
            size = getattr(self, name)
            if size % 8 or not 0 < size <= MAX_DIMENSION:
                raise ValueError(
                    f"{name} must be a multiple of 8, at most {MAX_DIMENSION}, got {size}"
                )
        if self.capacity % CAPACITY_STEP or self.capacity < 0:
            raise ValueError(
                f"capacity must be a multiple of {CAPACITY_STEP}, not negative, got {self.capacity}"
            )

    @classmethod
    def from_words(cls, hidden: int, inner: int, num_words: int) -> NestedLayout:
        """Layout of an expert of `num_words` words; ValueError if no capacity gives that many."""
        capacity = num_words - cls(hidden, inner, 0).escapes
        if capacity < 0 or capacity % CAPACITY_STEP:
            raise ValueError(
                f"no nested expert of hidden size {hidden} and inner size {inner} has "
                f"{num_words} words"
            )
        return cls(hidden, inner, capacity)

    @property
    def num_weights(self) -> int:
        """Weights of the expert, 3FH."""
        return 3 * self.hidden * self.inner

    @property
    def num_rows(self) -> int:
        """Rows of gate, up and down."""
        return 2 * self.inner + self.hidden

    @property
    def row_starts(self) -> int:
        """First word of the row starts."""
        return self.num_weights // 4

    @property
    def escapes(self) -> int:
        """First word of the escapes."""
        return self.row_starts + -(-(self.num_rows + 1) // 4) * 4

    @property
    def num_words(self) -> int:
        """Words of the expert."""
        return self.escapes + self.capacity

    @property
    def bits_per_weight(self) -> float:
        """What a weight takes, escapes and row starts included; the draft is not."""
        return 32 * self.num_words / self.num_weights
