"""The depth controller against synthetic machines whose best depth is known."""

import dataclasses
import itertools
import math
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specter_jax.controller import (
    DEPTH_BUCKETS,
    PROBES,
    DepthController,
    IterationTiming,
    expected_tokens,
    parse_depth,
)
from specter_jax.errors import InvalidRequestError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Machine:
    """Times of a made-up machine, in ms, and how often its draft is right."""

    draft: float
    verify: float
    verify_per_token: float
    wait_per_doubling: float
    alpha: float
    noise: float = 0.0

    def cost(self, depth):
        return (
            self.draft * depth
            + self.verify
            + self.verify_per_token * depth
            + self.wait_per_doubling * math.log2(depth + 1)
        )

    def tpot(self, depth):
        return self.cost(depth) / expected_tokens(self.alpha, depth)

    def best(self):
        return min(DEPTH_BUCKETS, key=self.tpot)

    def run(self, depth, rng):
        accepted = 0
        while accepted < depth and rng.random() < self.alpha:
            accepted += 1
        factor = 1.0 + self.noise * rng.uniform(-1, 1)
        return IterationTiming(
            depth=depth,
            new_tokens=accepted + 1,
            drafted=depth,
            accepted=accepted,
            draft_ms=self.draft * depth * factor,
            wait_ms=self.wait_per_doubling * math.log2(depth + 1) * factor,
            verify_ms=(self.verify + self.verify_per_token * depth) * factor,
            total_ms=self.cost(depth) * factor,
        )


SLOW_DRAFT = Machine(
    draft=9.0, verify=10.0, verify_per_token=1.0, wait_per_doubling=3.0, alpha=0.95
)
CHEAP_DRAFT = Machine(
    draft=1.0, verify=10.0, verify_per_token=3.0, wait_per_doubling=4.0, alpha=0.95
)
FREE_DRAFT = Machine(
    draft=0.1, verify=20.0, verify_per_token=0.1, wait_per_doubling=0.5, alpha=0.99
)
POOR_DRAFT = Machine(
    draft=2.0, verify=10.0, verify_per_token=0.5, wait_per_doubling=4.0, alpha=0.30
)
MACHINES = {
    "slow draft": SLOW_DRAFT,
    "cheap draft": CHEAP_DRAFT,
    "free draft": FREE_DRAFT,
    "poor draft": POOR_DRAFT,
}


def drive(controller, machine, iterations, seed=0):
    """Run the loop; returns the timings."""
    rng = random.Random(seed)
    timings = []
    for _ in range(iterations):
        timing = machine.run(controller.next_depth(), rng)
        controller.observe(timing)
        timings.append(timing)
    return timings


def test_a_fixed_depth_never_changes():
    controller = DepthController(fixed=3)
    timings = drive(controller, CHEAP_DRAFT, 30)
    assert {timing.depth for timing in timings} == {3}
    assert controller.chosen == 3
    assert not controller.auto


def test_the_first_iterations_probe_plain_decoding_too():
    timings = drive(DepthController(), CHEAP_DRAFT, len(PROBES))
    assert [timing.depth for timing in timings] == list(PROBES)
    assert 0 in PROBES


def test_a_slow_draft_is_given_up_for_plain_decoding():
    assert SLOW_DRAFT.best() == 0
    controller = DepthController()
    timings = drive(controller, SLOW_DRAFT, 100)
    assert controller.chosen == 0
    assert sum(timing.depth == 0 for timing in timings) > 85


@pytest.mark.parametrize("noise", [0.0, 0.1])
@pytest.mark.parametrize("name", MACHINES)
def test_the_chosen_depth_is_within_five_percent_of_the_best(name, noise):
    machine = dataclasses.replace(MACHINES[name], noise=noise)
    controller = DepthController()
    drive(controller, machine, 300)
    assert machine.tpot(controller.chosen) <= 1.05 * machine.tpot(machine.best())


def test_the_machines_cover_plain_inner_and_deepest_optima():
    assert [machine.best() for machine in MACHINES.values()] == [0, 8, 16, 0]


@pytest.mark.parametrize("name", MACHINES)
def test_a_whole_run_is_hardly_slower_than_plain_decoding_or_the_best_depth(name):
    machine = dataclasses.replace(MACHINES[name], noise=0.1)
    timings = drive(DepthController(), machine, 600)
    time = sum(timing.total_ms for timing in timings)
    tokens = sum(timing.new_tokens for timing in timings)
    assert time / tokens <= 1.06 * machine.tpot(machine.best())
    assert time / tokens <= 1.04 * machine.tpot(0)


