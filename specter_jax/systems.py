"""The systems of the evaluation, each as a configuration of this runtime.

All share the kernels, the transfers and the INT4 draft, so that a comparison shows what a system
decides and not how well it was written. `source` says where a system was published, `published`
what it does there, `assumed` what this configuration adds or leaves out. Where a choice was open,
it is the one that is better for the system.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from specter_jax.config.checks import shown
from specter_jax.controller import AUTO
from specter_jax.errors import InvalidRequestError


@dataclass(frozen=True, kw_only=True)
class System:
    """One system: a policy and a depth.

    depth: tokens drafted per verification, 0 (plain decoding) to 16, or "auto".
    """

    name: str
    policy: str
    depth: int | str
    source: str
    published: str
    assumed: str

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of `specter_jax.generate`: `generate(model, prompts, **system.options)`."""
        return {"policy": self.policy, "depth": self.depth}


SYSTEMS: dict[str, System] = {
    system.name: system
    for system in (
        System(
            name="mo",
            policy="mo",
            depth=0,
            source="mixtral-offloading: Eliseev and Mazur, arXiv 2312.17238",
            published="An LRU cache of equal size in every layer; while a layer is computed, the "
            "next layer's experts are guessed by its router from this layer's hidden state and "
            "fetched into buffers beside the cache. No speculative decoding.",
            assumed="All of a token's top-k experts are guessed. Experts exact, not quantized "
            "to 2 or 3. A layer that needs more experts at once than its share borrows slots.",
        ),
        System(
            name="mo-sm",
            policy="mo-sm",
            depth=AUTO,
            source="mixtral-offloading with speculative decoding, a baseline of Specter's "
            "evaluation",
            published="As mo, with speculative decoding in front.",
            assumed="The draft is the INT4 model that all systems share; the guess of the next "
            "layer is made for every verified token; depth is chosen by measurement.",
        ),
        System(
            name="specmoeoff",
            policy="specmoeoff",
            depth=AUTO,
            source="SpecMoEOff: Wang et al., arXiv 2508.21706",
            published="Speculative decoding enlarges the work per expert while weights are "
            "streamed from host memory; the depth is tuned for the hardware. Attention of a "
            "verification runs on the CPU. Made for throughput at large batches.",
            assumed="Verification streams all experts of each layer, the next layer's behind "
            "them, through slots that LRU empties before the next sweep unless nearly all experts "
            "fit. Attention on the GPU. Depth is chosen by measurement.",
        ),
        System(
            name="sp-moe",
            policy="sp-l",
            depth=AUTO,
            source="SP-MoE: Chen et al., arXiv 2510.10302",
            published="Experts that the draft predicts are prefetched while it runs, up to a "
            "cut-off layer from a latency model; behind it they are loaded on demand.",
            assumed="The draft is the INT4 model, so that its routing is the prediction. The "
            "cut-off uses each layer's real number of loads (offload/cutoff.py). LRU over all "
            "layers; depth is chosen by measurement.",
        ),
        System(
            name="specter",
            policy="lookahead",
            depth=AUTO,
            source="Specter: Wang et al., and this implementation",
            published="Multi-step drafting with the INT4 model; its routing is prefetched in "
            "layer order while it runs; expert-wise verification; adaptive depth.",
            assumed="Eviction by expected next use is this implementation's own.",
        ),
    )
}


def get_system(name: str) -> System:
    """Look a system up by name.

    Raises:
        InvalidRequestError: if there is none of that name; the message lists those there are.
    """
    if not isinstance(name, str) or name not in SYSTEMS:
        raise InvalidRequestError(
            f"unknown system {shown(name)}: choose one of {', '.join(SYSTEMS)}"
        )
    return SYSTEMS[name]
