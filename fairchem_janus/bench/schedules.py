"""The schedules against each other on real ranks: all of them in turn, step by step, in the same processes.

Each rank holds, with the same initial weights, its stage of the folded pipeline, what every unfolded baseline needs,
and the whole model for plain fairchem. A round is one step of each on the same micro-batches, started together after a
barrier; a ratio is taken within a round, so that whatever else the machine does meets both sides alike.
"""

from __future__ import annotations

import copy
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.datasets.atomic_data import AtomicData
from fairchem.core.models.base import HydraModel
from fairchem.core.units.mlip_unit.mlip_unit import compute_loss

from fairchem_janus.bench.figures import (
    BASELINES,
    EAGER,
    UNSPLIT,
    RankRecord,
    Step,
    auto,
    baseline,
    costs_of,
    phase_times,
)
from fairchem_janus.bench.workload import Size, make_batches, make_tasks
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.held import held_by, hold_stages
from fairchem_janus.engine.runtime import Runtime, StepResult
from fairchem_janus.engine.timeline import Span
from fairchem_janus.engine.unfolded import UnfoldedRuntime
from fairchem_janus.model.build import build_stage
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.schedule import Action, Schedule, make_schedule


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """What is run: `size` with `experts`, `num_micro_batches` of one crystal of `atoms` atoms, `rounds` times."""

    size: Size
    experts: int
    atoms: int
    num_micro_batches: int
    rounds: int
    seed: int = 0

    def batches(self) -> list[AtomicData]:
        return make_batches(self.num_micro_batches, atoms=self.atoms)


def run_rank(workload: Workload, num_stages: int) -> RankRecord:
    """All rounds on this rank."""
    N = workload.num_micro_batches
    grid = Grid.of(world_size=num_stages, pipeline_size=num_stages, rank=dist.get_rank())
    topology = Topology.build(grid, torch.device("cpu"))
    warnings.filterwarnings("ignore", message="var.*degrees of freedom")  # fairchem's, for one graph in a batch
    model = workload.size.build(experts=workload.experts, seed=workload.seed)
    schedules = {name: baseline(name, num_stages, N) for name in BASELINES}
    contestants: dict[str, Callable[[], Step]] = {UNSPLIT: _unsplit(copy.deepcopy(model), workload)}
    for name, placed in schedules.items():
        contestants[name] = _unfolded(copy.deepcopy(model), placed, topology, workload)
    merged, eager = (_folded(copy.deepcopy(model), topology, workload, split) for split in ("merged", "eager"))
    del model

    warm_up = make_schedule("wavek", num_stages=num_stages, num_micro_batches=N)
    for run in contestants.values():
        run()
    eager(warm_up)
    for _ in range(2):
        profiled = merged(warm_up)
    schedule = auto(costs_of(phase_times(_gather(profiled.spans)), N))
    schedules |= {"auto": schedule, EAGER: schedule}
    contestants |= {"auto": lambda: merged(schedule), EAGER: lambda: eager(schedule)}

    steps: dict[str, list[Step]] = defaultdict(list)
    names = list(contestants)
    for turn in range(workload.rounds):
        for name in [*names[turn % len(names) :], *names[: turn % len(names)]]:  # nobody is always first
            steps[name].append(contestants[name]())
    memory = {"merged": merged(schedule, memory=True).spans, "eager": eager(schedule, memory=True).spans}
    return RankRecord(dict(steps), schedules, memory)


def _gather(spans: list[Span]) -> list[Span]:
    everyone: list[list[Span]] = [[] for _ in range(dist.get_world_size())]
    dist.all_gather_object(everyone, spans)
    return [span for part in everyone for span in part]


def _timed(work: Callable[[], Any]) -> tuple[float, float]:
    """Seconds between barriers around `work`, and this thread's share of a processor in them."""
    dist.barrier()
    started, cpu = time.perf_counter(), time.thread_time()
    work()
    cpu = time.thread_time() - cpu
    dist.barrier()
    return time.perf_counter() - started, cpu


class _CpuTimes(Runtime):
    """Notes each action's processor time."""

    cpu_of: dict[Action, float]

    def _execute(self, action: Action, batches: Sequence[Any], result: StepResult) -> None:
        started = time.thread_time()
        super()._execute(action, batches, result)
        self.cpu_of[action] = time.thread_time() - started


class _UnfoldedCpuTimes(_CpuTimes, UnfoldedRuntime):
    """The same for unfolded schedules."""


def _step(runtime: _CpuTimes, gradients: GradientBuffer, schedule: Schedule, workload: Workload) -> Step:
    batches = workload.batches()
    set_normalisers(runtime.tasks, batches)
    gradients.zero()

    def work() -> None:
        runtime.run(schedule, batches)
        gradients.reduce()

    runtime.cpu_of = {}
    return Step(*_timed(work), runtime.timeline.spans(), runtime.cpu_of)


def _folded(model: HydraModel, topology: Topology, workload: Workload, split: str) -> Callable[..., Step]:
    stage = build_stage(model, index=topology.grid.p, num_stages=topology.grid.P)
    gradients = GradientBuffer(stage, topology)
    runtime = _CpuTimes(stage, topology, with_global_losses(make_tasks()), gradients, split=split)

    def step(schedule: Schedule, *, memory: bool = False) -> Step:
        runtime.timeline.measure_memory = memory
        return _step(runtime, gradients, schedule, workload)

    return step


def _unfolded(model: HydraModel, schedule: Schedule, topology: Topology, workload: Workload) -> Callable[[], Step]:
    stages = hold_stages(model, schedule, topology.grid.p)
    gradients = GradientBuffer(held_by(stages, schedule, topology), topology)
    runtime = _UnfoldedCpuTimes(stages, schedule, topology, with_global_losses(make_tasks()), gradients)
    return lambda: _step(runtime, gradients, schedule, workload)


def _unsplit(model: HydraModel, workload: Workload) -> Callable[[], Step]:
    """Plain fairchem, one micro-batch after another, on every rank at once: with a neighbour that is busy as well."""
    tasks = make_tasks()
    for task in tasks:  # no all-reduce of the sample count inside the loss: the ranks are not replicas
        task.loss_fn = with_global_losses([task])[0].loss_fn

    def step() -> Step:
        batches = workload.batches()
        model.zero_grad()

        def work() -> None:
            for batch in batches:
                sum(compute_loss(tasks, model(batch), batch).values()).backward()

        return Step(*_timed(work))

    return step
