#!/usr/bin/env bash
# Install and run every test, those marked `long` (the whole option matrix) too:  scripts/test_all.sh [pytest arguments]
set -euo pipefail
exec "$(dirname "$0")/test.sh" -m "long or not long" "$@"