@settings(max_examples=40, deadline=None)
@given(
    machine=st.builds(
        Machine,
        draft=st.floats(0.05, 20),
        verify=st.floats(1, 50),
        verify_per_token=st.floats(0, 10),
        wait_per_doubling=st.floats(0, 20),
        alpha=st.floats(0.05, 0.99),
        noise=st.floats(0, 0.2),
    ),
    seed=st.integers(0, 1000),
)
def test_exploring_costs_a_bounded_share_of_the_time(machine, seed):
    controller = DepthController()
    timings = drive(controller, machine, 300, seed)
    total = sum(timing.total_ms for timing in timings)
    # One exploration may turn out worse than predicted before it is counted.
    slack = max(machine.cost(depth) for depth in DEPTH_BUCKETS) * 1.2
    assert controller.exploration_ms <= 0.02 * total + slack
    assert controller.chosen in DEPTH_BUCKETS


def test_costs_that_drift_are_followed():
    controller = DepthController()
    drive(controller, CHEAP_DRAFT, 200)
    assert controller.chosen == CHEAP_DRAFT.best()
    drive(controller, SLOW_DRAFT, 300, seed=1)
    assert controller.chosen == 0
    drive(controller, FREE_DRAFT, 600, seed=2)
    assert FREE_DRAFT.tpot(controller.chosen) <= 1.05 * FREE_DRAFT.tpot(16)


def test_equal_observations_give_equal_choices():
    machine = dataclasses.replace(CHEAP_DRAFT, noise=0.2)
    runs = [[t.depth for t in drive(DepthController(), machine, 150, seed=5)] for _ in range(2)]
    assert runs[0] == runs[1]
    controller = DepthController()
    assert controller.next_depth() == controller.next_depth()


def test_a_near_tie_does_not_make_it_change_back_and_forth():
    machine = dataclasses.replace(CHEAP_DRAFT, noise=0.05)
    controller = DepthController()
    drive(controller, machine, 100)
    chosen = []
    rng = random.Random(3)
    for _ in range(300):
        controller.observe(machine.run(controller.next_depth(), rng))
        chosen.append(controller.chosen)
    assert sum(a != b for a, b in itertools.pairwise(chosen)) <= 6


def test_one_hiccup_does_not_change_the_choice():
    controller = DepthController()
    drive(controller, FREE_DRAFT, 100)
    before = controller.chosen
    timing = FREE_DRAFT.run(before, random.Random(0))
    controller.observe(dataclasses.replace(timing, total_ms=100 * timing.total_ms))
    assert controller.chosen == before


def test_compiling_at_the_first_use_of_a_depth_is_not_held_against_it():
    controller, rng, seen = DepthController(), random.Random(0), set()
    for _ in range(150):
        timing = CHEAP_DRAFT.run(controller.next_depth(), rng)
        if timing.depth not in seen:
            timing = dataclasses.replace(timing, total_ms=timing.total_ms + 2000.0)
        seen.add(timing.depth)
        controller.observe(timing)
    assert CHEAP_DRAFT.tpot(controller.chosen) <= 1.05 * CHEAP_DRAFT.tpot(CHEAP_DRAFT.best())


def test_alpha_is_learnt_from_judged_tokens():
    controller = DepthController(fixed=8)
    drive(controller, dataclasses.replace(CHEAP_DRAFT, alpha=0.8), 400)
    assert controller.alpha == pytest.approx(0.8, abs=0.05)
    batch = DepthController(fixed=2)
    for _ in range(200):
        batch.observe(
            IterationTiming(
                depth=2,
                new_tokens=5,
                drafted=8,
                accepted=1,
                judged=5,
                draft_ms=1,
                wait_ms=0,
                verify_ms=1,
                total_ms=2,
            )
        )
    assert batch.alpha == pytest.approx(0.2, abs=0.02)


def test_the_table_tells_measured_from_predicted_and_predicts_well():
    controller = DepthController()
    drive(controller, CHEAP_DRAFT, len(PROBES))
    rows = {row["depth"]: row for row in controller.table()}
    assert list(rows) == list(DEPTH_BUCKETS)
    assert rows[0]["source"] == rows[4]["source"] == "measured"
    for depth in (1, 2, 8, 16):
        assert rows[depth]["source"] == "predicted"
        # The made-up machine follows the model's own form.
        assert rows[depth]["cost_ms"] == pytest.approx(CHEAP_DRAFT.cost(depth), rel=0.01)
    assert sum(row["chosen"] for row in rows.values()) == 1


def test_expected_tokens_by_hand():
    assert expected_tokens(0.5, 2) == pytest.approx(1.75)
    assert expected_tokens(0.9, 0) == pytest.approx(1.0)
    assert expected_tokens(1.0, 8) == 9.0


def test_requested_depths_are_checked():
    assert parse_depth("auto") is None
    assert parse_depth("8") == parse_depth(8) == 8
    for bad in (-1, 17, 2.5, "deep", True, None):
        with pytest.raises(InvalidRequestError, match="depth"):
            parse_depth(bad)
