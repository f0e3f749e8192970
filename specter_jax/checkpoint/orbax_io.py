"""Trees of numpy arrays as Orbax checkpoints: one directory per part of the model.

Plain zarr arrays (no OCDBT) in chunks of 16 MiB: chunks compress and load in parallel and bound the
memory that writing takes beyond the arrays. A rewrite of the same values gives the same bytes, once
Orbax's time stamps and its note of the directory it wrote to, of no use here, are replaced by
constants.
"""

import contextlib
import functools
import json
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from specter_jax.errors import CheckpointError
from specter_jax.paths import naming

_CHUNK_BYTES = 16 << 20
_LATE_READS_SECONDS = 0.2

Tree = dict[str, Any]


class _NeverCopied(np.ndarray):
    """An array that `copy.deepcopy` leaves alone.

    Orbax copies every array before it writes in the background. Here the caller waits for the end
    of the writing, and a second copy of a layer's arrays would double the memory needed.
    """

    def __deepcopy__(self, memo: dict[int, Any]) -> "_NeverCopied":
        return self


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences Orbax's log messages, which go to absl's logger, while it works."""
    logger = logging.getLogger("absl")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        yield
    except KeyboardInterrupt:
        _silence_shutdown()
        raise
    finally:
        logger.setLevel(before)


_SHUTDOWN = re.compile("cannot schedule new futures after|Event loop is closed")


@functools.cache
def _silence_shutdown() -> None:
    """Keeps Orbax's threads quiet that an interrupt leaves behind, once the program ends.

    They would report at length, below the one line that says what happened, that nothing can be
    started any more.
    """
    logging.getLogger("absl").addFilter(
        lambda record: _SHUTDOWN.search(record.getMessage()) is None
    )
    before = threading.excepthook

    def hook(arguments: Any) -> None:
        if _SHUTDOWN.search(str(arguments.exc_value)) is None:
            before(arguments)

    threading.excepthook = hook


def save_tree(path: Path, tree: Mapping[str, Any]) -> None:
    """Writes nested dicts of numpy arrays to the new directory `path`.

    Raises:
        OSError: it cannot be written, for example because the disk is full.
    """
    import orbax.checkpoint as ocp

    tree = jax.tree.map(lambda array: array.view(_NeverCopied), dict(tree))
    save_args = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=_CHUNK_BYTES), tree)
    try:
        with _quiet(), ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False)) as writer:
            writer.save(path.absolute(), args=ocp.args.PyTreeSave(tree, save_args=save_args))
    except Exception as error:  # what a full disk raises here is tensorstore's own ValueError
        raise OSError(f"{path}: cannot be written ({_first_line(error)})") from error
    _make_reproducible(path)


def _make_reproducible(path: Path) -> None:
    """Removes what differs between two writes of the same tree."""
    metadata_file = path / "_CHECKPOINT_METADATA"
    metadata = json.loads(metadata_file.read_text())
    for key in ("init_timestamp_nsecs", "commit_timestamp_nsecs"):
        if key in metadata:
            metadata[key] = 0
    with naming(metadata_file):
        metadata_file.write_text(json.dumps(metadata))
    success_file = path / "commit_success.txt"
    if success_file.exists():
        with naming(success_file):
            success_file.write_text("Checkpoint commit was successful")


def load_tree(path: Path) -> Tree:
    """Reads the tree in directory `path` as numpy arrays.

    Raises:
        CheckpointError: Orbax cannot read the directory.
    """
    import orbax.checkpoint as ocp

    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=False)
    try:
        with _quiet(), _late_reads_ignored(), ocp.Checkpointer(handler) as reader:
            tree = reader.restore(path.absolute(), args=_numpy_restore(reader, path))
    except Exception as error:  # Orbax raises many types, some of them its own
        raise CheckpointError(
            f"{path}: not a readable Orbax checkpoint ({_first_line(error)}); "
            "convert the model again"
        ) from error
    return tree


@contextlib.contextmanager
def _late_reads_ignored() -> Iterator[None]:
    """Keeps the end of reads that a failed one leaves behind from printing tracebacks.

    Orbax reads all arrays at once in an event loop and closes it at the first failure. Each read
    that ends later finds the loop closed, which Python reports on standard error.
    """
    before = sys.unraisablehook

    def hook(unraisable: Any) -> None:
        if str(unraisable.exc_value) != "Event loop is closed":
            before(unraisable)

    sys.unraisablehook = hook
    try:
        yield
    except Exception:
        time.sleep(_LATE_READS_SECONDS)
        raise
    finally:
        sys.unraisablehook = before


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:200] if lines else type(error).__name__


def _numpy_restore(reader: Any, path: Path) -> Any:
    """Restore arguments that ask for numpy arrays whatever devices there are."""
    import orbax.checkpoint as ocp

    structure = reader.metadata(path.absolute()).item_metadata.tree
    return ocp.args.PyTreeRestore(
        restore_args=jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), structure)
    )
