"""`convert_checkpoint`: a Hugging Face model to the runtime's own directory.

Steps: read the headers and check everything that can be known without the weights (`convert.plan`),
write part after part into a partial directory (`convert.layers`, `convert.workspace`), publish.
"""

import hashlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from convert.destination import discard, existing_conversion
from convert.layers import write_expert_layer, write_shared_part
from convert.plan import Plan, build_plan
from convert.progress import ProgressCallback
from convert.sources import SafetensorsSource, TensorSource
from convert.workspace import Workspace, open_workspace, partial_path
from specter_jax.arguments import as_callable
from specter_jax.checkpoint import (
    FORMAT_VERSION,
    Manifest,
    expert_file_name,
    largest_capacity,
)
from specter_jax.config import layer_name
from specter_jax.errors import ConversionError, InvalidRequestError
from specter_jax.paths import as_path, naming

_COMPANIONS_PART = "companions"


@dataclass(frozen=True, kw_only=True)
class ConversionResult:
    """What a conversion did."""

    path: Path
    """The converted directory."""
    manifest: Manifest
    already_there: bool
    """An identical conversion had been finished before; nothing was written."""
    num_resumed: int
    """Parts kept from an interrupted run."""


def convert_checkpoint(
    source: str | os.PathLike[str] | TensorSource,
    destination: str | os.PathLike[str],
    *,
    group_size: int | Sequence[int] | None = None,
    dtype: str | None = None,
    expert_format: str | None = None,
    force: bool = False,
    wait: bool = False,
    progress: ProgressCallback | None = None,
) -> ConversionResult:
    """Converts a model; the directory appears complete or not at all.

    Args:
        source: a Hugging Face directory (safetensors), or any `TensorSource`.
        destination: directory to create. A finished conversion of the same source with the same
            options is left as it is.
        group_size: weights per INT4 scale, for both axes or a tuple or list (hidden, expert); by
            default 128, or 64 where 128 does not divide (32, 16, 8 in tiny models).
        dtype: "bfloat16", "float16" or "float32" for shared parameters and experts; by default
            that of the source.
        expert_format: "nested" stores an expert as what its INT4 draft does not say, about 8.6 bits
            a weight, with no loss (bfloat16 only); "plain" stores it as it is. By default nested
            where that is possible.
        force: replace another conversion at the destination.
        wait: wait for another conversion into the same destination, and use its result if it is
            of the same source and options; otherwise a running one is an error.
        progress: called as `(part, done, total)` after each shared part and each expert, and once
            before waiting.

    Raises:
        ConversionError: the source is damaged or incomplete; names the file or tensor. Nothing is
            left behind.
        UnsupportedModelError: unknown family or option of config.json.
        InvalidRequestError: an argument is out of range, or the destination is taken.
        OSError, KeyboardInterrupt: what was finished stays in `DESTINATION.partial`, and the next
            call with the same arguments goes on from there; or the destination is complete, and the
            next call tidies up.
    """
    as_callable("progress", progress)
    destination = as_path("destination", destination).resolve()
    if isinstance(source, str | os.PathLike):
        directory = as_path("source", source)
        _check_apart(directory, destination)
        source = SafetensorsSource(directory)
    plan = build_plan(source, group_size, dtype, expert_format)
    fingerprint = _fingerprint(source, plan)
    manifest = existing_conversion(destination, fingerprint, force=force)
    if manifest is not None:
        return _already_there(destination, manifest)
    on_wait = partial(_tell_waiting, destination, progress) if wait else None
    with open_workspace(destination, fingerprint, on_wait) as workspace:
        # Another run may have finished between the first look and the lock.
        manifest = existing_conversion(destination, fingerprint, force=force)
        if manifest is not None:
            discard(workspace.path)
            return _already_there(destination, manifest)
        steps = _Steps(plan, progress)
        _write_companions(source, workspace)
        _write_shared(source, plan, workspace, steps)
        _write_experts(source, plan, workspace, steps)
        if _fingerprint(source, plan) != fingerprint:
            raise ConversionError(f"{source.label}: changed while it was being converted")
        manifest = _manifest(plan, fingerprint, workspace)
        workspace.publish(manifest, destination)
        return ConversionResult(
            path=destination,
            manifest=manifest,
            already_there=False,
            num_resumed=len(workspace.resumed),
        )


def _tell_waiting(destination: Path, progress: ProgressCallback | None) -> None:
    what = f"waiting for another conversion into {destination}"
    if progress is None:
        logging.getLogger(__name__).warning(what)
    else:
        progress(what, 0, 1)


