"""What to load, in which order, and what of it is worth a slot before its turn."""

from __future__ import annotations

import numpy as np


def plan_loads(
    predicted: np.ndarray,
    resident: np.ndarray,
    in_flight: np.ndarray | None = None,
    *,
    start_layer: int = 0,
    cutoff: int | None = None,
    counts: np.ndarray | None = None,
) -> list[tuple[int, int]]:
    """Predicted experts that have to be loaded, in the order in which to issue them.

    Layer order, because verification consumes layers in that order; within a layer the most
    often predicted first (a prediction of several tokens is less likely to be wrong), then by id.

    Args:
        predicted: bool [M, E], the draft's prediction.
        resident: bool [M, E], experts in a slot.
        in_flight: bool [M, E] or None, experts whose transfer has been issued.
        start_layer: first layer to consider.
        cutoff: first layer not to consider, or None for all.
        counts: int [M, E] or None, how many drafted tokens chose each expert.

    Returns:
        (layer, expert) pairs.
    """
    missing = predicted & ~resident
    if in_flight is not None:
        missing &= ~in_flight
    missing[:start_layer] = False
    if cutoff is not None:
        missing[cutoff:] = False
    layers, experts = np.nonzero(missing)
    if counts is not None:
        order = np.lexsort((experts, -counts[layers, experts].astype(np.int64), layers))
        layers, experts = layers[order], experts[order]
    return list(zip(layers.tolist(), experts.tolist(), strict=True))


def prefetch_admission(
    loads: list[tuple[int, int]],
    *,
    victim_retention: np.ndarray,
    load_retention: np.ndarray,
    num_free: int,
) -> list[tuple[int, int]]:
    """The prefix-respecting choice of `loads` that is worth a slot while the draft still runs.

    Free slots are filled first. After that the i-th further load would evict the i-th lowest
    candidate victim, so it is admitted only while that victim is worth less than the load:
    retention is comparable between resident and absent experts, and a predicted expert's is
    higher the sooner its layer comes.

    Args:
        loads: (layer, expert) pairs in issue order, as from `plan_loads`.
        victim_retention: [V], retention of the slots' experts that may be evicted now.
        load_retention: [M, E], retention of every expert, from the eviction policy.
        num_free: free slots.

    Returns:
        The admitted pairs, in the order given.
    """
    admitted = list(loads[:num_free])
    victims = np.sort(victim_retention)
    for (layer, expert), victim in zip(loads[num_free:], victims, strict=False):
        if victim >= load_retention[layer, expert]:
            break
        admitted.append((layer, expert))
    return admitted
