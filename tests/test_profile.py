"""The depth profile and its figure."""

import dataclasses
from types import SimpleNamespace

import pytest

from specter_jax.errors import InvalidRequestError
from specter_jax.plots import plot_profile
from specter_jax.profile import DepthPoint, Profile, profile
from specter_jax.stats import StatsRecorder


def made_up_profile():
    points = tuple(
        DepthPoint(
            depth=depth,
            tpot_ms=tpot,
            acceptance_rate=0.95 if depth else None,
            tokens_per_iteration=1 + 0.9 * depth,
            experts_per_layer=experts,
            hit_rate=0.9,
            bytes_per_token=1e6,
        )
        for depth, tpot, experts in (
            (0, 10.0, 6.0),
            (1, 7.0, 9.5),
            (2, 5.5, 14.0),
            (4, 4.9, 22.0),
            (8, 5.2, 33.0),
            (16, 7.3, 46.0),
        )
    )
    return Profile(
        points=points,
        family="deepseek_v2",
        num_experts=64,
        top_k=6,
        expert_slots=416,
        policy="lookahead",
        device="made up",
    )


def test_the_best_depth_has_the_least_time_per_token():
    measured = made_up_profile()
    assert measured.best.depth == 4
    assert measured.to_dict()["best_depth"] == 4


@pytest.mark.parametrize("ending", ["svg", "png"])
def test_the_figure_is_written(tmp_path, ending):
    path = tmp_path / f"profile.{ending}"
    plot_profile(made_up_profile(), path)
    content = path.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == "png" else b"<?xml")
    assert len(content) > 5000


def test_plain_decoding_alone_can_be_drawn(tmp_path):
    measured = made_up_profile()
    plain = dataclasses.replace(measured, points=measured.points[:1])
    plot_profile(plain, tmp_path / "plain.svg")
    assert (tmp_path / "plain.svg").exists()


def test_other_kinds_of_file_are_refused(tmp_path):
    with pytest.raises(InvalidRequestError, match=r"\.svg, \.png"):
        plot_profile(made_up_profile(), tmp_path / "profile.gif")


def test_outputs_of_one_token_have_no_time_per_token(monkeypatch):
    """The context may end before the second token; a time of 0 would look like the best one."""
    stats = StatsRecorder(sequences=1).summary()
    monkeypatch.setattr("specter_jax.api.generate", lambda *_, **__: SimpleNamespace(stats=stats))
    model = SimpleNamespace(config=SimpleNamespace(num_moe_layers=5))
    with pytest.raises(InvalidRequestError, match="one token long"):
        profile(model, ["x"], depths=(0,))


def test_measuring_reports_working_set_and_acceptance(tiny_directory):
    import specter_jax as sj

    model = sj.load(tiny_directory, expert_slots=40, dtype="float32")
    measured = profile(model, ["The old man walked"], max_new_tokens=10, depths=(0, 2))
    plain, drafted = measured.points
    assert plain.depth == 0
    assert plain.acceptance_rate is None
    assert plain.tokens_per_iteration == 1.0
    # One token uses exactly its own experts in every layer.
    assert plain.experts_per_layer == pytest.approx(measured.top_k)
    assert measured.top_k < drafted.experts_per_layer <= 3 * measured.top_k
    assert 1.0 < drafted.tokens_per_iteration <= 3.0
    assert 0.5 < drafted.acceptance_rate <= 1.0
    assert min(plain.tpot_ms, drafted.tpot_ms) > 0
    with pytest.raises(InvalidRequestError, match="does not speculate"):
        profile(model, ["x"], policy="lru")
