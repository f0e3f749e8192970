"""Text in and out: prompts, streaming detokenisation and stop strings."""

import json
import os
import reprlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from specter_jax.config.checks import shown
from specter_jax.errors import InvalidRequestError, PromptError
from specter_jax.tokenizer import NoTokenizer, Tokenizer, load_tokenizer

__all__ = [
    "REPLACEMENT",
    "TextStream",
    "Tokenizer",
    "apply_chat_template",
    "check_stop",
    "check_text",
    "encode_prompts",
    "load_tokenizer",
    "read_prompts",
]

# What an undecodable byte becomes; at the end of a text it may be half of a character to come.
REPLACEMENT = "\ufffd"


def encode_prompts(
    tokenizer: Tokenizer, prompts: Sequence[str] | Sequence[Sequence[int]], *, chat: bool = False
) -> list[np.ndarray]:
    """Token ids of every prompt, int32 [tokens] each.

    Args:
        prompts: texts, or token ids that are taken as they are.
        chat: make each text one user message of the tokenizer's chat template, followed by the
            opening of the answer.

    Raises:
        PromptError: no prompts, one that is empty, not valid Unicode or neither text nor ids, or
            `chat` without a template or with ids.
        CheckpointError: a text, and the tokenizer is a `NoTokenizer`.
    """
    if isinstance(prompts, str):
        raise PromptError("prompts is one string; expected a list of prompts")
    if len(prompts) == 0:
        raise PromptError("there are no prompts; give at least one")
    return [_encode(tokenizer, number, prompt, chat) for number, prompt in enumerate(prompts)]


def _encode(tokenizer: Tokenizer, number: int, prompt: Any, chat: bool) -> np.ndarray:
    if not isinstance(prompt, str):
        if chat:
            raise PromptError(f"prompt {number} is token ids; a chat template needs text")
        return _as_ids(number, prompt)
    check_text(prompt, f"prompt {number}")
    if chat:
        text = apply_chat_template(tokenizer, prompt)
        # The template writes the special tokens out.
        ids = tokenizer.encode(text, add_special_tokens=False)
    else:
        ids = tokenizer.encode(prompt)
    if not ids:
        raise PromptError(f"prompt {number} has no tokens; expected some text")
    return np.asarray(ids, np.int32)


def check_text(prompt: str, name: str) -> None:
    """Raises PromptError for an empty text or one that is not valid Unicode."""
    if not prompt:
        raise PromptError(f"{name} is empty; expected some text")
    if (place := find_surrogate(prompt)) is not None:
        raise PromptError(
            f"{name} is not valid Unicode: character {place + 1} is {prompt[place]!r}; "
            "expected UTF-8 text"
        )


