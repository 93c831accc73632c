#!/usr/bin/env bash
# From nothing to a trained model:  scripts/quickstart.sh [FOLDER]      (default runs/quickstart)
#
# Installs; makes the demo data; trains a small eSEN over two pipeline stages on the CPU, evaluates and exports it;
# compares one step with plain fairchem in one process; uses the exported model in plain fairchem. About three minutes
# on two cores after the download. The last line is one JSON object with the figures of the run.
set -euo pipefail
cd "$(dirname "$0")/.."
. scripts/setup_env.sh

mkdir -p "${1:-runs/quickstart}"
folder="$(cd "${1:-runs/quickstart}" && pwd)"
run="$(date +%Y%m%d-%H%M%S)"
started="$(date +%s)"
export OMP_NUM_THREADS=1  # one core for each of the two stages
job=(-c hydra_configs/quickstart.yaml "hydra.searchpath=['$folder/data']" "job.run_dir='$folder'")

say() { printf '\n== %s (%d s)\n' "$1" "$(($(date +%s) - started))"; }

# fail LOG: show the end of a log and stop
fail() {
    tail -n 40 "$1" >&2
    echo "failed; the whole log is $1" >&2
    exit 1
}

# Every tenth of fairchem's step lines, without the parts of the loss
progress() {
    local line count=0
    while IFS= read -r line; do
        if [[ $line =~ step\ [0-9]+/[0-9]+\ \|.* ]] && ((count++ % 10 == 0)); then
            sed 's/ ([^)]*)//' <<<"${BASH_REMATCH[0]}"
        fi
    done
}

say "demo data"
fairchem-janus data demo "$folder/data"
mkdir -p "$folder/$run"

say "training and evaluation over two pipeline stages"
log="$folder/$run/train.log"
fairchem "${job[@]}" "+job.timestamp_id=$run" 2>&1 | tee "$log" | progress || fail "$log"

say "one step against plain fairchem in one process, float64"
log="$folder/$run/verify.log"
fairchem-janus verify "${job[@]}" "+job.timestamp_id=$run-verify" --steps 1 --dtype float64 \
    --json "$folder/$run/parity.json" 2>"$log" || fail "$log"

say "the exported model in plain fairchem"
log="$folder/$run/report.log"
python scripts/quickstart_report.py --data "$folder/data" --run "$folder/$run" \
    --parity "$folder/$run/parity.json" --started "$started" 2>"$log" || fail "$log"
