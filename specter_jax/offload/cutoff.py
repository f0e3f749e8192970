"""The cut-off layer of the `sp-l` policy: how deep prefetching goes while the draft runs.

SP-MoE (Chen et al., "SP-MoE: Speculative Decoding and Prefetching for Accelerating MoE-based
Model Inference", arXiv 2510.10302) prefetches only the first L layers' experts during drafting.
L is the largest for which the transfers end with the drafting (just in time) and the experts fit
in the memory set aside for them (no overfetch):

    L * k * t_io <= T_draft     and     L * k <= slots

with k experts per layer and t_io the time to move one. The two constraints come from published
descriptions of the method and were not checked against the paper's text. They assume the same k in
every layer; here the number of loads of each layer is known from the draft's prediction, so the
sums over the layers below L take the place of L * k. With equal loads both are the same.
"""

from __future__ import annotations

import numpy as np


def cutoff_layer(
    loads_per_layer: np.ndarray, *, load_ms: float, draft_ms: float, num_slots: int
) -> int:
    """The first layer that is *not* prefetched, from 0 (none) to M (all).

    Args:
        loads_per_layer: [M], experts that each layer would have to load.
        load_ms: time one expert's transfer takes on the link, milliseconds.
        draft_ms: time left until verification starts, milliseconds.
        num_slots: slots that prefetched experts may occupy.
    """
    cumulative = np.cumsum(np.asarray(loads_per_layer, dtype=np.float64))
    # A rounding error must not cost a layer whose transfers end exactly with the drafting.
    in_time = cumulative * load_ms <= draft_ms * (1 + 1e-9)
    return int(np.count_nonzero(in_time & (cumulative <= num_slots)))
