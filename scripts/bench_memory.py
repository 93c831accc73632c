#!/usr/bin/env python
"""Memory of a pipeline rank against plain fairchem's single rank on one micro-batch of the same size.

    python scripts/bench_memory.py [--json] [--channels 64] [--experts 4] [--atoms 8] [--micro-batches 12]

A model of uma-m's shape (10 blocks, lmax 4; fewer channels and experts, so that it fits this machine) at P = 4, on four
real ranks. Bytes are those of live tensors, each storage once (fairchem_janus/bench/memory.py, live.py).

states_ratio   parameters, gradients, optimizer and moving average, worst rank over plain fairchem
graphs_ratio   live graphs and boundary tensors at their peak, worst rank over plain fairchem's whole graph, with P
               micro-batches in flight: of the steps below with max_in_flight = P, the fastest with a ratio of at
               most 1.15
caps           both, and the bubble (simulated, typical phase times), for caps on micro-batches in flight and on FF
               graphs; `auto` plans each step. With the *eager* split BF frees all that FF made; with *merged*,
               gradients at the boundary of the two graphs stay until BE
"""

from __future__ import annotations

import argparse
import json
import sys

GRAPHS_TARGET = 1.15

STEPS = [
    *(("merged", in_flight, None) for in_flight in (1, 2, 4, 6, 8)),
    *(("merged", 4, ff_graphs) for ff_graphs in (1, 2, 3)),
    *(("eager", 4, ff_graphs) for ff_graphs in (2, None)),
]
"""(split, max_in_flight, max_ff_graphs) of every step that is run."""


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--experts", type=int, default=4)
    parser.add_argument("--atoms", type=int, default=8, help="atoms of a micro-batch, about 78 edges each")
    parser.add_argument("--micro-batches", type=int, default=12, help="N")
    options = parser.parse_args()

    from fairchem_janus.bench.memory import MemoryCase, run_plain, run_rank
    from fairchem_janus.bench.workload import UMA_M
    from fairchem_janus.parallel.launch import run_on_ranks
    from fairchem_janus.schedule import Caps, Costs, make_schedule, simulate

    P, N = 4, options.micro_batches
    changes = {"channels": options.channels, "experts": options.experts}
    case = MemoryCase(size=UMA_M, changes=changes, atoms=options.atoms, num_stages=P)
    costs = Costs(num_stages=P, num_micro_batches=N)
    schedules = {}
    for split, in_flight, ff_graphs in STEPS:
        caps = Caps(max_in_flight=in_flight, max_ff_graphs=ff_graphs)
        schedule = make_schedule("auto", num_stages=P, num_micro_batches=N, costs=costs, caps=caps)
        schedules[split, in_flight, ff_graphs] = schedule
    result = {"states_ratio_uma_m": states_ratio_of_shapes(P)}
    ranks = run_on_ranks(run_rank, case, schedules, world_size=P, timeout_seconds=3000.0)
    ((plain_states, plain_graphs),) = run_on_ranks(run_plain, case, world_size=1, timeout_seconds=1000.0)

    def worst(step: tuple[str, int, int | None], what: str) -> float:
        return max(getattr(graphs[step], what) for _, graphs in ranks) / getattr(plain_graphs, what)

    table = [
        {
            "split": step[0],
            "max_in_flight": step[1],
            "max_ff_graphs": step[2],
            "graphs_ratio": worst(step, "at_phase_ends"),
            "graphs_ratio_at_any_moment": worst(step, "at_any_moment"),
            "bubble": simulate(schedule, costs).bubble_ratio,
        }
        for step, schedule in schedules.items()
    ]
    full = [row for row in table if row["max_in_flight"] == P and row["split"] == "merged"]
    fitting = [row for row in full if row["graphs_ratio"] <= GRAPHS_TARGET] or full
    chosen = min(fitting, key=lambda row: row["bubble"])
    result |= {
        "states_ratio": max(sum(states.values()) for states, _ in ranks) / sum(plain_states.values()),
        "graphs_ratio": chosen["graphs_ratio"],
        "max_ff_graphs": chosen["max_ff_graphs"],
        "caps": table,
        "states_bytes": {"plain": plain_states, "ranks": [states for states, _ in ranks]},
        "graphs_bytes": {"plain": plain_graphs.at_phase_ends},
    }
    print(json.dumps(result) if options.json else text(result))


def states_ratio_of_shapes(num_stages: int) -> float:
    """The worst rank's share of uma-m's parameters; gradients, moments and average go with them.

    Parameters grow linearly with the number of experts, so two small models tell what the large one has.
    """
    from fairchem_janus.bench.workload import UMA_M
    from fairchem_janus.model.build import stage_parameters

    one, two = (stage_parameters(UMA_M.build(experts=experts), num_stages) for experts in (1, 2))
    own = [a.own + (UMA_M.experts - 1) * (b.own - a.own) for a, b in zip(one, two, strict=True)]
    return (max(own) + one[0].replicated) / (sum(own) + one[0].replicated)


def text(result: dict) -> str:
    lines = [f"states_ratio {result['states_ratio']:.3f} (uma-m itself: {result['states_ratio_uma_m']:.3f})"]
    lines.append(f"graphs_ratio {result['graphs_ratio']:.3f} with max_ff_graphs {result['max_ff_graphs']}")
    lines.append("| split | max_in_flight | max_ff_graphs | states | graphs | at any moment | simulated bubble |")
    lines.append("|---|---|---|---|---|---|---|")
    for row in result["caps"]:
        ff = "-" if row["max_ff_graphs"] is None else row["max_ff_graphs"]
        cells = [row["split"], row["max_in_flight"], ff, f"{result['states_ratio']:.3f}", f"{row['graphs_ratio']:.2f}"]
        cells += [f"{row['graphs_ratio_at_any_moment']:.2f}", f"{row['bubble']:.1%}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
