"""Replays: the clock's rules, hand-computed cases, limits, independent counts, the real engine."""

import dataclasses
import itertools

import numpy as np
import pytest

from specter_jax.errors import InvalidRequestError
from specter_jax.planner.device import Device
from specter_jax.planner.record import record_trace
from specter_jax.planner.replay import replay
from specter_jax.planner.traces import BUNDLED, load_trace
from tests.engine_cases import ALL, PROMPTS, QUARTER, load_tiny, run
from tests.planner_cases import (
    CONFIG,
    EXPERTS,
    FREE,
    LAYERS,
    MODEL,
    TOP_K,
    random_trace,
    timing,
    trace_of,
)

TOTAL = LAYERS * EXPERTS
IN_FLIGHT = 8


def run_replay(trace, model=None, **options):
    settings = {"num_slots": TOTAL, "max_in_flight": IN_FLIGHT, "depth": 4} | options
    return replay(CONFIG, trace, model or timing(), **settings)


def test_a_transfer_before_a_program_overlaps_it_and_one_behind_it_waits():
    each = timing().transfer()
    overlapping = Device(timing())
    moment = overlapping.transfer(1)[0]
    program = overlapping.dispatch(3 * each)
    assert moment.ready == pytest.approx(each)
    assert program.ready == pytest.approx(3 * each)

    behind = Device(timing())
    behind.dispatch(3 * each)
    assert [m.ready for m in behind.transfer(2)] == pytest.approx([4 * each, 5 * each])


def test_a_program_waits_for_what_it_takes_and_the_host_for_what_it_reads():
    costs = dataclasses.replace(
        FREE, dispatch_us=10, meeting_us=20, issue_us=5, transfer_latency_us=100
    )
    model = timing(costs)
    device = Device(model)
    arrivals = device.transfer(2)
    # The first transfer shows the latency, the second follows on the busy link.
    assert arrivals[0].ready == pytest.approx(5e-6 + 100e-6 + model.transfer())
    assert arrivals[1].ready == pytest.approx(arrivals[0].ready + model.transfer())
    program = device.dispatch(1e-3, arrivals)
    assert device.now == pytest.approx(2 * 5e-6 + 10e-6)
    assert program.ready == pytest.approx(arrivals[1].ready + 1e-3)
    assert not program.is_ready()
    assert program.block_until_ready().is_ready()


def test_with_every_expert_resident_time_is_that_of_the_programs():
    """Draft of 4 and verification of 5 positions, again and again; all choices alike."""
    outputs, depth = 1 + 3 * 5, 4
    experts = np.zeros((LAYERS, 1, 1 + outputs, TOP_K), int) + np.arange(TOP_K)
    trace = trace_of(experts, experts, np.ones((1, outputs), bool), 1)
    stats = run_replay(trace, depth=depth)
    model = timing()
    iteration = depth * model.draft_step(LAYERS * TOP_K) + model.verification(LAYERS * TOP_K)
    assert stats.iterations == 3
    assert stats.new_tokens == outputs
    assert stats.tpot_ms == pytest.approx(3 * iteration * 1e3 / (outputs - 1))
    assert stats.hit_rate == 1.0
    assert stats.bytes_host_to_device == 0
    assert stats.wait_ms == 0
    # Handing over a program comes on top, once for the draft's and once for the verification. After
    # the first, what is handed over runs while the next program is being handed over.
    handed = timing(dataclasses.replace(FREE, draft_call_us=3000, verify_call_us=5000))
    costly = run_replay(trace, handed, depth=depth)
    hidden = 2 * iteration * 1e3
    assert costly.decode_ms - stats.decode_ms == pytest.approx(3 * 8 - hidden)


def test_plain_decoding_without_speculation_is_hand_computed_too():
    trace = random_trace(3, prompts=1, outputs=10)
    stats = run_replay(trace, depth=0)
    used = [
        sum(len(np.unique(trace.target_experts[m, 0, p])) for m in range(LAYERS))
        for p in range(1, 10)
    ]
    expected = np.mean([timing().verification(count) for count in used])
    assert stats.tpot_ms == pytest.approx(expected * 1e3)


def test_a_refusal_ends_what_an_iteration_yields():
    outputs = 12
    agree = np.ones((1, outputs), bool)
    agree[0, 3] = False
    experts = random_trace(4, prompts=1, outputs=outputs).target_experts
    stats = run_replay(trace_of(experts, experts, agree, 1), depth=4)
    # Output 0 is the prefill's; 1 and 2 are accepted, 3 is the target's own; then 4 and one more.
    assert stats.accepted == 2 + 4 + 2
    assert stats.judged == 3 + 4 + 2
    assert stats.new_tokens == outputs


