#!/usr/bin/env python
"""What GARS's tags save at G = 2: halo traffic and step time, tagged against dist-only, on real crystals and molecules.

    python scripts/bench_graph_parallel.py [--json] [--data $JANUS_TEST_DATA] [--pairs 7] [--mode ALLGATHER]

Two ranks of one thread each share every micro-batch. Every pair runs one global batch twice in the same processes, in
turns: packed and tagged by GARS (comm-free where the largest graph fits a rank), and with the same packing all dist, as
fairchem's graph parallelism has it. Loading is not timed. Prints

halo_bytes_dist_only, halo_bytes_tagged   bytes that both ranks send in a step, mean over the pairs
halo_saving                               1 - tagged / dist-only
step_time_ratio                           tagged / dist-only, median over the pairs
max_rel_grad_error                        of a step of each kind, in float64, against plain fairchem in one process

and the share of comm-free micro-batches, and `overlap`, as shares of the dist-only step: the time in exchanges, the
part of it that moves data (the same exchanges between ranks that are both there), which is what hiding them behind the
edges with local sources could gain at most, and what it would cost (an edge-wise convolution in two parts, not one).
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from itertools import chain, count, islice
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from bench_gars import epoch_of, job
from fairchem.core.launchers.slurm_launch import _set_seeds
from omegaconf import DictConfig, open_dict

from fairchem_janus.data.sampler import MicroBatchPlan
from fairchem_janus.engine.step import HaloReport
from fairchem_janus.parallel.collectives import gather_rows
from fairchem_janus.parallel.graph import DIST, GraphParallel
from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.runner import JanusRunner
from fairchem_janus.verify.compare import compare
from fairchem_janus.verify.run import pipeline_trace, reference_trace

G = 2
KINDS = ("tagged", "dist_only")


def graph_parallel_job(options: argparse.Namespace, folder: Path) -> DictConfig:
    config = job(options.data, folder, num_micro_batches=options.micro_batches, channels=options.channels)
    mode, _, partition = options.mode.partition("-")
    with open_dict(config):
        config.runner.janus.update(pipeline_size=1, gars={"graphs_per_step": options.graphs_per_step, "cost": "edges"})
        for part in (config.job, config.runner.train_eval_unit.job_config):
            part.graph_parallel.update(group_size=G, mode=mode, partition=partition or "INDEX_SPLIT")
    return config


def all_dist(config: DictConfig) -> DictConfig:
    config = config.copy()
    with open_dict(config):
        config.runner.janus.gars.rank_budget = 1.0
    return config


def measure(config: DictConfig, pairs: int) -> dict[str, Any]:
    """Called on each rank: seconds and halo report of each kind of step in each pair."""
    _set_seeds(config.job.seed)
    runner = JanusRunner(**{key: config.runner[key] for key in config.runner if not key.startswith("_")})
    unit, loader = runner.train_eval_unit, runner.train_dataloader
    unit.load_scheduler(1000)
    unit.model.train()
    unit.reporter.active = False
    epochs = (epoch_of(loader.batch_sampler, epoch) for epoch in count())
    plans = list(islice(chain.from_iterable(epochs), pairs + 1))
    found: dict[str, list[tuple[float, HaloReport]]] = {kind: [] for kind in KINDS}
    for pair, plan in enumerate(plans):
        for kind in KINDS[:: 1 if pair % 2 else -1]:
            own = plan if kind == "tagged" else [MicroBatchPlan(p.graphs, DIST, num_edges=p.num_edges) for p in plan]
            item = loader.collate_fn([loader.dataset[p] for p in own])
            dist.barrier()
            started = time.perf_counter()
            unit.train_step(None, item)
            dist.barrier()
            found[kind].append((time.perf_counter() - started, unit.last_report.halo))
    split_cost = cost_of_two_parts(unit, loader, plans[-1])
    meter = unit.prepare.graph.meter
    moving = seconds_to_move(
        unit.prepare.graph, len(meter.exchanges), meter.num_bytes, channels=unit.stage.shape.channels
    )
    runner.close()
    steps = {kind: steps[1:] for kind, steps in found.items()}
    return {"steps": steps, "split_cost": split_cost, "moving": moving}


def seconds_to_move(graph: GraphParallel, number: int, num_bytes: int, *, channels: int, repeats: int = 20) -> float:
    """Time of `number` gathers that send `num_bytes` together, by ranks that need not wait for each other."""
    rows = max(1, num_bytes // number // (4 * channels))
    x = torch.zeros(rows, channels)
    times = []
    for _ in range(repeats):
        dist.barrier()
        started = time.perf_counter()
        gather_rows(x, [rows] * G, graph.ranks)
        times.append(time.perf_counter() - started)
    return number * statistics.median(times)


def cost_of_two_parts(unit: Any, loader: Any, plan: list[MicroBatchPlan], repeats: int = 5) -> float:
    """Step time with every block's edges in two parts, over that in one part: what overlapping would have to earn.

    The parts are convolved one after the other, and each block's messages added up, as with local edges first.
    """
    own = [MicroBatchPlan(p.graphs, DIST, num_edges=p.num_edges) for p in plan]
    blocks = [unit.stage.model.backbone.blocks[index].edge_wise for index in unit.stage.blocks]
    whole = type(blocks[0]).forward_chunk

    def in_two_parts(
        self: Any, x_full: Any, n: int, x_edge: Any, edge_index: Any, w: Any, wi: Any, t: Any, *_: Any
    ) -> Any:
        middle = edge_index.shape[1] // 2
        parts = [
            whole(self, x_full, n, x_edge[s], edge_index[:, s], w[s], wi[s], t[s])
            for s in (slice(0, middle), slice(middle, None))
        ]
        return parts[0] + parts[1]

    times: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(repeats + 1):
        for split in (True, False):
            type(blocks[0]).forward_chunk = in_two_parts if split else whole
            item = loader.collate_fn([loader.dataset[p] for p in own])
            dist.barrier()
            started = time.perf_counter()
            unit.train_step(None, item)
            dist.barrier()
            times[split].append(time.perf_counter() - started)
    type(blocks[0]).forward_chunk = whole
    return statistics.median(a / b for a, b in zip(times[True][1:], times[False][1:], strict=True)) - 1


def largest_gradient_error(configs: list[DictConfig]) -> float:
    errors = []
    for config in configs:
        ours = pipeline_trace(config, steps=1, dtype=torch.float64, world_size=G)
        errors.append(compare(ours, reference_trace(config, ours, dtype=torch.float64)).grad)
    return max(errors)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    data = os.environ.get("JANUS_TEST_DATA")
    parser.add_argument("--data", type=Path, default=data and Path(data), help="folder with the real data")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--graphs-per-step", type=int, default=32)
    parser.add_argument("--channels", type=int, default=32)
    parser.add_argument("--mode", default="ALLGATHER", help="ALLGATHER, ALL_TO_ALL-SPATIAL or ALL_TO_ALL-INDEX_SPLIT")
    options = parser.parse_args()
    if options.data is None:
        parser.error("--data is missing, and JANUS_TEST_DATA is not set")
    with tempfile.TemporaryDirectory() as folder:
        config = graph_parallel_job(options, Path(folder))
        ranks = run_on_ranks(measure, config, options.pairs, world_size=G, timeout_seconds=3000.0)
        error = largest_gradient_error([config, all_dist(config)])
    result = summary(ranks) | {"max_rel_grad_error": error, "mode": options.mode, "load": os.getloadavg()}
    print(json.dumps(result) if options.json else "\n".join(f"{key}: {value}" for key, value in result.items()))


def summary(ranks: list[dict[str, Any]]) -> dict[str, Any]:
    steps = ranks[0]["steps"]
    sent = {kind: statistics.fmean(halo.num_bytes for _, halo in steps[kind]) for kind in KINDS}
    seconds = {kind: [s for s, _ in steps[kind]] for kind in KINDS}
    ratios = [a / b for a, b in zip(seconds["tagged"], seconds["dist_only"], strict=True)]
    waits = [halo.seconds / s for s, halo in steps["dist_only"]]
    return {
        "halo_bytes_dist_only": round(sent["dist_only"]),
        "halo_bytes_tagged": round(sent["tagged"]),
        "halo_saving": 1 - sent["tagged"] / sent["dist_only"],
        "step_time_ratio": statistics.median(ratios),
        "step_time_ratios": [round(ratio, 3) for ratio in ratios],
        "step_seconds": {kind: statistics.median(times) for kind, times in seconds.items()},
        "comm_free_share": statistics.fmean(halo.comm_free_share for _, halo in steps["tagged"]),
        "overlap": {
            "in_exchanges": statistics.median(waits),
            "moving_data": ranks[0]["moving"] / statistics.median(seconds["dist_only"]),
            "cost_of_two_parts": ranks[0]["split_cost"],
        },
    }


if __name__ == "__main__":
    sys.exit(main())
