"""Bytes per rank of a pipelined step, and of plain fairchem's single rank on one micro-batch of the same size.

Two kinds, both counted on live tensors, the same way on both sides:

- *states*: parameters, gradients, optimizer state and moving average, after one optimizer step; storage that several
  tensors share counts once.
- *graphs*: everything that the step itself made and that is alive when a phase ends (on the plain side: when the
  forward, forces and loss are done, before the backward frees anything): autograd graphs, boundary tensors, messages on
  their way, gradients that wait at boundaries. See `live.py`. The most at any moment inside an operator is given too.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.units.mlip_unit.mlip_unit import compute_loss
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from fairchem_janus.bench.live import LiveBytes
from fairchem_janus.bench.workload import Size, make_batches, make_tasks
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.memory import tensor_bytes
from fairchem_janus.engine.runtime import Runtime, StepResult
from fairchem_janus.model.build import build_stage
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.schedule import Action, Schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryCase:
    """`size` with `changes` of it, micro-batches of one crystal of `atoms` atoms, a pipeline of `num_stages`."""

    size: Size
    changes: dict[str, Any]
    atoms: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """Most bytes of what a step made: when a phase ended, and at any moment."""

    at_phase_ends: int
    at_any_moment: int


class States:
    """The training state of a model that has not run yet."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters())
        self.average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.999))

    def bytes_after_step(self) -> dict[str, int]:
        """Take one step on the gradients that are there, and count."""
        self.optimizer.step()
        self.average.update_parameters(self.model)
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return {
            "parameters": tensor_bytes(self.model.parameters()),
            "gradients": tensor_bytes(p.grad for p in self.model.parameters()),
            "optimizer": tensor_bytes(moments),
            "moving average": tensor_bytes(self.average.module.parameters()),
        }


def run_plain(case: MemoryCase) -> tuple[dict[str, int], GraphBytes]:
    """Plain fairchem on this process: states, and graphs of one micro-batch."""
    warnings.filterwarnings("ignore", message="var.*degrees of freedom")
    model = case.size.build(**case.changes)
    states = States(model)
    tasks = make_tasks()
    for task, own in zip(tasks, with_global_losses(tasks), strict=True):
        task.loss_fn = own.loss_fn
    (batch,) = make_batches(1, atoms=case.atoms)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # they are states, not part of the graph
    with LiveBytes() as live:
        loss = torch.stack(list(compute_loss(tasks, model(batch), batch).values())).sum()
        at_end = live.total
        loss.backward()
        del loss
    return states.bytes_after_step(), GraphBytes(at_end, live.peak)


class WatchedRuntime(Runtime):
    """Notes the live bytes after every phase."""

    live: LiveBytes
    most: int

    def watched(self, schedule: Schedule, batches: Sequence[Any]) -> GraphBytes:
        """Run a step under the counter."""
        self.most = 0
        with LiveBytes() as self.live:
            self.run(schedule, batches)
        return GraphBytes(self.most, self.live.peak)

    def _execute(self, action: Action, batches: Sequence[Any], result: StepResult) -> None:
        super()._execute(action, batches, result)
        self.most = max(self.most, self.live.total)


def run_rank(
    case: MemoryCase, schedules: dict[tuple[str, Any, Any], Schedule]
) -> tuple[dict[str, int], dict[tuple[str, Any, Any], GraphBytes]]:
    """One rank of the pipeline: its states, and its graphs in every step.

    Args:
        schedules: by a key that begins with the split.
    """
    warnings.filterwarnings("ignore", message="var.*degrees of freedom")
    grid = Grid.of(world_size=case.num_stages, pipeline_size=case.num_stages, rank=dist.get_rank())
    topology = Topology.build(grid, torch.device("cpu"))
    model = case.size.build(**case.changes)
    stage = build_stage(model, index=grid.p, num_stages=grid.P)
    states, gradients = States(model), GradientBuffer(stage, topology)
    tasks = with_global_losses(make_tasks())
    graphs = {}
    for key, schedule in schedules.items():
        batches = make_batches(schedule.num_micro_batches, atoms=case.atoms)
        set_normalisers(tasks, batches)
        gradients.zero()
        graphs[key] = WatchedRuntime(stage, topology, tasks, gradients, split=key[0]).watched(schedule, batches)
        gradients.reduce()
        dist.barrier()
    return states.bytes_after_step(), graphs