def test_the_link_alone_sets_the_time_when_every_use_must_be_loaded():
    """One slot per choice of a layer, and no expert twice in a row: all are loaded, on demand."""
    outputs = 8
    turn = np.arange(1 + outputs)[:, None] * TOP_K + np.arange(TOP_K)
    experts = np.broadcast_to(turn % EXPERTS, (LAYERS, 1, 1 + outputs, TOP_K))
    trace = trace_of(experts, experts, np.ones((1, outputs), bool), 1)
    model = timing()
    stats = run_replay(trace, num_slots=TOP_K, depth=0, policy="lru")
    assert stats.demand_misses == (outputs - 1) * LAYERS * TOP_K
    per_layer = TOP_K * model.transfer() + model.commit(TOP_K) + model.experts(TOP_K)
    expected = LAYERS * per_layer + CONFIG.num_layers * model.layer() + model.head()
    assert stats.tpot_ms == pytest.approx(expected * 1e3, rel=1e-6)


def count_lru(trace, num_slots: int) -> int:
    """Loads after the first token, counted with a plain list in order of last use."""
    order = [(m, e) for e in range(EXPERTS) for m in range(LAYERS)][:num_slots]

    def load(m: int, used: list[int]) -> int:
        missing = [(m, e) for e in used if (m, e) not in order]
        for key in missing:
            if len(order) == num_slots:
                order.remove(next(k for k in order if k[0] != m or k[1] not in used))
            order.append(key)
        return len(missing)

    def touch(m: int, used: list[int]) -> None:
        for key in ((m, e) for e in used if (m, e) in order):
            order.remove(key)
            order.append(key)

    loads = 0
    for prompt in range(trace.num_prompts):
        chosen = trace.target_experts[:, prompt]
        positions = [[np.unique(chosen[m, p]).tolist() for m in range(LAYERS)] for p in range(24)]
        # The prompt's one token: loaded layer by layer, then shown to the order as a whole.
        for m, used in enumerate(positions[0]):
            load(m, used)
        for m, used in enumerate(positions[0]):
            touch(m, used)
        for used_by_layer in positions[1:]:
            for m, used in enumerate(used_by_layer):
                loads += load(m, used)
                touch(m, used)
    return loads


@pytest.mark.parametrize("num_slots", [30, 60, 120])
def test_loads_equal_an_independent_count(num_slots):
    trace = random_trace(5, hot=0.3)
    stats = run_replay(trace, num_slots=num_slots, depth=0, policy="lru")
    loads = stats.demand_misses + stats.prefetch_hits
    assert loads == count_lru(trace, num_slots)
    assert stats.resident_hits + loads == 2 * 23 * LAYERS * TOP_K


def assert_falling(times: list[float]) -> None:
    """Each at most the one before, but for rounding."""
    for before, after in itertools.pairwise(times):
        assert after <= before * (1 + 1e-9)


@pytest.mark.parametrize("policy", ["lookahead", "lru-s", "sp-l", "lru", "specmoeoff"])
def test_a_faster_link_and_more_slots_never_cost_time(policy):
    trace = load_trace(sorted(BUNDLED.glob("deepseek*"))[0]).select(1, 32)
    config = dataclasses.replace(
        CONFIG,
        num_experts=64,
        top_k=6,
        num_layers=27,
        moe_layers=tuple(range(1, 27)),
        windows=CONFIG.windows[:1] * 27,
    )
    model = dataclasses.replace(timing(), model=dataclasses.replace(MODEL, num_layers=27))
    settings = {"max_in_flight": 15, "depth": 4, "policy": policy}

    def tpot(num_slots: int, link: float) -> float:
        hardware = dataclasses.replace(model.hardware, link=link)
        on = dataclasses.replace(model, hardware=hardware)
        return replay(config, trace, on, num_slots=num_slots, **settings).tpot_ms

    by_link = [tpot(600, link) for link in (5e9, 10e9, 20e9, 80e9)]
    assert_falling(by_link)
    by_slots = [tpot(slots, 20e9) for slots in (200, 600, 1200, 1664)]
    assert_falling(by_slots)
    # When all fit, the link has no part in it.
    assert tpot(1664, 5e9) == pytest.approx(by_slots[-1])


