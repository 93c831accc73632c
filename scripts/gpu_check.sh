#!/usr/bin/env bash
# What this project needs to know from one CUDA device, in a few minutes: is the engine exact there, and what do the
# phases of uma-s and uma-m sized stages cost? Without a CUDA device it says so and exits with 0.
#
#   scripts/gpu_check.sh [--json results.json]
set -euo pipefail
cd "$(dirname "$0")/.."
exec "${PYTHON:-python}" scripts/gpu_check.py "$@"
