#!/usr/bin/env python
"""What GARS gains over sequential packing, measured at P = 2 and simulated at P = 4; prints one JSON object.

    python scripts/bench_gars.py [--data $JANUS_TEST_DATA] [--pairs 7] [--channels 32]

Measured: the stock job of the tests on real crystals and molecules, two ranks with one thread each. Every pair takes
the same global batches through sequential packing (fairchem's greedy with the smallest cap that N micro-batches allow)
and through GARS by atoms and by edges, one after the other in the same processes, in another order each time, so that
whatever else the machine does hits all alike. Loading is not timed. A ratio is that of throughputs, GARS / sequential.
Two ranks need two idle cores: see `load_average`. On a busy machine `replayed_ratio` says more: the same steps, put
together from the processor time of each action in the order of the schedule, without messages and other processes.
`simulated_P2_D1` is what to expect where times follow edges alone.

Simulated: WaveK on P = 4 stages and D = 2 replicas with N = 16, times proportional to edges, a step ending with its
slower replica; for the real graphs and for a generated set with a heavier tail (2 to 500 atoms). `fixed_count` is a
sequential sampler that counts graphs instead of atoms (fairchem's `BalancedBatchSampler` without its balancing).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch.distributed as dist
from numpy.typing import NDArray

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from fairchem.core.launchers.slurm_launch import _set_seeds  # noqa: E402
from omegaconf import DictConfig  # noqa: E402

from fairchem_janus.bench.figures import replay  # noqa: E402
from fairchem_janus.data.balance import balance  # noqa: E402
from fairchem_janus.data.edges import EdgeCounts  # noqa: E402
from fairchem_janus.data.frames import load_sizes  # noqa: E402
from fairchem_janus.data.gars import Packing, pack  # noqa: E402
from fairchem_janus.data.gars_sampler import GARSBatchSampler  # noqa: E402
from fairchem_janus.data.stats import data_stats, write_metadata  # noqa: E402
from fairchem_janus.parallel.launch import run_on_ranks  # noqa: E402
from fairchem_janus.runner import JanusRunner  # noqa: E402
from fairchem_janus.schedule import Action, Costs, Schedule, make_schedule, simulate  # noqa: E402
from tests.integration.variants import adopt, stock_config  # noqa: E402
from tests.jobs.prepare import prepare_real  # noqa: E402

Spans = list[tuple[Action, float]]
"""A rank's actions of one step in order, with the seconds that each took."""

METHODS: dict[str, dict[str, Any]] = {
    "sequential": {"method": "sequential"},
    "gars_atoms": {"cost": "atoms"},
    "gars_edges": {"cost": "edges"},
}
CUTOFF, MAX_NEIGHBORS = 6.0, 300


def job(data: Path, folder: Path, *, num_micro_batches: int, channels: int) -> DictConfig:
    """The stock job on two stages, with all frames of the real data and edge counts in their metadata."""
    overrides = prepare_real(data, folder, num_frames=10_000)
    for name in ("omat", "omol"):
        source = folder / name / "train"
        write_metadata(source, data_stats(source, CUTOFF, max_neighbors=MAX_NEIGHBORS), max_neighbors=MAX_NEIGHBORS)
    keys = ("sphere_channels", "hidden_channels", "edge_channels")
    return stock_config(
        overrides,
        *adopt(P=2, N=num_micro_batches),
        f"cutoff_radius={CUTOFF:g}",
        f"max_neighbors={MAX_NEIGHBORS}",
        "train_dataset.combined_dataset_config.sampling.ratios={omat.train: 1.0, omol.train: 1.0}",
        *(f"backbone.{key}={channels}" for key in keys),
    )


