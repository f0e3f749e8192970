"""Arguments of the Python API: what is wrong is one typed line, and NumPy numbers are fine."""

import numpy as np
import pytest

import specter_jax as sj
from specter_jax.config.checks import shown
from specter_jax.errors import InvalidRequestError, SpecterError
from tests.engine_cases import load_tiny

GENERATE = {
    "max_new_tokens": [0, -1, 1.5, "5", None, float("nan"), True],
    "depth": [-1, 17, 2.0, "eight", "1.5", None, True, np.zeros((3, 3))],
    "policy": ["fifo", None, [], 5],
    "temperature": [-1, float("nan"), float("inf"), 10**400, "1", None],
    "top_k": [-1, 1.5, "3", None, -(10**5000), np.zeros((2, 2))],
    "top_p": [0, 1.1, float("nan"), 10**400, "x"],
    "seed": [-1, 1.5, 2**32, None, 10**5000, "x" * 5000],
    "batch_size": [0, 4, 1.0, "1", True],
    "stop": ["end", 5, [""], [5]],
    "chat": [1, "yes", None],
    "ignore_eos": [1, None],
    "on_text": [5, "print"],
    "trace": [5, True],
}
LOAD = {
    "gpu_memory": ["", "16 XB", -1, 0, 1.5, [], True],
    "expert_slots": [-1, 3, 4.5, "40", float("nan"), True],
    "dtype": ["int8", None, 5, np.float32],
    "max_context": [0, 1, 50.5, "5", 10**9],
    "max_batch": [0, -1, 1.5, "1", True],
    "verify": ["", "all", None],
    "progress": [5],
}


def cases(table):
    return [(name, value) for name, values in table.items() for value in values]


@pytest.mark.parametrize(("name", "value"), cases(GENERATE), ids=shown)
def test_generate_refuses_it_with_its_name(tiny_directory, name, value):
    model = load_tiny(tiny_directory)
    with pytest.raises(SpecterError, match=name) as caught:
        sj.generate(model, ["a"], **{"max_new_tokens": 1, "depth": 0, name: value})
    assert isinstance(caught.value, ValueError)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize("prompts", [None, 5, "text", b"text", [], [5], [None], [[]], [[1.5]]])
def test_generate_refuses_prompts_of_the_wrong_kind(tiny_directory, prompts):
    with pytest.raises(InvalidRequestError):
        sj.generate(load_tiny(tiny_directory), prompts, max_new_tokens=1, depth=0)


@pytest.mark.parametrize(("name", "value"), cases(LOAD), ids=shown)
def test_load_refuses_it(tiny_directory, name, value):
    with pytest.raises(SpecterError) as caught:
        sj.load(tiny_directory, **{name: value})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("path", [None, b"", 5, [], ""])
def test_load_refuses_what_is_no_path(path):
    with pytest.raises(SpecterError, match=r"path|directory"):
        sj.load(path)


def test_numpy_numbers_and_iterables_are_taken(tiny_directory):
    model = load_tiny(tiny_directory)
    plain = sj.generate(model, ["a b"], max_new_tokens=3, depth=1)
    like = sj.generate(
        model, (text for text in ["a b"]), max_new_tokens=np.int64(3), depth=np.int32(1), stop=None
    )
    assert like.tokens == plain.tokens


def test_a_model_generates_one_request_at_a_time(tiny_directory):
    model = load_tiny(tiny_directory)
    refused = []

    def nested(index, text):
        with pytest.raises(InvalidRequestError, match="generating already") as caught:
            sj.generate(model, ["a"], max_new_tokens=1, depth=0)
        refused.append(caught.value)

    result = sj.generate(model, ["Once upon a"], max_new_tokens=4, depth=1, on_text=nested)
    assert refused
    assert len(result.tokens[0]) == 4
    again = sj.generate(model, ["Once upon a"], max_new_tokens=4, depth=1)
    assert again.tokens == result.tokens


def test_peak_bytes_count_the_arrays_on_the_device(tiny_directory):
    model = load_tiny(tiny_directory)
    stats = sj.generate(model, ["a"], max_new_tokens=1, depth=0).stats
    assert stats.peak_device_bytes >= model.pool.slots.nbytes + model.ledger.shared_bytes
