#!/usr/bin/env bash
# Converts a small trained model and generates from three prompts with a quarter of its experts on
# the device at a time. Needs only Python 3.11 or newer. Arguments are passed on to
# `specter generate`, for example: bash scripts/demo.sh --depth 8 --policy lru-s
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/environment.sh
prepare_environment plots

SOURCE=tests/data/tiny-deepseek_v2
MODEL=.demo/tiny-deepseek_v2
# 5 MoE layers of 32 experts make 160.
SLOTS=40

mkdir -p .demo
"$PYTHON" -m convert "$SOURCE" "$MODEL"
echo
"$PYTHON" -m specter_jax generate "$MODEL" \
  --prompt "The old man walked along the shore of the lake and" \
  --prompt "Question: Tom has 3 boxes with 12 pencils each. He gives away 9 pencils. How many pencils does he have left? Answer:" \
  --prompt "def read_lines(path):" \
  --expert-slots "$SLOTS" --depth 4 --dtype float32 --max-new-tokens 64 "$@"
