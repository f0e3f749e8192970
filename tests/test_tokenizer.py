"""Loading a model's tokenizer: what decides, what does not, and what happens without one."""

import json
import shutil
from pathlib import Path

import pytest

from specter_jax.errors import CheckpointError, MissingFileError, PromptError
from specter_jax.text import TextStream, encode_prompts, load_tokenizer
from specter_jax.tokenizer import NoTokenizer

MODEL = Path(__file__).parent / "data" / "tiny-deepseek_v2"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DEEP = "[" * 100_000 + "]" * 100_000


@pytest.fixture
def directory(tmp_path):
    """The tokenizer's files alone."""
    for name in TOKENIZER_FILES:
        shutil.copy(MODEL / name, tmp_path)
    return tmp_path


def write_config(directory, **changes):
    fields = json.loads((MODEL / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**fields, **changes}))


@pytest.mark.parametrize(
    "changes",
    [
        {"n_shared_experts": None},
        {"max_position_embeddings": 2048.0},
        {"transformers_version": "of mine"},
        {"auto_map": {"AutoConfig": "code.Config", "AutoTokenizer": ["code.Tokenizer", None]}},
        {"model_type": "of_mine"},
    ],
    ids=lambda changes: next(iter(changes)),
)
def test_the_models_configuration_does_not_decide_whether_text_is_encoded(directory, changes):
    write_config(directory, **changes)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("Hello there") == load_tokenizer(MODEL).encode("Hello there")
    assert "Hello" in tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hello"}], tokenize=False
    )


@pytest.mark.parametrize("text", [None, "[]", "{broken", DEEP], ids=["none", "list", "bad", "deep"])
def test_the_models_configuration_may_be_absent_or_broken(directory, text):
    if text is not None:
        (directory / "config.json").write_text(text)
    assert load_tokenizer(directory).encode("Hello") == load_tokenizer(MODEL).encode("Hello")


@pytest.mark.parametrize("model_type", ["mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "olmoe"])
def test_the_class_is_what_transformers_chooses_from_the_whole_configuration(directory, model_type):
    from transformers import AutoTokenizer

    (directory / "config.json").write_text(json.dumps({"model_type": model_type}))
    (directory / "tokenizer_config.json").write_text("{}")
    expected = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    tokenizer = load_tokenizer(directory)
    assert type(tokenizer) is type(expected)
    assert tokenizer.encode("Hello there") == expected.encode("Hello there")


DAMAGES = {
    "tokenizer list": ("tokenizer.json", "[]", "holds a JSON array"),
    "tokenizer empty object": ("tokenizer.json", "{}", "cannot load"),
    "tokenizer empty": ("tokenizer.json", "", "JSON"),
    "tokenizer deep": ("tokenizer.json", DEEP, "nested too deeply"),
    "tokenizer deep inside": ("tokenizer.json", f'{{"model": {DEEP}}}', "nested too deeply"),
    "tokenizer bytes": ("tokenizer.json", b"\xff\xfe", "not"),
    "tokenizer other": ("tokenizer.json", '{"model": {"type": "BPE", "vocab": 5}}', "cannot load"),
    "configuration list": ("tokenizer_config.json", "[]", "holds a JSON array"),
    "configuration class": ("tokenizer_config.json", '{"tokenizer_class": 5}', "tokenizer_class"),
    "configuration tokens": ("tokenizer_config.json", '{"eos_token": [[]]}', "cannot load"),
    "own code": (
        "tokenizer_config.json",
        '{"auto_map": {"AutoTokenizer": ["code.Mine", null]}, "tokenizer_class": "Mine"}',
        "cannot load",
    ),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_broken_tokenizer_is_one_line_once_text_needs_it(directory, damage):
    name, content, complaint = DAMAGES[damage]
    (directory / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    tokenizer = load_tokenizer(directory)
    for chat in (False, True):
        with pytest.raises(CheckpointError, match=complaint) as caught:
            encode_prompts(tokenizer, ["text"], chat=chat)
        assert str(directory) in str(caught.value)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400 + len(str(directory))


def test_prompts_of_token_ids_need_no_tokenizer(tmp_path):
    tokenizer = load_tokenizer(tmp_path)
    assert isinstance(tokenizer, NoTokenizer)
    assert [one.tolist() for one in encode_prompts(tokenizer, [[5, 6]])] == [[5, 6]]
    stream = TextStream(tokenizer)
    with pytest.warns(RuntimeWarning, match="texts are empty.*no tokenizer files"):
        assert stream.push([1, 2]) + stream.flush() == ""
    assert stream.num_tokens == 2


def test_text_a_chat_or_a_stop_string_need_a_tokenizer(tmp_path):
    tokenizer = load_tokenizer(tmp_path)
    for chat in (False, True):
        with pytest.raises(MissingFileError, match="no tokenizer files"):
            encode_prompts(tokenizer, ["text"], chat=chat)
    with pytest.raises(MissingFileError, match="no tokenizer files"):
        load_tokenizer(tmp_path / "gone").encode("text")
    with pytest.raises(PromptError, match="needs text"):
        encode_prompts(tokenizer, [[1]], chat=True)
    with pytest.raises(MissingFileError, match="no tokenizer files"):
        TextStream(tokenizer, ["stop"])


def test_a_repaired_tokenizer_is_loaded(directory):
    (directory / "tokenizer.json").write_text("{}")
    assert isinstance(load_tokenizer(directory), NoTokenizer)
    shutil.copy(MODEL / "tokenizer.json", directory)
    tokenizer = load_tokenizer(directory)
    assert tokenizer.encode("Hello")
    assert load_tokenizer(directory) is tokenizer


def test_a_sentencepiece_model_alone_is_enough(tmp_path):
    sentencepiece = pytest.importorskip("sentencepiece")
    sentences = ["the cat sat on the mat", "a dog ran over the hill", "cats and dogs"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=40,
        model_type="bpe",
        minloglevel=2,
    )
    config = {"tokenizer_class": "LlamaTokenizer"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "mixtral"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.decode(tokenizer.encode("the cat"), skip_special_tokens=True) == "the cat"
