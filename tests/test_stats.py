"""Statistics: counting, rates, merging and how they are shown."""

import dataclasses
import io
import json

import pytest
from rich.console import Console

from specter_jax.stats import Stats, StatsRecorder, merge, merge_recorders, render_table


class Clock:
    """Seconds that pass only when told to."""

    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def recorded(*, tokens=9, depth=4, wait=0.25, sequences=1):
    """A generation of two iterations: of four drafted tokens 4, then 1, are accepted."""
    clock = Clock()
    recorder = StatsRecorder(clock=clock, sequences=sequences)
    clock.now += 0.5
    recorder.first_token()
    recorder.record_iteration(depth, [4], [4])
    recorder.record_iteration(depth, [4], [1])
    with recorder.timed("wait_ms"):
        clock.now += wait
    recorder.new_tokens = tokens
    recorder.resident_hits, recorder.prefetch_hits, recorder.demand_misses = 6, 2, 2
    recorder.expert_choices, recorder.expert_matches = 100, 97
    recorder.bytes_host_to_device = 1000
    recorder.peak_device_bytes = 5000
    clock.now += 0.75
    recorder.finish()
    clock.now += 50.0
    return recorder


def test_rates_and_times_follow_their_definitions():
    stats = recorded().summary()
    assert stats.iterations == 2
    assert stats.drafted == 8
    assert stats.accepted == 5
    # Four of the first iteration; one and its refusal of the second.
    assert stats.judged == 6
    assert stats.mean_accepted == 2.5
    assert stats.acceptance_rate == pytest.approx(5 / 6)
    assert stats.draft_yield == pytest.approx(5 / 8)
    assert stats.expert_match_rate == 0.97
    assert stats.hit_rate == 0.8
    assert stats.depths == {4: 2}
    assert stats.ttft_ms == pytest.approx(500)
    assert stats.wait_ms == pytest.approx(250)
    assert stats.decode_ms == pytest.approx(1000)
    assert stats.tpot_ms == pytest.approx(1000 / 8)


def test_rows_of_a_batch_are_judged_each_for_itself():
    recorder = StatsRecorder(clock=Clock(), sequences=3)
    recorder.record_iteration(2, [2, 2, 0], [2, 0, 0])
    assert (recorder.drafted, recorder.accepted, recorder.judged) == (4, 2, 3)


def test_a_sequence_of_a_batch_waits_for_its_own_tokens_only():
    # Three sequences of 9 tokens each in one second of decoding: 8 tokens after the first each.
    assert recorded(tokens=27, sequences=3).summary().tpot_ms == pytest.approx(1000 / 8)


def test_what_has_no_denominator_is_none():
    recorder = StatsRecorder(clock=Clock())
    recorder.new_tokens = 1
    stats = recorder.summary()
    for name in ("mean_accepted", "acceptance_rate", "expert_match_rate", "hit_rate", "tpot_ms"):
        assert getattr(stats, name) is None
    assert stats.decode_ms == 0.0


def test_only_the_first_first_token_counts_and_time_is_added_when_work_fails():
    clock = Clock()
    recorder = StatsRecorder(clock=clock)
    recorder.first_token()
    clock.now += 1.0
    recorder.first_token()

    def fail_late():
        clock.now += 0.5
        raise KeyError

    with pytest.raises(KeyError), recorder.timed("draft_ms"):
        fail_late()
    assert recorder.summary().ttft_ms == 0.0
    assert recorder.draft_ms == pytest.approx(500)


def test_merging_adds_counters_and_weighs_times():
    one = recorded(tokens=9).summary()
    two = recorded(tokens=5, depth=8, wait=1.25).summary()
    merged = merge([one, two])
    assert merged.new_tokens == 14
    assert merged.sequences == 2
    assert merged.depths == {4: 2, 8: 2}
    assert merged.acceptance_rate == pytest.approx(10 / 12)
    assert merged.expert_match_rate == 0.97
    assert merged.hit_rate == 0.8
    assert merged.bytes_host_to_device == 2000
    assert merged.peak_device_bytes == 5000
    assert merged.ttft_ms == pytest.approx(500)
    # 1 s for 8 tokens and 2 s for 4.
    assert merged.tpot_ms == pytest.approx(3000 / 12)
    assert merge([one]) == one
    assert merge_recorders([recorded()]) == one
    with pytest.raises(ValueError, match="at least one"):
        merge([])


def test_every_counter_of_the_recorder_reaches_the_summary():
    names = {field.name for field in dataclasses.fields(Stats)}
    own = {"clock", "started", "first_token_at", "finished_at"}
    assert {field.name for field in dataclasses.fields(StatsRecorder)} - own <= names


def test_the_dictionary_is_json_and_keeps_the_documented_names():
    fields = json.loads(json.dumps(recorded().summary().to_dict()))
    documented = (
        "new_tokens iterations mean_accepted acceptance_rate expert_match_rate hit_rate "
        "resident_hits prefetch_hits demand_misses bytes_host_to_device ttft_ms tpot_ms "
        "peak_device_bytes depths"
    )
    assert set(documented.split()) <= set(fields)
    assert fields["depths"] == {"4": 2}


def test_the_table_shows_every_statistic_in_readable_units():
    stats = dataclasses.replace(recorded().summary(), bytes_host_to_device=3 * 2**29)
    output = io.StringIO()
    Console(file=output, width=80).print(render_table(stats, title="Run"))
    text = output.getvalue()
    for field in dataclasses.fields(stats):
        assert field.name in text
    for shown in ("80.0%", "1.50 GiB", "4:2", "125.00 ms"):
        assert shown in text


def test_mean_accepted_is_of_one_sequence_whatever_the_batch():
    one, three = StatsRecorder(), StatsRecorder(sequences=3)
    one.record_iteration(4, [4], [2])
    three.record_iteration(4, [4, 4, 4], [2, 2, 2])
    three.record_iteration(4, [4], [2])
    assert one.summary().mean_accepted == three.summary().mean_accepted == 2
    assert three.summary().iterations == 2
    assert three.summary().row_iterations == 4
