#!/usr/bin/env bash
# The tests marked long: whole data sets and many configurations. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment test
prepare_torch
exec "$PYTHON" -m pytest -m "long and not gpu" "$@"
