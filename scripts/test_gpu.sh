#!/usr/bin/env bash
# The tests marked gpu, on a machine with an NVIDIA GPU. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
nvidia-smi -L >/dev/null 2>&1 || fail "no NVIDIA GPU found (nvidia-smi does not work)"
prepare_environment test
exec "$PYTHON" -m pytest -m gpu "$@"
