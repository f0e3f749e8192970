"""Records what draft and target route to: figures 2, 3, 4, 13 and 16.

Decodes with the public pure functions and every expert in a slot, since routing does not depend on
what is resident: neither policy nor budget plays a part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from specter_jax.models import draft_step, init_kv, prefill, verify
from specter_jax.report import SMALL
from specter_jax.report.prompts import Task, mixed, spread, token_ids
from specter_jax.report.routing import (
    Iteration,
    Request,
    batched_distinct,
    distinct_experts,
    diversity_record,
    match_record,
)
from specter_jax.report.settings import Settings
from specter_jax.runtime_config import KV_SLACK, prefill_bucket

if TYPE_CHECKING:
    from specter_jax.model import Model

Progress = Callable[[str], None]


class Recorder:
    """Greedy speculative decoding of one sequence at a time, keeping the routing.

    model: with a slot for every expert. context: tokens of the longest prompt and output.
    """

    def __init__(self, model: Model, context: int):
        self._model = model
        self._capacity = context + KV_SLACK
        self._prefill, self._draft, self._verify = (
            jax.jit(f, static_argnums=0, donate_argnums=2) for f in (prefill, draft_step, verify)
        )

    def __call__(self, prompt: np.ndarray, depth: int, new_tokens: int) -> list[Iteration]:
        """The iterations that yield at least `new_tokens`; prompt: int32 [tokens]."""
        token, kv = self._begin(prompt)
        length, iterations, done = len(prompt), [], 1
        while done < new_tokens:
            iteration, token, kv = self._iterate(kv, token, length, depth)
            iterations.append(iteration)
            length += iteration.num_new
            done += iteration.num_new
        return iterations

    def _begin(self, prompt: np.ndarray) -> tuple[int, Any]:
        """The token after the prompt, and the KV."""
        model = self._model
        # Padded alike whatever the prompt, for one program to do.
        width = prefill_bucket(min(self._capacity - KV_SLACK, 128))
        tokens = np.zeros((1, width), np.int32)
        tokens[0, : len(prompt)] = prompt
        mask = np.arange(width)[None] < len(prompt)
        kv = init_kv(
            model.config, batch=1, capacity=max(self._capacity, width), dtype=jnp.dtype(model.dtype)
        )
        out, kv = self._prefill(
            *self._model_arguments(kv),
            tokens,
            np.zeros(1, np.int32),
            mask,
            np.array([len(prompt) - 1], np.int32),
        )
        return int(out.logits[0].argmax()), kv

    def _iterate(self, kv: Any, token: int, length: int, depth: int) -> tuple[Iteration, int, Any]:
        model = self._model
        tokens, chosen = [token], []
        for step in range(depth):
            logits, experts, kv = self._draft(
                model.config,
                model.params,
                kv,
                np.array(tokens[-1:], np.int32),
                np.array([length + step], np.int32),
                np.array([True]),
            )
            tokens.append(int(logits[0].argmax()))
            chosen.append(np.asarray(experts)[:, 0])
        out, kv = self._verify(
            *self._model_arguments(kv),
            np.array([tokens], np.int32),
            np.array([length], np.int32),
            np.ones((1, depth + 1), bool),
        )
        target = np.asarray(out.logits[0].argmax(-1))
        accepted = int(np.cumprod(target[:depth] == tokens[1:]).sum())
        iteration = Iteration(
            draft=np.stack(chosen, 1),
            target=np.asarray(out.experts)[:, 0],
            num_new=accepted + 1,
        )
        return iteration, int(target[accepted]), kv

    def _model_arguments(self, kv: Any) -> tuple:
        model = self._model
        return model.config, model.params, kv, model.pool.slots, model.pool.table()


def measure_routing(
    model: Model, name: str, tasks: Sequence[Task], settings: Settings, progress: Progress
) -> dict[str, list[dict[str, Any]]]:
    """The records "match", "distinct", "diversity" and "batch_experts" of one model."""
    record = Recorder(model, settings.context)
    prompts = token_ids(model.path, mixed(tasks, settings.mixed_prompts), settings.prompt_tokens)
    by_depth: dict[int, list[Request]] = {}
    for depth in sorted({*settings.depths, settings.depth}):
        progress(f"{name}: routing at depth {depth}")
        by_depth[depth] = [record(prompt, depth, settings.new_tokens) for prompt in prompts]
    by_task: dict[str, list[Request]] = {}
    for task in tasks:
        progress(f"{name}: routing of {task.name}")
        chosen = spread(task.prompts, settings.task_prompts)
        by_task[task.name] = [
            record(prompt, settings.diversity_depth, settings.new_tokens)
            for prompt in token_ids(model.path, chosen, settings.prompt_tokens)
        ]
    common = {"model": name, "setting": SMALL}
    return routing_records(common, model.config.num_experts, by_depth, by_task, settings)


def routing_records(
    common: Mapping[str, Any],
    num_experts: int,
    by_depth: Mapping[int, Sequence[Request]],
    by_task: Mapping[str, Sequence[Request]],
    settings: Settings,
) -> dict[str, list[dict[str, Any]]]:
    """The four kinds of records, from requests by depth and by task; `common` begins each."""
    requests = by_depth[settings.depth]
    common = {**common, "experts": num_experts, "top_k": requests[0][0].target.shape[2]}
    batches = [
        {"batch": batch, **counts}
        for batch in settings.routing_batches
        if (counts := batched_distinct(requests, batch, num_experts)) is not None
    ]
    return {
        "match": [{**common, "depth": settings.depth, **match_record(requests)}],
        "distinct": [
            {
                **common,
                "points": [
                    {"depth": depth, **distinct_experts(by_depth[depth], num_experts)}
                    for depth in settings.depths
                ],
            }
        ],
        "diversity": [
            {
                **common,
                "depth": settings.diversity_depth,
                **diversity_record(by_task, num_experts),
            }
        ],
        "batch_experts": [{**common, "depth": settings.depth, "points": batches}],
    }
