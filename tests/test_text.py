"""Tokenizer, prompts, streaming and stop strings."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from specter_jax.errors import InvalidRequestError, PromptError
from specter_jax.text import TextStream, encode_prompts, load_tokenizer, read_prompts

MODEL = Path(__file__).parent / "data" / "tiny-deepseek_v2"


@pytest.fixture(scope="module")
def tokenizer():
    return load_tokenizer(MODEL)


def metaspace_tokenizer():
    """A tokenizer whose decoder drops the first token's leading space, as SentencePiece's do."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", "▁", "▁the", "▁cat", "s", "▁sat", ".", "▁▁", "▁a"]
    core = Tokenizer(models.WordLevel({piece: i for i, piece in enumerate(pieces)}, "<unk>"))
    core.pre_tokenizer = pre_tokenizers.Metaspace()
    core.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=core, eos_token="</s>", unk_token="<unk>")


def whole_text(tokenizer, tokens):
    return tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def stream(tokenizer, tokens, stop=(), sizes=(1,)):
    """Push tokens in groups of the given sizes; returns the pieces and the stream."""
    text_stream, pieces, start, turn = TextStream(tokenizer, stop), [], 0, 0
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        pieces.append(text_stream.push(tokens[start : start + size]))
        start, turn = start + size, turn + 1
    pieces.append(text_stream.flush())
    return pieces, text_stream


def cut(text, stop):
    """Reference: read character by character; end at the first complete stop string."""
    for end in range(1, len(text) + 1):
        starts = [end - len(one) for one in stop if text[:end].endswith(one)]
        if starts:
            return text[: min(starts)]
    return text


SAMPLES = [
    "The cat sat on the mat.",
    "def f(x):\n    return x + 1\n",
    "naïve café — 12 € 😀👩‍👩‍👧 日本語",
    "\ufffd is a character too \ufffd",
    "",
]


@pytest.mark.parametrize("text", SAMPLES)
def test_streamed_text_is_the_decoded_text(tokenizer, text):
    tokens = tokenizer.encode(text, add_special_tokens=False)
    pieces, _ = stream(tokenizer, tokens)
    assert "".join(pieces) == whole_text(tokenizer, tokens) == text


def test_half_a_character_is_held_back(tokenizer):
    tokens = tokenizer.encode("😀", add_special_tokens=False)
    assert len(tokens) > 1
    pieces, _ = stream(tokenizer, tokens)
    assert pieces[:-2] == [""] * (len(tokens) - 1)
    assert pieces[-2] == "😀"


def test_text_comes_as_soon_as_it_is_complete(tokenizer):
    tokens = tokenizer.encode("one two three", add_special_tokens=False)
    pieces, _ = stream(tokenizer, tokens)
    assert all(pieces[:-1])
    assert pieces[-1] == ""


@settings(max_examples=150, deadline=None)
@given(
    tokens=st.lists(st.integers(0, 4095), max_size=30),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    stop=st.lists(st.text("ae t\n\ufffd", min_size=1, max_size=3), max_size=3),
)
def test_any_tokens_in_any_grouping_give_the_decoded_text_cut_at_the_stop(
    tokenizer, tokens, sizes, stop
):
    """Random tokens are mostly invalid UTF-8, in every possible way."""
    pieces, text_stream = stream(tokenizer, tokens, stop, sizes)
    expected = cut(whole_text(tokenizer, tokens), stop)
    assert "".join(pieces) == expected
    one_by_one, other = stream(tokenizer, tokens, stop)
    assert "".join(one_by_one) == expected
    assert text_stream.num_tokens == other.num_tokens


@settings(max_examples=150, deadline=None)
@given(tokens=st.lists(st.integers(0, 9), max_size=12))
@example(tokens=[1, 2, 3])
@example(tokens=[2, 2, 3, 1, 4, 5])
def test_spaces_that_depend_on_the_token_before_are_right(tokens):
    sentencepiece_like = metaspace_tokenizer()
    pieces, _ = stream(sentencepiece_like, tokens)
    assert "".join(pieces) == whole_text(sentencepiece_like, tokens)


def test_a_stop_string_is_cut_off_and_ends_the_stream(tokenizer):
    tokens = tokenizer.encode("Question: why?\nAnswer: because.\nQuestion: how?")
    pieces, text_stream = stream(tokenizer, tokens, ["\nQuestion"])
    assert "".join(pieces) == "Question: why?\nAnswer: because."
    assert text_stream.stopped
    # Tokens up to the one that completed the stop string, none behind it.
    kept = whole_text(tokenizer, tokens[: text_stream.num_tokens])
    assert "\nQuestion" in kept
    assert "\nQuestion" not in whole_text(tokenizer, tokens[: text_stream.num_tokens - 1])
    assert text_stream.push([5]) == text_stream.flush() == ""


