"""The tokenizer of a model's directory, or a stand-in where there is none that works.

Only the tokenizer's own files are read. `config.json` describes the model, which this package has
checked on its own terms; transformers' validation of it is stricter and must not decide whether
text can be encoded.
"""

import contextlib
import functools
import os
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol

from specter_jax.errors import CheckpointError, MissingFileError
from specter_jax.json_files import read_json_object

CONFIG_NAME = "config.json"
TOKENIZER_CONFIG_NAME = "tokenizer_config.json"
_JSON_OBJECTS = ("tokenizer.json", TOKENIZER_CONFIG_NAME)
# One of these is the vocabulary; the other files only configure it.
_VOCABULARIES = ("tokenizer.json", "*.model", "vocab.*", "*.tiktoken", "tekken.json")
_REASON_LENGTH = 200
_NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"


class Tokenizer(Protocol):
    """The part of a transformers tokenizer that this package uses."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...
    def decode(self, token_ids: Sequence[int], **options: Any) -> str: ...


class NoTokenizer:
    """Stands in for a tokenizer that cannot be loaded.

    Prompts of token ids need none: their output tokens are complete, and their texts are empty,
    of which a warning tells. Whatever needs text raises why there is no tokenizer.
    """

    chat_template = None

    def __init__(self, error: CheckpointError):
        # Not the error itself, which would keep alive all that was being loaded.
        self._kind, self._message = type(error), str(error)
        self._warned = False

    def fail(self) -> NoReturn:
        """Raises why there is no tokenizer."""
        raise self._kind(self._message)

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Fails."""
        self.fail()

    def decode(self, token_ids: Sequence[int], **options: Any) -> str:
        """No text, whatever the tokens."""
        if len(token_ids) and not self._warned:
            self._warned = True
            warnings.warn(f"texts are empty: {self._message}", RuntimeWarning, stacklevel=2)
        return ""


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer stored in a converted (or Hugging Face) directory; nothing is downloaded.

    Loaded once per directory and state of its files. Where the directory holds no tokenizer that
    transformers can read, the result is a `NoTokenizer`, which raises once text is encoded:
    MissingFileError without tokenizer files, CheckpointError for files that do not work.
    """
    directory = Path(path).resolve()
    files = sorted(file for file in directory.glob("*") if file.is_file())
    stats = [(file.name, file.stat()) for file in files]
    stamps = tuple((name, stat.st_mtime_ns, stat.st_size) for name, stat in stats)
    return _load(directory, stamps)


@functools.lru_cache(maxsize=4)
def _load(directory: Path, stamps: tuple[tuple[str, int, int], ...]) -> Tokenizer:
    del stamps  # a part of the cache's key only
    try:
        return _load_with_transformers(directory)
    except CheckpointError as error:
        return NoTokenizer(error)


def _load_with_transformers(directory: Path) -> Tokenizer:
    if not any(file for pattern in _VOCABULARIES for file in directory.glob(pattern)):
        raise MissingFileError(
            f"{directory}: no tokenizer files; copy tokenizer.json and {TOKENIZER_CONFIG_NAME} "
            "from the model's source"
        )
    for name in _JSON_OBJECTS:
        if (directory / name).exists():
            _read_object(directory / name)
    try:
        with tempfile.TemporaryDirectory(prefix="specter-tokenizer-") as view:
            # transformers reads config.json in several places; it does not find one here.
            for file in directory.iterdir():
                if file.name != CONFIG_NAME:
                    Path(view, file.name).symlink_to(file)
            return _from_pretrained(view, _model_type(directory / CONFIG_NAME))
    except BaseException as error:
        # Damaged files make transformers raise nearly anything, and the library below it panic,
        # with an exception that is not an Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        raise CheckpointError(
            f"{directory}: transformers cannot load a tokenizer ({_reason(error)}); copy the "
            "tokenizer's files from the model's source"
        ) from error


def _from_pretrained(directory: str, model_type: str | None) -> Tokenizer:
    with _without_advice():
        from transformers import CONFIG_MAPPING, AutoTokenizer, PreTrainedConfig

    # The model's type takes part in the choice of the tokenizer's class; nothing else of the
    # model's configuration does, so that a default one serves.
    config = CONFIG_MAPPING[model_type]() if model_type in CONFIG_MAPPING else PreTrainedConfig()
    return AutoTokenizer.from_pretrained(
        directory, config=config, local_files_only=True, trust_remote_code=False
    )


@contextlib.contextmanager
def _without_advice() -> Iterator[None]:
    """Around the import of transformers, which tells whoever has no PyTorch that models are
    missing: none are wanted here. The environment is as before afterwards."""
    before = os.environ.get(_NO_ADVICE)
    os.environ[_NO_ADVICE] = "1"
    try:
        yield
    finally:
        if before is None:
            os.environ.pop(_NO_ADVICE, None)
        else:
            os.environ[_NO_ADVICE] = before


def _model_type(path: Path) -> str | None:
    """The type that config.json names, if it can be read."""
    try:
        model_type = _read_object(path).get("model_type")
    except CheckpointError:
        return None
    return model_type if isinstance(model_type, str) else None


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object; raises CheckpointError."""
    try:
        fields = read_json_object(path, str(path))
    except ValueError as error:
        raise CheckpointError(str(error)) from error
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({_reason(error)})") from error
    if not isinstance(fields.get("tokenizer_class"), str | None):
        raise CheckpointError(f"{path}: tokenizer_class is not a text")
    return fields


def _reason(error: BaseException) -> str:
    line = str(error).strip().partition("\n")[0] or type(error).__name__
    return line if len(line) <= _REASON_LENGTH else line[: _REASON_LENGTH - 3] + "..."
