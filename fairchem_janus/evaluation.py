"""fairchem's `MLIPEvalUnit` on the pipeline engine: FE and FF only, metrics on stage 0, reduced over the world."""

from __future__ import annotations

import logging
import math
import time
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.units.mlip_unit._metrics import Metrics
from fairchem.core.units.mlip_unit.mlip_unit import MLIPEvalUnit, compute_metrics
from fairchem.core.units.mlip_unit.utils import tf32_context_manager
from omegaconf import DictConfig
from torchtnt.framework import EvalUnit, State

from fairchem_janus.engine.finite import BadSample
from fairchem_janus.engine.runtime import Runtime
from fairchem_janus.parallel.loss import set_normalisers
from fairchem_janus.prepare import BatchPreparation


class JanusEvalUnit(MLIPEvalUnit):
    """Evaluates with the weights of `runtime`'s stage (the moving average, if the job keeps one).

    Ranks of other stages hold no predictions; they take part in the pipeline and in the reductions with zeros.

    Attributes:
        bad: graphs with predictions or losses that are not finite (`janus.on_nan: skip`), in this evaluation and by
            this replica; their micro-batches are not in the metrics.
    """

    def __init__(self, *, job_config: DictConfig, runtime: Runtime, prepare: BatchPreparation, tf32: bool) -> None:
        # not MLIPEvalUnit.__init__, which wraps a model in DDP
        EvalUnit.__init__(self)
        self.job_config = job_config
        self.runtime = runtime
        self.prepare = prepare
        self.tf32 = tf32
        self.tasks = list(runtime.tasks)
        self.model = runtime.stage.model
        self.logger = None
        self.running_metrics: dict[str, dict[str, dict[str, Metrics]]] = {}
        self.losses: list[float] = []
        self.bad: list[BadSample] = []

    def on_eval_epoch_start(self, state: State) -> None:
        super().on_eval_epoch_start(state)
        self.losses, self.bad = [], []
        self.total_atoms = 0
        self.total_runtime = 0.0

    def eval_step(self, state: State, data: list[Any]) -> None:
        """Evaluate one item of the loader: a replica's micro-batches."""
        topology = self.runtime.topology
        batches = self.prepare(data, step=None)
        set_normalisers(self.tasks, batches, topology)
        schedule = self.runtime.evaluation_schedule(len(batches))
        started = time.perf_counter()
        with tf32_context_manager(self.tf32):
            result = self.runtime.run(schedule, batches)
        self.total_runtime += time.perf_counter() - started
        self.losses.append(float(result.losses.sum()))
        self.bad += result.bad
        for index, gate in result.gates.items():
            self.total_atoms += int(batches[index]["natoms"].sum())
            self._add_metrics(gate.predictions, batches[index])

    def _add_metrics(self, predictions: dict[str, Any], batch: Any) -> None:
        present = sorted(set(batch.dataset_name))
        for task in self.tasks:
            running = self.running_metrics[task.name]
            for dataset in (name for name in present if name in running):
                for name, value in compute_metrics(task, predictions, batch, dataset).items():
                    if value.numel:  # fairchem's Metrics divide by zero when nothing was ever counted
                        running[dataset][name] += value

    def on_eval_epoch_end(self, state: State) -> dict[str, float]:
        """Metrics of the whole evaluation under fairchem's names, the same on every rank; NaN where no label was."""
        names, sums = [], []
        for task, datasets in self.running_metrics.items():
            for dataset, metrics in datasets.items():
                for name, value in metrics.items():
                    names.append(f"val/{dataset},{task},{name}")
                    sums += [float(value.total), float(value.numel)]
        topology = self.runtime.topology
        steps_here = len(self.losses) / (topology.grid.D * topology.grid.G)
        extra = [sum(self.losses), steps_here] if topology.is_first_stage else [0.0, 0.0]
        extra += [float(self.total_atoms), self.total_runtime]
        values = torch.tensor([*sums, *extra], dtype=torch.float64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            on_device = values.to(self.runtime.topology.device)
            dist.all_reduce(on_device)
            values = on_device.cpu()
        numbers = values.tolist()
        totals, counts, (loss, steps, atoms, runtime) = numbers[:-4:2], numbers[1:-4:2], numbers[-4:]
        log = {n: t / c if c else math.nan for n, t, c in zip(names, totals, counts, strict=True)}
        grid = self.runtime.topology.grid
        log["val/loss"] = loss / steps if steps else math.nan
        log["val/atoms_per_second"] = atoms / (runtime / (grid.D * grid.P * grid.G)) if runtime else math.nan
        log["val/epoch"] = self.eval_progress.num_epochs_completed
        lines = "".join(f"  {key}: {log[key]:.4f}\n" for key in sorted(log))
        logging.info("Finished aggregating metrics: \n%s", lines)
        return log
