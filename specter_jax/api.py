"""Generation from a loaded model: prompts in, texts, tokens and statistics out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax.arguments import as_callable, as_flag, as_integer, as_list
from specter_jax.config.checks import shown
from specter_jax.controller import AUTO, DEPTH_BUCKETS, DepthController, parse_depth
from specter_jax.engine.batch import Batch
from specter_jax.engine.decode import decode
from specter_jax.engine.program_types import Draws
from specter_jax.errors import InvalidRequestError, PromptError
from specter_jax.model import Model
from specter_jax.offload import DEFAULT_POLICY, get_policy
from specter_jax.sampling import SamplingConfig, row_keys
from specter_jax.stats import Stats, StatsRecorder, merge_recorders
from specter_jax.text import TextStream, check_stop, encode_prompts, load_tokenizer
from specter_jax.trace import NullTrace, Tracer

OnText = Callable[[int, str], None]
"""`(prompt index, new text)`, called as text becomes final."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationResult:
    """What `generate` gives, in the order of the prompts.

    texts: output only, without the prompt and special tokens, cut before a stop string.
    tokens: the output's token ids; a final end-of-sequence token is included, tokens behind a
        stop string are not.
    stats: over all prompts. prompt_stats: of the batch that each prompt was decoded in.
    """

    texts: list[str]
    tokens: list[list[int]]
    stats: Stats
    prompt_stats: list[Stats]


def generate(
    model: Model,
    prompts: Sequence[str] | Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 64,
    depth: int | str = AUTO,
    policy: str = DEFAULT_POLICY,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Sequence[str] = (),
    chat: bool = False,
    ignore_eos: bool = False,
    batch_size: int | None = None,
    on_text: OnText | None = None,
    trace: Tracer | None = None,
) -> GenerationResult:
    """Generates from every prompt; greedy output is the target's own, token for token.

    Args:
        prompts: texts, or token ids.
        max_new_tokens: most tokens per prompt; less where the context ends before.
        depth: tokens drafted per verification, 0 (plain decoding) to 16, or "auto".
        policy: "lookahead", or a baseline: "sp-l", "sp-e", "lru-s", "lru", and those of the
            published systems (`specter_jax.systems`): "mo", "mo-sm", "specmoeoff".
        temperature, top_k, top_p, seed: sampling; temperature 0 is greedy. A prompt's samples
            depend on the seed and the prompt's place in `prompts`, not on batching.
        stop: strings that end a text and are cut off.
        chat: wrap each prompt as one user message in the tokenizer's chat template.
        ignore_eos: go on behind an end-of-sequence token.
        batch_size: prompts decoded together; the model's `max_batch` at most, which is the default.
        on_text: called with text as soon as it can no longer change.
        trace: receives a timeline, see `specter_jax.trace.Trace`.

    Raises:
        PromptError: a prompt is empty, malformed, or does not fit the context.
        UnknownPolicyError, InvalidRequestError: an argument is out of range.
    """
    sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
    get_policy(policy)
    fixed_depth = parse_depth(depth)
    size = _batch_size(model, batch_size)
    max_new_tokens = as_integer("max_new_tokens", max_new_tokens, 1)
    as_flag("chat", chat)
    as_flag("ignore_eos", ignore_eos)
    as_callable("on_text", on_text)
    stop = check_stop(as_list("stop", () if stop is None else stop, "strings"))
    prompts = as_list("prompts", prompts, "prompts")
    if trace is not None and not hasattr(trace, "async_span"):
        raise InvalidRequestError(f"trace is {shown(trace)}; expected a specter_jax.Trace")
    tokenizer = load_tokenizer(model.path)
    ids = encode_prompts(tokenizer, prompts, chat=chat)
    for number, prompt in enumerate(ids):
        _check_prompt(model, number, prompt)
    batches = [
        _batch(model, ids[start : start + size], start, max_new_tokens, sampling)
        for start in range(0, len(ids), size)
    ]
    recorders, outputs, texts = [], [], []
    with model.exclusive():
        # An interruption while slots were filled comes to light here.
        model.pool.settle()
        model.use_policy(policy)
        for batch in batches:
            model.ensure_warm(batch, _depths(policy, fixed_depth))
        for batch in batches:
            sinks = [
                _Sink(
                    TextStream(tokenizer, stop=stop),
                    () if ignore_eos else model.config.eos_token_ids,
                    None if on_text is None else _for_prompt(on_text, len(texts) + row),
                )
                for row in range(len(batch.prompts))
            ]
            recorder = _generate_batch(model, batch, sinks, fixed_depth, trace or NullTrace())
            for sink in sinks:
                text, tokens = sink.finish()
                texts.append(text)
                outputs.append(tokens)
                recorders.append(recorder)
    distinct = list({id(recorder): recorder for recorder in recorders}.values())
    return GenerationResult(
        texts=texts,
        tokens=outputs,
        stats=merge_recorders(distinct),
        prompt_stats=[recorder.summary() for recorder in recorders],
    )


