#!/usr/bin/env bash
# Lint, formatting and the whole test suite but for what is marked long or gpu. Needs only Python
# 3.11 or newer. Arguments are passed on to pytest.
#
#   SPECTER_TEST_WORKERS=N   test processes (2 by default; 0 runs all in one, for debugging)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment test
prepare_torch

"$PYTHON" -m ruff check .
"$PYTHON" -m ruff format --check .
# Whole files go to a process, since a file's tests share loaded models.
exec "$PYTHON" -m pytest --numprocesses "${SPECTER_TEST_WORKERS:-2}" --dist loadfile "$@"
