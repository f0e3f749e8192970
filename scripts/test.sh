#!/usr/bin/env bash
# Lint, formatting and the whole test suite but for what is marked long or gpu. Needs only Python
# 3.11 or newer. Arguments are passed on to pytest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment test
prepare_torch

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
exec "$PYTHON" -m pytest "$@"
