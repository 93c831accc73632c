#!/usr/bin/env bash
# Jobs with job.scheduler.mode=SLURM on a SLURM of this machine:  scripts/slurm_check.sh [arguments of pytest]
#
# As root, on Debian or Ubuntu: starts SLURM (scripts/slurm_local.sh, which installs it if it is missing), submits jobs on
# two and four ranks through the fairchem command line, requeues them in mid-run as SLURM does before a time limit and
# for another job, and compares every loss with an uninterrupted run's. Stops SLURM again if it was not running before.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_env.sh

export SLURM_CONF="${SLURM_LOCAL_DIR:-/var/lib/slurm-local}/slurm.conf"
if ! scripts/slurm_local.sh status >/dev/null 2>&1; then
    scripts/slurm_local.sh start
    trap 'scripts/slurm_local.sh stop' EXIT
fi
OMP_NUM_THREADS=1 python -m pytest -m long -v tests/integration/test_slurm.py "$@"
