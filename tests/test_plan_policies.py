"""`specter plan --policy`: what it offers is what it can predict."""

import pytest

from specter_jax.cli.main import main
from specter_jax.errors import InvalidRequestError, UnknownPolicyError
from specter_jax.offload import get_policy
from specter_jax.planner.policies import PREDICTABLE, check_policy


def test_help_offers_only_what_can_be_predicted(capsys):
    with pytest.raises(SystemExit) as end:
        main(["plan", "--help"])
    assert end.value.code == 0
    text = " ".join(capsys.readouterr().out.split())
    assert text.count("--policy NAME one of ") == 1
    offered = text.partition("--policy NAME one of ")[2].partition(" (default")[0]
    assert offered.split(", ") == list(PREDICTABLE)
    assert "sp-e" not in offered
    assert "lookahead" in offered


def test_the_others_are_refused_with_those_that_can_be_predicted():
    for name in ("sp-e", "mo", "mo-sm"):
        with pytest.raises(InvalidRequestError, match=rf"policy {name} .*choose one of lookahead"):
            check_policy(name)
    for name in PREDICTABLE:
        check_policy(get_policy(name).name)
    with pytest.raises(UnknownPolicyError):
        check_policy("magic")
