#!/usr/bin/env python
"""Throughput of the schedules: `auto` against the paper's baselines, on real ranks of this machine.

    python scripts/bench_schedules.py [--json] [--rounds 7] [--atoms 12] [--micro-batches 8] [--experts 4]

P = 2 ranks of one thread each, Gloo, a model of uma-s's shape (128 channels, 4 blocks, lmax 2, activation checkpointing
off; fewer experts, since the micro-batches are small), float32. All schedules, and unsplit fairchem, run in turn, step
by step, in the same processes on the same micro-batches; every ratio is the median of the ratios within a round.

speedup_over_*         step time of the baseline over that of `auto`; `1f1b_2nd` is the looped (stronger) placement
bubble_measured        1 - time in phases / (P * time from the first phase to the last), `auto`
bubble_simulated       the simulator's, for the phase times of the same steps
compute_over_unsplit   time in phases on all stages over unsplit fairchem on the same micro-batches (on both ranks at
                       once, so that either side has a busy neighbour)
split, schedule        the split of BF and BE, and the schedule that `auto` planned, as CSV
details                the eager split, phase times and bytes, what the simulator says of more stages for these times;
                       and `replayed`: the same ratios for steps put together from the processor time of each action, in
                       the order of the schedule, without messages and other processes

The machine's load is printed to stderr: with more than P busy processes `replayed` says more than the rest.
"""

from __future__ import annotations

import argparse
import json
import os
import sys


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--rounds", type=int, default=7, help="paired steps (at least 5)")
    parser.add_argument("--atoms", type=int, default=12, help="atoms of a micro-batch, about 78 edges each")
    parser.add_argument("--micro-batches", type=int, default=8, help="N")
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--stages", type=int, default=2, help="P, at most 4")
    options = parser.parse_args()

    from fairchem_janus.bench.figures import figures
    from fairchem_janus.bench.schedules import Workload, run_rank
    from fairchem_janus.bench.workload import UMA_S
    from fairchem_janus.parallel.launch import run_on_ranks

    workload = Workload(
        size=UMA_S,
        experts=options.experts,
        atoms=options.atoms,
        num_micro_batches=options.micro_batches,
        rounds=options.rounds,
    )
    before = os.getloadavg()[0]
    records = run_on_ranks(
        run_rank, workload, options.stages, world_size=options.stages, timeout_seconds=600.0 * options.rounds
    )
    result = figures(records)
    print(f"load of the last minute: {before:.1f} before, {os.getloadavg()[0]:.1f} after", file=sys.stderr)
    if options.json:
        print(json.dumps(result))
    else:
        show(result)


def show(result: dict) -> None:
    details = result.pop("details")
    for name, value in result.items():
        print(f"{name:32}{value:.3f}" if isinstance(value, float) else f"{name}: {value}")
    print("replayed:", {name: round(value, 3) for name, value in details["replayed"].items()})
    print("median step, s:", {name: round(value, 3) for name, value in details["step_seconds"].items()})
    for split, times in details["phase_seconds"].items():
        print(f"{split:8}", {phase: [round(1000 * t) for t in values] for phase, values in times.items()}, "ms")
    for split, left in details["bytes_left"].items():
        print(f"{split:8}", {phase: [round(b / 1e6, 1) for b in values] for phase, values in left.items()}, "MB left")
    for sizes, found in details["simulated"].items():
        print(f"simulated {sizes}:", {name: round(value, 3) for name, value in found.items()})


if __name__ == "__main__":
    main()
