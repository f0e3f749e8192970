# Sourced by the other scripts: `prepare_environment EXTRAS` makes .venv with the project in it and
# puts its programs first in PATH.
#
#   SPECTER_PYTHON=PATH   the interpreter to use instead of looking for one
#   SPECTER_ENV=current   use that interpreter's own packages: no .venv, nothing is installed
#   SPECTER_CPU=1         do not install CUDA packages even if there is an NVIDIA GPU

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

fail() {
  echo "error: $*" >&2
  exit 1
}

# An interpreter counts if it runs (a version manager's stand-in may not) and is new enough.
is_python() {
  "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

find_python() {
  local candidate
  if [ -n "${SPECTER_PYTHON:-}" ]; then
    is_python "$SPECTER_PYTHON" || fail "SPECTER_PYTHON=$SPECTER_PYTHON is not Python 3.11 or newer"
    echo "$SPECTER_PYTHON"
    return
  fi
  for candidate in python3 python3.12 python3.11 python3.13 python3.14 python; do
    if is_python "$candidate"; then
      command -v "$candidate"
      return
    fi
  done
  fail "no Python 3.11 or newer found; install one, or name it in SPECTER_PYTHON"
}

has_nvidia_gpu() {
  [ "${SPECTER_CPU:-0}" != 1 ] && [ "${JAX_PLATFORMS:-}" != cpu ] && nvidia-smi -L >/dev/null 2>&1
}

# What the environment was made from: the project's requirements and the interpreter.
fingerprint() {
  { cat "$ROOT/pyproject.toml"; "$1" -c 'import sys; print(sys.version, sys.executable)'; } |
    "$1" -c 'import hashlib, sys; print(hashlib.sha256(sys.stdin.buffer.read()).hexdigest())'
}

pip_install() {
  "$VENV/bin/python" -m pip install --quiet --quiet --disable-pip-version-check "$@"
}

# prepare_environment EXTRAS: EXTRAS is a comma-separated list, such as test,plots. An environment
# that was made from the same pyproject.toml and has these extras is used as it is.
prepare_environment() {
  local python wanted stamp made_from extra missing=""
  python="$(find_python)" || exit 1
  if [ "${SPECTER_ENV:-}" = current ]; then
    PYTHON="$python"
    export PYTHONPATH="$ROOT${PYTHONPATH:+:$PYTHONPATH}"
    return
  fi
  wanted="$1"
  if has_nvidia_gpu; then
    wanted="$wanted,cuda13"
  fi
  stamp="$VENV/specter-stamp"
  made_from="$(fingerprint "$python")"
  if [ ! -x "$VENV/bin/python" ] || [ "$(head -n 1 "$stamp" 2>/dev/null)" != "$made_from" ]; then
    echo "Creating .venv with $("$python" --version)" >&2
    rm -f "$stamp"
    "$python" -m venv --clear "$VENV" ||
      fail "python -m venv failed (on Debian and Ubuntu: apt-get install python3-venv)"
    missing="$wanted"
  else
    for extra in ${wanted//,/ }; do
      grep -qx "$extra" "$stamp" || missing="$missing${missing:+,}$extra"
    done
  fi
  if [ -n "$missing" ]; then
    echo "Installing the project with extras $missing (the first time takes a minute or two)" >&2
    pip_install --editable "$ROOT[$missing]" || fail "installing the project failed, see above"
    # Written last: an interrupted installation is done again.
    [ -f "$stamp" ] || echo "$made_from" > "$stamp"
    printf '%s\n' ${missing//,/ } >> "$stamp"
  fi
  PYTHON="$VENV/bin/python"
  export PATH="$VENV/bin:$PATH"
}

# The parity tests compare with transformers on CPU PyTorch; without it they are skipped.
prepare_torch() {
  if "$PYTHON" -c 'import torch' >/dev/null 2>&1 || [ "${SPECTER_ENV:-}" = current ]; then
    return
  fi
  echo "Installing PyTorch for the comparison with transformers" >&2
  pip_install "torch==2.13.0" ||
    echo "note: PyTorch could not be installed; tests that compare with it are skipped" >&2
}
