#!/usr/bin/env bash
# Install and run the test suite:  scripts/test.sh [pytest arguments]
#
# JANUS_TEST_DATA, if set, is a folder with the real data sets that some integration tests want (extxyz files); without
# it they are skipped.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_env.sh

export OMP_NUM_THREADS=1  # the tests start several ranks; more threads than cores would only slow them down
exec python -m pytest "$@"
