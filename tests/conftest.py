"""Settings every test runs under: few CPU threads, compiled programs kept between runs."""

import os
from pathlib import Path

# Before anything imports JAX. One compute thread per test process: the models are tiny, and more
# threads only wait for each other.
os.environ.setdefault("JAX_ENABLE_X64", "0")
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("MPLBACKEND", "Agg")

ROOT = Path(__file__).resolve().parents[1]
