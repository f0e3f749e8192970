"""Graphics cards to plan for, by the figures of their maker's documents, as others quote them.

The link is the nominal rate of PCIe in one direction: 32 GB/s for 16 lanes of generation 4, 64 GB/s
for generation 5 (before encoding and protocol). Of all nominal figures the planner takes what the
calibration says is reached in practice.
"""

from __future__ import annotations

from dataclasses import dataclass

from specter_jax.errors import InvalidRequestError

PCIE_4_X16, PCIE_5_X16 = 32.0, 64.0
"""GB/s in one direction: 16 lanes of 16 and 32 GT/s, eight transfers a byte."""


@dataclass(frozen=True, kw_only=True)
class Card:
    """A card's nominal figures.

    memory_gib: memory, GiB as sold; bandwidth: of that memory, TB/s (10^12 bytes); link: host to
    device, GB/s (10^9 bytes), one direction; source: where the figures stand.
    """

    name: str
    title: str
    memory_gib: float
    bandwidth: float
    link: float
    source: str


CARDS: dict[str, Card] = {
    card.name: card
    for card in (
        Card(
            name="rtx-3090",
            title="NVIDIA GeForce RTX 3090",
            memory_gib=24,
            bandwidth=0.936,
            link=PCIE_4_X16,
            source="NVIDIA Ampere GA102 GPU Architecture, whitepaper (24 GB GDDR6X, 936 GB/s, "
            "PCIe 4.0 x16)",
        ),
        Card(
            name="rtx-4090",
            title="NVIDIA GeForce RTX 4090",
            memory_gib=24,
            bandwidth=1.008,
            link=PCIE_4_X16,
            source="NVIDIA Ada GPU Architecture, whitepaper (24 GB GDDR6X, 384 bit at 21 Gbit/s: "
            "1008 GB/s, PCIe 4.0 x16)",
        ),
        Card(
            name="rtx-5090",
            title="NVIDIA GeForce RTX 5090",
            memory_gib=32,
            bandwidth=1.792,
            link=PCIE_5_X16,
            source="NVIDIA RTX Blackwell GPU Architecture, whitepaper (32 GB GDDR7, 1792 GB/s, "
            "PCIe 5.0 x16)",
        ),
        Card(
            name="a100-80gb",
            title="NVIDIA A100 80GB SXM",
            memory_gib=80,
            bandwidth=2.039,
            link=PCIE_4_X16,
            source="NVIDIA A100 Tensor Core GPU, datasheet (80 GB HBM2e, 2039 GB/s, PCIe Gen4: "
            "64 GB/s in both directions)",
        ),
        Card(
            name="h100-sxm",
            title="NVIDIA H100 SXM",
            memory_gib=80,
            bandwidth=3.35,
            link=PCIE_5_X16,
            source="NVIDIA H100 Tensor Core GPU, datasheet (80 GB HBM3, 3.35 TB/s, PCIe Gen5: "
            "128 GB/s in both directions)",
        ),
        Card(
            name="h200",
            title="NVIDIA H200 SXM",
            memory_gib=139,
            bandwidth=4.8,
            link=PCIE_5_X16,
            source="NVIDIA H200 Tensor Core GPU, datasheet (141 GB HBM3e, 4.8 TB/s, PCIe Gen5: "
            "128 GB/s in both directions); about 139 GiB are there for programs",
        ),
    )
}


def get_card(name: str) -> Card:
    """Look a card up by name.

    Raises:
        InvalidRequestError: if there is none of that name; the message lists those there are.
    """
    if not isinstance(name, str) or name not in CARDS:
        raise InvalidRequestError(f"unknown card {name!r}: choose one of {', '.join(CARDS)}")
    return CARDS[name]