def test_the_beginning_of_a_stop_string_is_held_until_it_is_decided(tokenizer):
    stream_ = TextStream(tokenizer, ["ab!"])
    a, b, c = (tokenizer.encode(one, add_special_tokens=False) for one in "abc")
    assert stream_.push(a) == stream_.push(b) == ""
    assert stream_.push(c) == "abc"
    assert stream_.push(a) == ""
    assert stream_.flush() == "a"


@pytest.mark.parametrize("stop", ["x", [""], [3], ["ok", "a\ud800"]])
def test_stop_strings_are_checked(tokenizer, stop):
    with pytest.raises(InvalidRequestError, match="stop"):
        TextStream(tokenizer, stop)


def test_prompts_become_token_ids(tokenizer):
    text, ids = encode_prompts(tokenizer, ["Hello there", [5, 6, 7]])
    assert text.dtype == ids.dtype == np.int32
    assert whole_text(tokenizer, text) == "Hello there"
    assert ids.tolist() == [5, 6, 7]


def test_a_chat_prompt_goes_through_the_template(tokenizer):
    (ids,) = encode_prompts(tokenizer, ["Hello"], chat=True)
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False, add_generation_prompt=True
    )
    assert "Hello" in expected != "Hello"
    assert tokenizer.decode(ids) == expected


@pytest.mark.parametrize(
    ("prompts", "complaint"),
    [
        ([], "no prompts"),
        ("text", "one string"),
        (["fine", ""], "prompt 1 is empty"),
        ([[]], "prompt 0 is empty"),
        ([[1.5]], "neither text nor"),
        ([[[1]]], "neither text nor"),
        ([None], "neither text nor"),
        ([[-1]], "outside"),
        ([[2**31]], "outside"),
        (["a\ud800b"], r"prompt 0 is not valid Unicode: character 2 is '\\ud800'"),
        (["hi\udcff"], "prompt 0 is not valid Unicode: character 3"),
    ],
)
def test_prompts_that_cannot_be_used_are_named(tokenizer, prompts, complaint):
    with pytest.raises(PromptError, match=complaint):
        encode_prompts(tokenizer, prompts)


def test_chat_needs_a_template_and_text(tokenizer):
    with pytest.raises(PromptError, match="no chat template"):
        encode_prompts(metaspace_tokenizer(), ["hi"], chat=True)
    with pytest.raises(PromptError, match="needs text"):
        encode_prompts(tokenizer, [[1, 2]], chat=True)


def test_prompt_files_take_prompt_or_the_first_turn(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "one\u2028still one"}, {"turns": ["two", "more"], "id": 3}]
    path.write_text("\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines) + "\n")
    assert read_prompts(path) == ["one\u2028still one", "two"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ('{"prompt": "ok"}\n{broken', r"p\.jsonl:2: not JSON"),
        ('\n["list"]', r"p\.jsonl:2: expected a JSON object"),
        ('{"text": "x"}', r"p\.jsonl:1: has neither"),
        ('{"turns": []}', r"p\.jsonl:1: has neither"),
        ('{"prompt": ""}', r"p\.jsonl:1: the prompt is empty"),
        ('{"prompt": "a\\ud800b"}', r"p\.jsonl:1: the prompt is not valid Unicode"),
        ("[" * 100_000, r"p\.jsonl:1: nested too deeply"),
        ('{"prompt": ' + "9" * 5000 + "}", r"p\.jsonl:1: not JSON"),
        ('{"turns": [7]}', r"p\.jsonl:1: the prompt is 7"),
        ("\n\n", r"p\.jsonl: holds no prompts"),
    ],
)
def test_malformed_prompt_files_name_file_and_line(tmp_path, text, complaint):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(PromptError, match=complaint):
        read_prompts(path)


def test_prompt_files_of_windows_editors_are_read(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "one"}\r\n\r\n{"prompt": "two\xef\xbb\xbf"}\r\n')
    assert read_prompts(path) == ["one", "two\ufeff"]
    path.write_bytes(b"\xef\xbb\xbf\r\n")
    with pytest.raises(PromptError, match="holds no prompts"):
        read_prompts(path)


def test_unreadable_prompt_files_are_named(tmp_path):
    with pytest.raises(PromptError, match="nowhere"):
        read_prompts(tmp_path / "nowhere.jsonl")
    with pytest.raises(PromptError, match="name of the file of prompts is empty"):
        read_prompts("")
    with pytest.raises(PromptError, match="cannot read prompts"):
        read_prompts(tmp_path)
    (tmp_path / "latin.jsonl").write_bytes(b'{"prompt": "caf\xe9"}')
    with pytest.raises(PromptError, match="UTF-8"):
        read_prompts(tmp_path / "latin.jsonl")