def _depths(policy: str, depth: int | None) -> tuple[int, ...]:
    """The depths at which a request may verify."""
    if not get_policy(policy).speculative:
        return (0,)
    return DEPTH_BUCKETS if depth is None else (depth,)


def _batch_size(model: Model, batch_size: int | None) -> int:
    most = model.runtime.max_batch
    if batch_size is None:
        return most
    try:
        return as_integer("batch_size", batch_size, 1, most)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{error} (load the model with a larger max_batch)") from None


def _check_prompt(model: Model, number: int, prompt: np.ndarray) -> None:
    most = model.runtime.max_context
    if len(prompt) == 0:
        raise PromptError(f"prompt {number} is empty: give at least one token")
    if len(prompt) >= most:
        raise PromptError(
            f"prompt {number} has {len(prompt)} tokens; the context holds {most} including at "
            "least one new token"
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= model.config.vocab_size:
        raise PromptError(
            f"prompt {number} has token ids {low} to {high}; the vocabulary has 0 to "
            f"{model.config.vocab_size - 1}"
        )


def _for_prompt(on_text: OnText, index: int) -> Callable[[str], None]:
    return lambda text: on_text(index, text)


class _Sink:
    """Receives one prompt's tokens: detokenises, streams, and says when to stop."""

    def __init__(
        self,
        stream: TextStream,
        eos_token_ids: tuple[int, ...],
        on_text: Callable[[str], None] | None,
    ) -> None:
        self._stream = stream
        self._eos = frozenset(eos_token_ids)
        self._on_text = on_text
        self._parts: list[str] = []
        self.tokens: list[int] = []

    def push(self, tokens: list[int]) -> bool:
        """Takes in new tokens; True if the sequence ends with them."""
        for token in tokens:
            self.tokens.append(token)
            if token in self._eos:
                return True
            self._emit(self._stream.push([token]))
            if self._stream.stopped:
                return True
        return False

    def finish(self) -> tuple[str, list[int]]:
        """The whole text and tokens."""
        self._emit(self._stream.flush())
        return "".join(self._parts), self.tokens

    def _emit(self, text: str) -> None:
        if not text:
            return
        self._parts.append(text)
        if self._on_text is not None:
            self._on_text(text)


def _batch(
    model: Model,
    prompts: list[np.ndarray],
    first_index: int,
    max_new_tokens: int,
    sampling: SamplingConfig,
) -> Batch:
    indices = np.arange(first_index, first_index + len(prompts), dtype=np.int32)
    most = model.runtime.max_context
    return Batch(
        prompts=prompts,
        limits=[min(max_new_tokens, most - len(prompt)) for prompt in prompts],
        draws=None if sampling.greedy else _draws(sampling, indices),
        kv_dtype=model.dtype,
    )


def _generate_batch(
    model: Model, batch: Batch, sinks: list[_Sink], depth: int | None, trace: Tracer
) -> StatsRecorder:
    controller = model.auto_depth(len(sinks)) if depth is None else DepthController(fixed=depth)
    recorder = StatsRecorder(sequences=len(sinks))
    ctx = model.context(recorder, trace)
    try:
        decode(ctx, batch, controller, lambda row, tokens: sinks[row].push(tokens))
    finally:
        # An interruption must leave the pool usable.
        model.pool.settle()
    recorder.new_tokens = sum(len(sink.tokens) for sink in sinks)
    recorder.peak_device_bytes = _peak_bytes(model)
    return recorder


def _draws(sampling: SamplingConfig, indices: np.ndarray) -> Draws:
    temperature, top_k, top_p = sampling.scalars()
    return Draws(
        keys=row_keys(sampling.seed, jnp.asarray(indices)),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
    )


def _peak_bytes(model: Model) -> int:
    """The device's own peak; where it reports none, the bytes of all arrays on it now."""
    stats = model.device.memory_stats() or {}
    if "peak_bytes_in_use" in stats:
        return int(stats["peak_bytes_in_use"])
    on_device = (
        array.nbytes for array in jax.live_arrays() if array.sharding.memory_kind == "device"
    )
    return sum(on_device)
