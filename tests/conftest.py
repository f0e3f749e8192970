"""Settings every test runs under, and the trained model that several of them share."""

import os
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TINY_SOURCE = ROOT / "tests" / "data" / "tiny-deepseek_v2"

# Set before anything imports JAX. Compiled programs are kept from one run to the next.
for name, value in {
    "JAX_COMPILATION_CACHE_DIR": str(ROOT / ".cache" / "jax"),
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    "TOKENIZERS_PARALLELISM": "false",
    "TRANSFORMERS_VERBOSITY": "error",
    "HF_HUB_OFFLINE": "1",
    "MPLBACKEND": "Agg",
}.items():
    os.environ.setdefault(name, value)

import pytest  # noqa: E402


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The trained 6-layer DeepSeek-V2, converted; not to be changed."""
    from convert import convert_checkpoint

    return convert_checkpoint(TINY_SOURCE, tmp_path_factory.mktemp("tiny") / "model").path


@pytest.fixture(scope="session")
def plain(tiny_directory: Path) -> list[list[int]]:
    """What every engine test's greedy output for `PROMPTS` must be; not to be changed."""
    from tests.engine_cases import plain_tokens

    return plain_tokens(tiny_directory)


MOST_MAPS = 20_000
"""Of the 65,530 memory maps that Linux gives a process by default. XLA on the CPU takes some tens
for every compiled program, and crashes where there are no more."""


def num_memory_maps() -> int:
    """Memory maps of this process, 0 where the system does not tell."""
    try:
        with open("/proc/self/maps", "rb") as maps:
            return sum(1 for _ in maps)
    except OSError:
        return 0


@pytest.fixture(autouse=True, scope="module")
def few_memory_maps():
    """Lets go of compiled programs, and of the models that rely on them, when they become many."""
    yield
    if num_memory_maps() < MOST_MAPS:
        return
    import gc

    import jax

    from tests import engine_cases

    engine_cases.load_tiny.cache_clear()
    jax.clear_caches()
    gc.collect()