def measure(config: DictConfig, *, graphs_per_step: int, pairs: int, steps: int) -> dict[str, Any]:
    """Called on each rank. Seconds of each method in each pair, and how even their micro-batches were."""
    _set_seeds(config.job.seed)
    runner = JanusRunner(**{key: config.runner[key] for key in config.runner if key not in ("_target_", "_recursive_")})
    unit, loader = runner.train_eval_unit, runner.train_dataloader
    unit.load_scheduler(1000)
    unit.model.train()
    unit.reporter.active = False
    counts = EdgeCounts.of_backbone({"cutoff": CUTOFF, "max_neighbors": MAX_NEIGHBORS})
    common = {"num_micro_batches": config.runner.janus.num_micro_batches, "graphs_per_step": graphs_per_step}
    packed = {}
    for name, arguments in METHODS.items():
        sampler = GARSBatchSampler(loader.dataset.dataset, 1, 0, edge_counts=counts, **common, **arguments)
        plans = [step for epoch in range(pairs * steps // len(sampler) + 2) for step in epoch_of(sampler, epoch)]
        packed[name] = [plans[steps * pair : steps * (pair + 1)] for pair in range(pairs + 1)]
    edges = GARSBatchSampler(loader.dataset.dataset, 1, 0, edge_counts=counts, cost="edges", **common).edges
    seconds: dict[str, list[float]] = {name: [] for name in METHODS}
    actions: dict[str, list[list[Spans]]] = {name: [] for name in METHODS}
    unit.runtime.timeline.mark = time.thread_time  # processor time, where a run's own records have wall time
    for pair in range(pairs + 1):
        for turn in range(len(METHODS)):
            name = list(METHODS)[(pair + turn) % len(METHODS)]
            items = [loader.collate_fn([loader.dataset[plan] for plan in step]) for step in packed[name][pair]]
            dist.barrier()
            started = time.perf_counter()
            actions[name].append([])
            for item in items:
                unit.train_step(None, item)
                spans = unit.runtime.timeline.spans()
                actions[name][-1].append([(span.action, span.end - span.start) for span in spans])
            dist.barrier()
            seconds[name].append(time.perf_counter() - started)
    runner.close()
    even = {name: _evenness([s for pair in plans for s in pair], edges) for name, plans in packed.items()}
    return {
        "seconds": {name: times[1:] for name, times in seconds.items()},
        "actions": {name: steps[1:] for name, steps in actions.items()},
        "max_over_mean_edges": even,
    }


def replayed_seconds(ranks: list[Spans]) -> float:
    """Time of a step whose actions take these times, each as soon as its rank and its inputs are there."""
    rows = tuple(tuple(action for action, _ in rank) for rank in ranks)
    num_micro_batches = len({action.micro_batch for row in rows for action in row})
    times = {action: seconds for rank in ranks for action, seconds in rank}
    return replay(Schedule(len(ranks), num_micro_batches, rows), times)


def epoch_of(sampler: GARSBatchSampler, epoch: int) -> list[Any]:
    """All full steps of an epoch."""
    sampler.set_epoch_and_start_iteration(epoch, 0)
    return [step for step in sampler if sum(len(plan.graphs) for plan in step) == sampler.config.graphs_per_step]


def _evenness(plans: list[Any], edges: NDArray) -> float:
    loads = [[edges[list(plan.graphs)].sum() for plan in step] for step in plans]
    return float(np.mean([balance(step, 0, len(step))[0] for step in loads]))


def simulated(sizes: NDArray, edges: NDArray, *, P: int = 4, D: int = 2, N: int = 16, per_step: int = 256) -> Any:
    """Mean step time relative to sequential packing, and what GARS by edges gains over it and over fixed counts."""
    times: dict[str, list[float]] = {name: [] for name in (*METHODS, "fixed_count", "floor")}
    for seed in range(4):
        order = np.random.default_rng(seed).permutation(len(sizes))
        for step in range(len(sizes) // per_step):
            chosen = order[step * per_step : (step + 1) * per_step]
            own = edges[chosen]
            for name, arguments in METHODS.items():
                times[name].append(step_time(replica_edges(pack(sizes[chosen], N, D, edges=own, **arguments)), P))
            bins = own.reshape(N * D, -1).sum(axis=1)
            times["fixed_count"].append(step_time([bins[d::D].tolist() for d in range(D)], P))
            times["floor"].append(step_time([[own.sum() / (N * D)] * N] * D, P))
    mean = {name: float(np.mean(values)) for name, values in times.items()}
    return {
        "relative_step_time": {name: round(value / mean["sequential"], 4) for name, value in mean.items()},
        "gain_over_sequential": {n: round(1 - mean[n] / mean["sequential"], 4) for n in ("gars_atoms", "gars_edges")},
        "gain_over_fixed_count": {n: round(1 - mean[n] / mean["fixed_count"], 4) for n in ("gars_atoms", "gars_edges")},
        "largest_possible_gain_over_sequential": round(1 - mean["floor"] / mean["sequential"], 4),
    }


def replica_edges(packing: Packing) -> list[list[int]]:
    """Edges of the micro-batches of each replica."""
    return [[micro_batch.num_edges or 0 for micro_batch in replica] for replica in packing.replicas]


def step_time(replicas: list[list[float]] | list[list[int]], num_stages: int) -> float:
    """WaveK, times proportional to edges; the step ends with its slowest replica."""
    makespans = []
    for scales in replicas:
        schedule = make_schedule("wavek", num_stages=num_stages, num_micro_batches=len(scales))
        scale = [float(value) for value in scales]
        costs = Costs(num_stages=num_stages, num_micro_batches=len(scales), micro_batch_scale=scale)
        makespans.append(simulate(schedule, costs).makespan)
    return max(makespans)


def heavy_tail(num_graphs: int) -> tuple[NDArray, NDArray]:
    """2 to 500 atoms, log-normal with median 20; 5 to 44 edges per atom."""
    rng = np.random.default_rng(2)
    sizes = np.clip(np.round(np.exp(rng.normal(3.0, 1.1, num_graphs))), 2, 500).astype(int)
    return sizes, sizes * rng.integers(5, 45, num_graphs)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", default=os.environ.get("JANUS_TEST_DATA"), help="folder with the extxyz files")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="optimizer steps of each method in a pair")
    parser.add_argument("--num-micro-batches", type=int, default=8)
    parser.add_argument("--graphs-per-step", type=int, default=64)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--simulate-only", action="store_true")
    options = parser.parse_args()
    if not options.data:
        parser.error("set --data or JANUS_TEST_DATA to the folder with the real data")
    data = Path(options.data)
    parts = [load_sizes(file, CUTOFF) for file in sorted(data.glob("*.extxyz"))]
    real = tuple(np.concatenate(values) for values in zip(*parts, strict=True))
    result: dict[str, Any] = {
        "simulated_P4_D2_N16": {
            name: {f"{per_step}_graphs_per_step": simulated(*columns, per_step=per_step) for per_step in (64, 128, 256)}
            for name, columns in (("real", real), ("heavy_tail", heavy_tail(1024)))
        }
    }
    if not options.simulate_only:
        with tempfile.TemporaryDirectory() as folder:
            shape = {"num_micro_batches": options.num_micro_batches, "channels": options.channels}
            config = job(data, Path(folder), **shape)
            found = run_on_ranks(measured, config, options, world_size=2, timeout_seconds=3600.0)
        result["measured_P2"] = summary(found, options)
        result["simulated_P2_D1"] = simulated(
            *real, P=2, D=1, N=options.num_micro_batches, per_step=options.graphs_per_step
        )
    print(json.dumps(result, indent=1))


def measured(config: DictConfig, options: argparse.Namespace) -> dict[str, Any]:
    return measure(config, graphs_per_step=options.graphs_per_step, pairs=options.pairs, steps=options.steps)


def summary(found: list[dict[str, Any]], options: argparse.Namespace) -> dict[str, Any]:
    """Medians over the pairs, from what the ranks found."""
    seconds = found[0]["seconds"]
    graphs = options.graphs_per_step * options.steps
    replayed = {
        name: [
            sum(replayed_seconds(list(step)) for step in zip(*pair, strict=True))
            for pair in zip(*(rank["actions"][name] for rank in found), strict=True)
        ]
        for name in METHODS
    }
    ratios, replayed_ratios = (
        {
            name: [before / after for before, after in zip(times["sequential"], times[name], strict=True)]
            for name in ("gars_atoms", "gars_edges")
        }
        for times in (seconds, replayed)
    )
    return {
        "settings": {k: v for k, v in vars(options).items() if k not in ("data", "simulate_only")},
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "graphs_per_second": {name: round(graphs / statistics.median(times), 2) for name, times in seconds.items()},
        "ratio": {name: round(statistics.median(values), 4) for name, values in ratios.items()},
        "ratio_of_each_pair": {name: [round(value, 4) for value in values] for name, values in ratios.items()},
        "replayed_ratio": {name: round(statistics.median(values), 4) for name, values in replayed_ratios.items()},
        "replayed_ratio_of_each_pair": {n: [round(v, 4) for v in values] for n, values in replayed_ratios.items()},
        "max_over_mean_edges": {name: round(value, 4) for name, value in found[0]["max_over_mean_edges"].items()},
    }


if __name__ == "__main__":
    main()