def find_surrogate(text: str) -> int | None:
    """The place of the first surrogate, or None.

    Half of a UTF-16 pair is no character and has no UTF-8 form. It comes from "\\ud800" in JSON
    and from bytes of a command line that are not UTF-8.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return error.start
    return None


def _as_ids(number: int, prompt: Any) -> np.ndarray:
    try:
        ids = np.asarray(prompt)
    except ValueError:
        ids = np.asarray(None)
    if ids.ndim == 1 and ids.size == 0:
        raise PromptError(f"prompt {number} is empty; expected at least one token id")
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise PromptError(f"prompt {number} is neither text nor a list of token ids")
    limits = np.iinfo(np.int32)
    if ids.min() < 0 or ids.max() > limits.max:
        raise PromptError(f"prompt {number} has token ids outside 0..{limits.max}")
    return ids.astype(np.int32)


def apply_chat_template(tokenizer: Any, prompt: str) -> str:
    """The prompt as a user message in the tokenizer's chat template.

    Raises PromptError if there is no template or it refuses the message, CheckpointError if there
    is no tokenizer.
    """
    if isinstance(tokenizer, NoTokenizer):
        tokenizer.fail()
    if not getattr(tokenizer, "chat_template", None):
        raise PromptError("this model's tokenizer has no chat template; leave chat off")
    messages = [{"role": "user", "content": prompt}]
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise what their authors like
        raise PromptError(f"the model's chat template refuses the prompt: {error}") from error


def check_stop(stop: Sequence[str]) -> tuple[str, ...]:
    """The stop strings as a tuple.

    Raises InvalidRequestError unless they are non-empty texts of valid Unicode; another one could
    never occur in an output.
    """
    if isinstance(stop, str):
        raise InvalidRequestError(f"stop is the string {shown(stop)}; expected a list of strings")
    for one in stop:
        if not isinstance(one, str) or not one:
            raise InvalidRequestError(f"stop holds {shown(one)}; expected non-empty strings")
        if find_surrogate(one) is not None:
            raise InvalidRequestError(f"stop holds {shown(one)}, which is not valid Unicode")
    return tuple(stop)


class TextStream:
    """Turns tokens into text as they come, holding back what may still change.

    Held back are the beginning of a character whose other bytes have not come and the beginning of
    what may become a stop string. All that `push` and `flush` return, joined, is the text of all
    tokens (special ones left out), cut before the stop string that is complete first; of several
    complete at once, before the longest. The result does not depend on how tokens are grouped.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        """Raises InvalidRequestError for a bad stop string, CheckpointError for one that cannot be
        looked for since there is no tokenizer."""
        self._tokenizer = tokenizer
        self._stop = check_stop(stop)
        if self._stop and isinstance(tokenizer, NoTokenizer):
            tokenizer.fail()
        self._tokens: list[int] = []
        # Only tokens from `_window` on are decoded. `_window_text` is what those before `_read`
        # gave; decoding them too keeps spaces right that depend on the token before.
        self._window = 0
        self._read = 0
        self._window_text = ""
        self._held = ""
        self.stopped = False

    @property
    def num_tokens(self) -> int:
        """Tokens taken in, up to and including the one that completed a stop string."""
        return len(self._tokens)

    def push(self, tokens: Sequence[int]) -> str:
        """Take in tokens; returns the text that is final now. After a stop nothing more comes."""
        parts = []
        for token in tokens:
            if self.stopped:
                break
            self._tokens.append(int(token))
            parts.append(self._advance(final=False))
        return "".join(parts)

    def flush(self) -> str:
        """The text still held back, once no more tokens will come."""
        if self.stopped:
            return ""
        text = self._advance(final=True)
        held, self._held = self._held, ""
        return text if self.stopped else text + held

    def _advance(self, *, final: bool) -> str:
        text = self._decode(self._tokens[self._window :])
        if not final and text.endswith(REPLACEMENT):
            return ""
        new = text[len(self._window_text) :]
        if not new:
            return ""
        following = self._decode(self._tokens[self._read :])
        if following:
            self._window, self._window_text = self._read, following
        else:
            self._window_text = text
        self._read = len(self._tokens)
        return self._filter_stop(new)

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(
            tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )

    def _filter_stop(self, new: str) -> str:
        """Emit what can no longer be part of a stop string; set `stopped` at one."""
        self._held += new
        found = [(self._held.find(one), len(one)) for one in self._stop]
        complete = [(start + length, start) for start, length in found if start >= 0]
        if complete:
            self.stopped = True
            text, self._held = self._held[: min(complete)[1]], ""
            return text
        keep = max((_overlap(self._held, one) for one in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that begins `stop` without being all of it."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def read_prompts(path: str | os.PathLike[str]) -> list[str]:
    """Prompts of a JSON-lines file: `prompt`, or the first of `turns`; blank lines are skipped.

    A byte order mark at the beginning is skipped too.

    Raises:
        PromptError: the file cannot be read or a line is malformed; names file and line.
    """
    if not os.fspath(path):
        raise PromptError("the name of the file of prompts is empty")
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except OSError as error:
        raise PromptError(f"{path}: cannot read prompts ({error.strerror or error})") from error
    except UnicodeDecodeError as error:
        raise PromptError(f"{path}: prompts are not UTF-8 text ({error.reason})") from error
    prompts = [
        _prompt_of_line(line, f"{path}:{number}")
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not prompts:
        raise PromptError(f"{path}: holds no prompts; expected one JSON object a line")
    return prompts


def _prompt_of_line(line: str, where: str) -> str:
    try:
        fields = json.loads(line)
    except ValueError as error:
        raise PromptError(f"{where}: not JSON ({error})") from error
    except RecursionError as error:
        raise PromptError(f"{where}: nested too deeply") from error
    if not isinstance(fields, dict):
        raise PromptError(f'{where}: expected a JSON object with "prompt" or "turns"')
    if "prompt" in fields:
        prompt = fields["prompt"]
    elif isinstance(fields.get("turns"), list) and fields["turns"]:
        prompt = fields["turns"][0]
    else:
        raise PromptError(f'{where}: has neither "prompt" nor a non-empty list "turns"')
    if not isinstance(prompt, str):
        raise PromptError(f"{where}: the prompt is {reprlib.repr(prompt)}; expected text")
    check_text(prompt, f"{where}: the prompt")
    return prompt