def test_host_costs_of_a_boundary_come_on_top():
    trace = random_trace(6, outputs=16)
    free = run_replay(trace, num_slots=60)
    costly = run_replay(trace, timing(dataclasses.replace(FREE, boundary_us=1000)), num_slots=60)
    assert costly.iterations == free.iterations
    # Five steps are three chunks; towards the end of the output there may be fewer. What arrives
    # in the time added is written to slots.
    added = (costly.draft_ms - free.draft_ms) / free.iterations
    assert 1 - 1e-9 <= added <= 3 + 1e3 * IN_FLIGHT * timing().commit(1) + 1e-9


def test_auto_depth_settles_on_the_predicted_best():
    trace = random_trace(7, prompts=4, outputs=120, hot=0.5)
    fixed = {d: run_replay(trace, depth=d).tpot_ms for d in (0, 1, 2, 4, 8, 16)}
    auto = run_replay(trace, depth="auto")
    assert min(fixed.values()) <= auto.tpot_ms <= 1.15 * min(fixed.values())
    assert len(auto.depths) > 1


def test_replays_repeat_exactly():
    trace = random_trace(8)
    assert run_replay(trace, num_slots=50) == run_replay(trace, num_slots=50)


@pytest.mark.parametrize("policy", ["sp-e", "mo", "mo-sm"])
def test_guesses_that_no_trace_tells_are_refused(policy):
    with pytest.raises(InvalidRequestError, match="next layer's experts"):
        run_replay(random_trace(9), policy=policy)


@pytest.fixture(scope="module")
def recorded(tiny_directory):
    model = load_tiny(tiny_directory, ALL)
    ids = [[7, 300, 42, 5, 1187, 99], [1510, 356, 1187, 8, 21, 4]]
    return ids, record_trace(model, ids, max_new_tokens=24)


def test_a_recorded_trace_holds_the_models_own_text(tiny_directory, recorded):
    ids, trace = recorded
    model = load_tiny(tiny_directory, ALL)
    result = run(model, ids, max_new_tokens=24, depth=0, ignore_eos=True)
    assert trace.target_argmax.tolist() == result.tokens
    assert trace.prompt_tokens == 6
    assert trace.num_experts == CONFIG.num_experts
    assert trace.fitted(CONFIG) is trace
    assert 0.8 < trace.agree.mean() <= 1
    matches = (trace.target_experts[..., None] == trace.draft_experts[..., None, :]).any(-1)
    assert matches.mean() > 0.9


def test_recording_needs_every_expert_and_room(tiny_directory):
    with pytest.raises(InvalidRequestError, match="a slot for every expert"):
        record_trace(load_tiny(tiny_directory, QUARTER), PROMPTS)
    with pytest.raises(InvalidRequestError, match="96 together"):
        record_trace(load_tiny(tiny_directory, ALL), PROMPTS, max_new_tokens=96)


COUNTERS = ("iterations", "new_tokens", "resident_hits", "demand_misses", "bytes_host_to_device")


def test_plain_decoding_counts_what_the_real_engine_counts(tiny_directory, recorded):
    """Without guesses nothing depends on time, so that all counters must be the same."""
    ids, trace = recorded
    model = load_tiny(tiny_directory, QUARTER)
    model.use_policy("lookahead")
    real = run(model, ids, policy="lru", depth=0, max_new_tokens=24, ignore_eos=True).stats
    bytes_each = dataclasses.replace(MODEL, expert=model.pool.store.expert_bytes)
    on = dataclasses.replace(timing(), model=bytes_each)
    stats = run_replay(
        trace,
        on,
        num_slots=QUARTER,
        max_in_flight=model.runtime.max_in_flight,
        policy="lru",
        depth=0,
    )
    assert {n: getattr(stats, n) for n in COUNTERS} == {n: getattr(real, n) for n in COUNTERS}


def test_speculation_counts_nearly_what_the_real_engine_counts(tiny_directory, recorded):
    """Drafts go on from their own tokens and KV behind a refusal, which a trace cannot tell."""
    ids, trace = recorded
    model = load_tiny(tiny_directory, QUARTER)
    model.use_policy("lookahead")
    real = run(model, ids, policy="lru-s", depth=3, max_new_tokens=24, ignore_eos=True).stats
    stats = run_replay(trace, num_slots=QUARTER, policy="lru-s", depth=3)
    assert abs(stats.iterations - real.iterations) <= 2
    uses, real_uses = (s.resident_hits + s.demand_misses for s in (stats, real))
    assert uses == pytest.approx(real_uses, rel=0.15)
    assert stats.hit_rate == pytest.approx(real.hit_rate, abs=0.05)
