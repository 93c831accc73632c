"""The pipeline's side of a comparison: the job's own runner, driven for a few steps."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from fairchem.core.launchers.slurm_launch import _set_seeds
from omegaconf import DictConfig

from fairchem_janus.parallel.graph import DIST
from fairchem_janus.runner import JanusRunner
from fairchem_janus.verify.maes import absolute_errors, add_sums
from fairchem_janus.verify.trace import Trace, cast_batch, record_gradients, snapshot_parameters


def run_janus(config: DictConfig, *, steps: int, dtype: torch.dtype, folder: Path, keep_gradients: bool = True) -> None:
    """Train `steps` steps on this rank and write what it holds to `folder/d{d}_p{p}_g{g}.pt` (a `Trace`).

    Args:
        config: the canonical job configuration.
        keep_gradients: whether to record every step's gradients.
    """
    logging.getLogger().setLevel(logging.WARNING)
    runner_config = {key: config.runner[key] for key in config.runner if key not in ("_target_", "_recursive_")}

    class CastingRunner(JanusRunner):
        def prepare_model(self, model: torch.nn.Module) -> None:
            model.to(dtype)

    _set_seeds(config.job.seed)
    runner = CastingRunner(**runner_config)
    runner.job_config = config.job
    unit = runner.train_eval_unit
    unit.load_scheduler(len(runner.train_dataloader))
    unit.model.train()
    unit.reporter.active = False
    trace = Trace(steps_per_epoch=len(runner.train_dataloader))
    if keep_gradients:
        record_gradients(unit.optimizer, unit.model, trace.gradients)
    _record_maes(unit, trace)
    torch.set_default_dtype(dtype)
    try:
        for step, data in enumerate(steps_of(runner.train_dataloader, steps)):
            unit.train_progress._num_steps_completed = step
            trace.batches.append([[_counted_graphs(batch, unit.topology.grid.g) for batch in data]])
            unit.train_step(None, [None if batch is None else cast_batch(batch, dtype) for batch in data])
            assert unit.last_loss is not None and unit.last_grad_norm is not None
            trace.losses.append(unit.last_loss)
            trace.grad_norms.append(unit.last_grad_norm)
            assert unit.last_report is not None
            trace.halos.append(unit.last_report.halo)
    finally:
        torch.set_default_dtype(torch.float32)
        runner.close()
    trace.parameters = snapshot_parameters(unit.model)
    if unit.ema_model is not None:
        trace.ema = snapshot_parameters(unit.ema_model.module)
    grid = unit.topology.grid
    torch.save(trace, folder / f"d{grid.d}_p{grid.p}_g{grid.g}.pt")


def _counted_graphs(batch: Any, g: int) -> list[int]:
    """The graphs that graph-parallel rank g has alone, or as the first of those that share them."""
    if batch is None or (g > 0 and batch["gars_tag"] == DIST):
        return []
    return batch["graph_numbers"].tolist()


def _record_maes(unit: Any, trace: Trace) -> None:
    run = unit.runtime.run

    def recording(schedule: Any, batches: list[Any]) -> Any:
        result = run(schedule, batches)
        predicted = [(gate.predictions, batches[index]) for index, gate in result.gates.items()]
        trace.maes.append(absolute_errors(unit.tasks, predicted))
        return result

    unit.runtime.run = recording


def steps_of(dataloader: Any, steps: int) -> Iterator[list[Any]]:
    """The loader's first items, over as many epochs as it takes."""
    done = epoch = 0
    while done < steps:
        dataloader.batch_sampler.set_epoch_and_start_iteration(epoch, 0)
        for item in dataloader:
            yield item
            done += 1
            if done == steps:
                return
        epoch += 1


def merge_traces(folder: Path) -> Trace:
    """One trace from those of all ranks: parameters of every stage, batches of every replica."""
    traces: dict[tuple[int, int, int], Trace] = {}
    for path in folder.glob("d*_p*_g*.pt"):
        d, p, g = (int(part[1:]) for part in path.stem.split("_"))
        traces[d, p, g] = torch.load(path, weights_only=False)
    first = traces[0, 0, 0]
    replicas, stages, parts = (sorted(set(axis)) for axis in zip(*traces, strict=True))
    for p in reversed(stages):
        for step, gradients in enumerate(traces[0, p, 0].gradients):
            first.gradients[step] = {**gradients, **first.gradients[step]}
        first.parameters = {**traces[0, p, 0].parameters, **first.parameters}
        first.ema = {**traces[0, p, 0].ema, **first.ema}
    for trace in (trace for rank, trace in traces.items() if rank != (0, 0, 0)):  # each gate is on one rank
        first.maes = [add_sums(a, b) for a, b in zip(first.maes, trace.maes, strict=True)]
    first.batches = [
        [
            [list(chain(*shares)) for shares in zip(*(traces[d, 0, g].batches[step][0] for g in parts), strict=True)]
            for d in replicas
        ]
        for step in range(len(first.batches))
    ]
    return first