def _already_there(destination: Path, manifest: Manifest) -> ConversionResult:
    return ConversionResult(path=destination, manifest=manifest, already_there=True, num_resumed=0)


def _check_apart(source: Path, destination: Path) -> None:
    """The destination must not be the source, nor lie in it, nor around it."""
    resolved = source.resolve()
    if not destination.name:
        raise InvalidRequestError(f"{destination} is not a usable destination")
    if resolved in destination.parents:
        raise InvalidRequestError(
            f"destination {destination} lies inside of the source {source}; choose another one"
        )
    taken = (destination, partial_path(destination))
    if any(path == resolved or path in resolved.parents for path in taken):
        raise InvalidRequestError(
            f"destination {destination} would overwrite the source {source}; choose another one"
        )
    if destination.exists() and not destination.is_dir():
        raise InvalidRequestError(f"{destination} exists and is not a directory")


def _fingerprint(source: TensorSource, plan: Plan) -> str:
    """Digest of all that the result depends on."""
    sizes = plan.group_sizes
    options = (
        f"{FORMAT_VERSION} {sizes.gate_up} {sizes.down} {plan.dtype} {plan.shared_dtype} "
        f"{plan.expert_format}\n"
    )
    return hashlib.sha256((options + source.fingerprint()).encode()).hexdigest()


class _Steps:
    """Counts shared parts and experts for the progress callback."""

    def __init__(self, plan: Plan, callback: ProgressCallback | None) -> None:
        self._callback = callback
        self._total = len(plan.shared) + len(plan.experts) * plan.config.num_experts
        self._done = 0

    def advance(self, part: str, num_steps: int = 1) -> None:
        """`num_steps` more are done, in `part`."""
        self._done += num_steps
        if self._callback is not None:
            self._callback(part, self._done, self._total)


def _write_companions(source: TensorSource, workspace: Workspace) -> None:
    """Copies configuration and tokenizer."""
    if _COMPANIONS_PART in workspace.resumed:
        return
    companions: Mapping[str, bytes] = source.companions()
    paths = [workspace.path / name for name in companions]
    workspace.begin(*paths)
    for path, content in zip(paths, companions.values(), strict=True):
        with naming(path):
            path.write_bytes(content)
    workspace.finish(_COMPANIONS_PART, *paths)


def _write_shared(source: TensorSource, plan: Plan, workspace: Workspace, steps: _Steps) -> None:
    for part, tensors in plan.shared.items():
        name = f"shared/{part}"
        if name not in workspace.resumed:
            path = workspace.path / "shared" / part
            workspace.begin(path)
            write_shared_part(source, plan, tensors, path)
            workspace.finish(name, path)
        steps.advance(name)


def _write_experts(source: TensorSource, plan: Plan, workspace: Workspace, steps: _Steps) -> None:
    for layer in plan.experts:
        name = f"experts/{layer_name(layer.decoder_layer)}"
        if name in workspace.resumed:
            steps.advance(name, plan.config.num_experts)
            continue
        experts_path = workspace.path / expert_file_name(layer.decoder_layer)
        draft_path = workspace.path / "draft" / layer_name(layer.decoder_layer)
        workspace.begin(experts_path, draft_path)
        write_expert_layer(
            source, plan, layer, experts_path, draft_path, partial(steps.advance, name)
        )
        workspace.finish(name, experts_path, draft_path)


def _escape_capacity(plan: Plan, workspace: Workspace) -> int:
    """Escapes of the model's largest nested expert, rounded up; 0 if experts are plain."""
    if plan.expert_format == "plain":
        return 0
    paths = [workspace.path / expert_file_name(layer.decoder_layer) for layer in plan.experts]
    config = plan.config
    return largest_capacity(paths, config.hidden_size, config.expert_intermediate_size)


def _manifest(plan: Plan, fingerprint: str, workspace: Workspace) -> Manifest:
    config = plan.config
    return Manifest(
        family=config.family,
        model=config.to_dict(),
        dtype=str(plan.dtype),
        expert_format=plan.expert_format,
        escape_capacity=_escape_capacity(plan, workspace),
        group_sizes=plan.group_sizes,
        expert_elements=config.expert_elements,
        num_experts=config.num_experts,
        moe_layers=config.moe_layers,
        shared_parts=tuple(plan.shared),
        source_fingerprint=fingerprint,
        files=workspace.files(),
    )
