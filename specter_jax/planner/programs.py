"""The engine's device programs without arithmetic: routing comes from a trace, time from the model.

They have the signatures of `engine.programs.Programs`, as far as a replay needs them: one greedy
sequence at a time. In place of parameters the engine passes layer numbers (`layer_numbers`).
"""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import numpy as np

from specter_jax.config import ModelConfig, layer_name
from specter_jax.engine.context import distinct_experts
from specter_jax.engine.program_types import DraftStart
from specter_jax.planner.device import Device, HostResult
from specter_jax.planner.traces import RoutingTrace
from specter_jax.runtime_config import MIN_VERIFY_TOKENS


def layer_numbers(config: ModelConfig) -> dict[str, Any]:
    """Stands for a model's parameters: each decoder layer's are its number."""
    names = {layer_name(layer): layer for layer in range(config.num_layers)}
    return {"shared": names, "draft": names}


@dataclasses.dataclass(frozen=True)
class _Routed:
    """What `route` hands to the experts' programs: the choices, [1, T, k]."""

    experts: np.ndarray


class ReplayPrograms:
    """Programs that replay one prompt of a trace at a time; `prompt` is its number."""

    def __init__(self, config: ModelConfig, trace: RoutingTrace, device: Device) -> None:
        self._config = config
        self._trace = trace
        self._agree = trace.agree
        self._device = device
        self._timing = device.timing
        self.prompt = 0

    def start(self, last, lengths):
        """A few tokens to the device: no time but what a step's dispatch counts."""
        return DraftStart(last, lengths, np.int32(1))

    def draft(self, params, kv, probs, start, active, first, count, draws):
        """The draft's choices from where the sequence stands."""
        position = int(start.lengths[0]) + int(first)
        count = int(count) * int(start.go)
        recorded = self._trace.draft_experts[:, self.prompt]
        # Steps past the end of the output may be begun; what they give is not used.
        positions = np.minimum(position + np.arange(count), recorded.shape[1] - 1)
        steps = recorded[:, positions]
        experts = np.moveaxis(steps, 1, 0)[:, :, None].astype(np.int32)
        seconds = sum(self._timing.draft_step(step.size) for step in experts)
        self._device.work(self._timing.draft_call)
        moment = self._device.dispatch(seconds)
        chunk = SimpleNamespace(
            tokens=HostResult(np.zeros((count, 1), np.int32), moment),
            experts=HostResult(experts, moment),
            last=moment,
            drafted=None,
        )
        return chunk, kv, probs

    def place(self, array):
        """A few numbers to the device: no time but what a program's dispatch counts."""
        return array

    def drafted_tokens(self, depth, start, drafted):
        """What `verify` takes; tokens stand for themselves."""
        return np.zeros((1, max(depth + 1, MIN_VERIFY_TOKENS)), np.int32)

    def verify(self, params, kv, slots, slot_table, tokens, lengths, num_drafted, *rest):
        """All layers at once."""
        counted = np.arange(tokens.shape[1]) <= num_drafted[0]
        experts = self._choices(lengths, counted)
        used = [distinct_experts(layer, self._config.num_experts) for layer in experts]
        misses = [
            np.count_nonzero(slot_table[m, ids] < 0).__index__() for m, ids in enumerate(used)
        ]
        self._device.work(self._timing.verify_call)
        moment = self._device.dispatch(self._timing.verification(sum(map(len, used))))
        accepted = self._accepted(lengths, num_drafted)
        verified = SimpleNamespace(
            tokens=HostResult(np.zeros(tokens.shape, np.int32), moment),
            num_accepted=HostResult(accepted, moment),
            experts=HostResult(experts, moment),
            misses=HostResult(np.array(misses, np.int32), moment),
            hidden=None,
            start=DraftStart(None, lengths + accepted + 1, np.int32(not any(misses))),
        )
        return verified, kv

    def embed(self, shared, tokens):
        """Reads a few rows: no time but the dispatch."""
        self._device.dispatch(0.0)

    def dense(self, kind, prompt, params, kv_layer, hidden, lengths, mask):
        """A layer without routed experts."""
        self._device.dispatch(self._timing.layer())
        return None, kv_layer

    def route(self, kind, prompt, params, kv_layer, hidden, lengths, mask, next_router):
        """A layer up to its routing; `params` is its number."""
        experts = self._choices(lengths, mask[0])[self._config.moe_index(params)]
        moment = self._device.dispatch(self._timing.layer())
        return _Routed(experts), (HostResult(experts, moment), None), kv_layer

    def zeros(self, routed):
        """An empty sum: no time but the dispatch."""
        self._device.dispatch(0.0)

    def accumulate(self, routed, slots, slot_row, group, total, *rest):
        """The experts of one group."""
        used = distinct_experts(routed.experts, self._config.num_experts)
        self._device.dispatch(self._timing.experts(int(group[used].sum())))

    def close(self, prompt, params, routed, total):
        """Adds up: no time but the dispatch."""
        self._device.dispatch(0.0)

    def experts(self, params, routed, *rest):
        """All experts of the layer."""
        used = distinct_experts(routed.experts, self._config.num_experts)
        self._device.dispatch(self._timing.experts(len(used)))

    def stretch(self, kinds, prompt, params, drafts, kv, hidden, slots, slot_table, lengths, mask):
        """Several MoE layers at once; `params` are their numbers."""
        first = self._config.moe_index(params[0])
        experts = self._choices(lengths, mask[0])[first : first + len(params)]
        used = [distinct_experts(layer, self._config.num_experts) for layer in experts]
        misses = [np.count_nonzero(slot_table[i][ids] < 0) for i, ids in enumerate(used)]
        seconds = sum(self._timing.layer() + self._timing.experts(len(ids)) for ids in used)
        moment = self._device.dispatch(seconds)
        outcome = SimpleNamespace(
            hidden=None,
            entering=None,
            experts=HostResult(experts, moment),
            misses=HostResult(np.array(misses, np.int32), moment),
        )
        return outcome, kv

    def accept(self, shared, hidden, tokens, lengths, num_drafted, *rest):
        """Head and acceptance."""
        moment = self._device.dispatch(self._timing.head())
        accepted = self._accepted(lengths, num_drafted)
        outcome = HostResult(np.zeros(tokens.shape, np.int32), moment), HostResult(accepted, moment)
        return outcome, DraftStart(None, lengths + accepted + 1, np.int32(1))

    def first_token(self, *arguments):
        """The token after the prompt."""
        return HostResult(np.zeros(1, np.int32), self._device.dispatch(self._timing.head()))

    def hidden_at(self, hidden, m):
        """The state to resume from."""
        self._device.dispatch(0.0)

    def _choices(self, lengths: np.ndarray, counted: np.ndarray) -> np.ndarray:
        """int32 [M, 1, T, k]: the target's from the first position on, E where not counted."""
        first, width = int(lengths[0]), len(counted)
        chosen = self._trace.target_experts[:, self.prompt, first : first + width]
        shape = (len(chosen), width, chosen.shape[-1])
        padded = np.full(shape, self._config.no_expert, np.int32)
        padded[:, : chosen.shape[1]] = chosen
        padded[:, ~counted] = self._config.no_expert
        return padded[:, None]

    def _accepted(self, lengths: np.ndarray, num_drafted: np.ndarray) -> np.ndarray:
        """int32 [1]: drafted tokens up to the first that the two argmax disagree on."""
        start = int(lengths[0]) + 1 - self._trace.prompt_tokens
        judged = self._agree[self.prompt, start : start + int(num_drafted[0])]
        return np.array([np.cumprod(judged).sum()], np.int32)
