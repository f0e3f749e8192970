"""Pinned host memory: the limit that large models need, and the error where it is not enough."""

import jax
import pytest

import specter_jax as sj
from specter_jax import host_memory, model
from specter_jax.errors import BudgetError

GIB = 2**30


@pytest.mark.parametrize("given", [None, "90"])
def test_the_limit_is_raised_where_it_is_too_low_and_none_was_given(monkeypatch, given):
    monkeypatch.setenv(host_memory.LIMIT, "0")  # so that it is put back afterwards
    monkeypatch.delenv(host_memory.LIMIT)
    if given:
        monkeypatch.setenv(host_memory.LIMIT, given)
    host_memory.allow_pinned(75 * GIB)
    assert host_memory.os.environ[host_memory.LIMIT] == (given or "81")


def test_small_models_keep_the_default(monkeypatch):
    monkeypatch.setenv(host_memory.LIMIT, "0")  # so that it is put back afterwards
    monkeypatch.delenv(host_memory.LIMIT)
    host_memory.allow_pinned(45 * GIB)
    assert host_memory.LIMIT not in host_memory.os.environ


def test_memory_that_runs_out_while_loading_is_explained(tiny_directory, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.")

    monkeypatch.setattr(model, "pin_layer", fails)
    with pytest.raises(BudgetError, match=f"pinned host memory.*{host_memory.LIMIT}="):
        sj.load(tiny_directory, dtype="float32")


def test_other_errors_stay_what_they_are(tiny_directory, monkeypatch):
    def fails(*_):
        raise jax.errors.JaxRuntimeError("INTERNAL: something else")

    monkeypatch.setattr(model, "pin_layer", fails)
    with pytest.raises(jax.errors.JaxRuntimeError, match="something else"):
        sj.load(tiny_directory, dtype="float32")
