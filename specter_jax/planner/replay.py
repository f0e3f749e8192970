"""Replays a routing trace through the runtime's own engine on a device that only keeps time.

The loop, the policies, the Expert Lookahead Buffer, the cache, the plans and the counters are those
that run on a GPU (`specter_jax.engine`, `specter_jax.offload`); only the device programs and the
transfers are replaced. So a change of a policy changes its prediction, and nothing is written
twice. One greedy sequence at a time. Behind a refused token a trace holds the text's own tokens,
not those that the draft would have gone on with.
"""

from __future__ import annotations

import jax
import numpy as np

from specter_jax.config import ModelConfig
from specter_jax.controller import AUTO, DepthController, parse_depth
from specter_jax.engine.batch import Batch
from specter_jax.engine.context import Context, Optimism
from specter_jax.engine.decode import decode
from specter_jax.engine.pace import Pace
from specter_jax.engine.side_work import InlineWork
from specter_jax.offload import DEFAULT_POLICY, get_policy, make_eviction
from specter_jax.planner.device import Device, SpanCosts, Store, TimedPool
from specter_jax.planner.policies import check_policy
from specter_jax.planner.programs import ReplayPrograms, layer_numbers
from specter_jax.planner.timing import Timing
from specter_jax.planner.traces import RoutingTrace
from specter_jax.runtime_config import RuntimeConfig
from specter_jax.stats import Stats, StatsRecorder, merge_recorders

_KV_DTYPE = "bfloat16"


def replay(
    config: ModelConfig,
    trace: RoutingTrace,
    timing: Timing,
    *,
    num_slots: int,
    max_in_flight: int,
    depth: int | str = AUTO,
    policy: str = DEFAULT_POLICY,
) -> Stats:
    """Statistics that the runtime would report, with the model's times in place of measured ones.

    Prompts run one after the other with one cache, as in `generate`. Peak memory is not replayed.

    Args:
        trace: fitted to `config`, see `RoutingTrace.fitted`.
        num_slots, max_in_flight: expert slots, and transfers that may be on their way at once.
        depth: tokens drafted per verification, or "auto".

    Raises:
        InvalidRequestError: the policy guesses the next layer's experts, which no trace tells, or
            an argument is out of range.
    """
    spec = get_policy(policy)
    fixed = parse_depth(depth)
    check_policy(policy)
    device = Device(timing)
    layers, experts = config.num_moe_layers, config.num_experts
    pool = TimedPool(
        device,
        store=Store(layers, experts, round(timing.model.expert)),
        device=jax.devices()[0],
        num_slots=min(num_slots, layers * experts),
        max_in_flight=max_in_flight,
        eviction=make_eviction(spec, num_layers=layers, num_experts=experts),
    )
    pool.fill()
    pool.settle()
    programs = ReplayPrograms(config, trace, device)
    outputs = trace.target_argmax.shape[1]
    batch = Batch(
        prompts=[np.zeros(trace.prompt_tokens, np.int32)],
        limits=[outputs],
        draws=None,
        kv_dtype=_KV_DTYPE,
    )
    runtime = RuntimeConfig(
        num_slots=pool.num_slots,
        max_in_flight=max_in_flight,
        max_context=trace.prompt_tokens + outputs,
        stretches=True,
    )
    controller, optimism, recorders = DepthController(fixed=fixed), Optimism(), []
    pace = Pace()
    for programs.prompt in range(trace.num_prompts):
        recorder = StatsRecorder(clock=device.clock)
        ctx = Context(
            config=config,
            params=layer_numbers(config),
            programs=programs,
            runtime=runtime,
            pool=pool,
            eviction=pool.cache.eviction,
            policy=spec,
            recorder=recorder,
            trace=SpanCosts(device),
            optimism=optimism,
            pace=pace,
            device=pool.device,
            side_work=InlineWork,
        )
        pool.trace = ctx.trace
        # Tokens stand for themselves: none of them ends the sequence.
        decode(ctx, batch, controller, lambda row, tokens, book=recorder: _count(book, tokens))
        pool.settle()
        recorders.append(recorder)
    return merge_recorders(recorders)


def _count(recorder: StatsRecorder, tokens: list[int]) -> bool:
    recorder.new_tokens += len(tokens)
    return False
