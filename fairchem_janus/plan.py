"""What `fairchem-janus plan` finds out: a few steps of a job on local ranks, measured, and what follows from them.

One pipeline of P ranks stands for all replicas. The first step warms up and takes an optimizer step, so that optimizer
state and moving average are there to be counted; from then on weights stay as they are, and all is thrown away.
"""

from __future__ import annotations

import logging
from dataclasses import asdict, dataclass, replace
from typing import Any

from fairchem.core.launchers.slurm_launch import _set_seeds
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from fairchem_janus.config import AUTO, JanusConfig
from fairchem_janus.engine.profile import Profile
from fairchem_janus.engine.step import HaloReport
from fairchem_janus.model.build import StageParameters
from fairchem_janus.model.partition import balanced_partition
from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.parallel.topology import Grid
from fairchem_janus.planning import GIB, Rival, caps_of, rivals
from fairchem_janus.recording import gather_recording
from fairchem_janus.schedule import Caps, Costs, Schedule, Simulation, simulate
from fairchem_janus.schedule.draw import Block
from fairchem_janus.verify.janus_side import steps_of

RECORDED_STEPS = 2
"""Steps with the schedule that the job keeps; the last full one is shown."""

WORTHWHILE = 0.02
"""Share of the slowest stage's time that another partition must save to be proposed; less may be noise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What the ranks bring home.

    Attributes:
        recorded: the last full step, blocks of each rank.
        seconds, bubble: of that step's pipeline.
        other_seconds: of that step besides: loss normalisers, gradient reduction.
        halo: what its graph-parallel ranks exchanged; None if G = 1.
    """

    stages: list[StageParameters]
    profile: Profile
    schedule: Schedule
    recorded: list[list[Block]]
    seconds: float
    bubble: float
    other_seconds: float
    halo: HaloReport | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """A job's schedule on its measured costs.

    Attributes:
        expected: the schedule that the job runs.
        rivals: the others, the fastest first.
        memory: bytes of each rank of a pipeline: states, graphs at their peak, workspace of a phase.
        partition, proposed: blocks of each stage, and those that would balance the stages.
        stage_seconds: of a micro-batch on the slowest stage, now and as proposed.
    """

    grid: Grid
    measured: Measured
    costs: Costs
    caps: Caps
    expected: Simulation
    rivals: list[Rival]
    memory: list[dict[str, int]]
    partition: list[int]
    proposed: list[int]
    stage_seconds: tuple[float, float]

    def to_json(self) -> dict[str, Any]:
        """All the figures; times in seconds, memory in bytes."""
        measured, grid = self.measured, self.grid
        return {
            "grid": {"D": grid.D, "P": grid.P, "G": grid.G},
            "stages": [
                {"blocks": [s.blocks.start, s.blocks.stop], "own": s.own, "replicated": s.replicated}
                for s in measured.stages
            ],
            "schedule": measured.schedule.name,
            "csv": measured.schedule.to_csv(),
            "step_seconds": self.expected.makespan,
            "bubble": self.expected.bubble_ratio,
            "bubble_lower_bound": self.expected.bubble_lower_bound,
            "peak_in_flight": max(self.expected.peak_in_flight),
            "measured": {
                "step_seconds": measured.seconds,
                "bubble": measured.bubble,
                "other_seconds": measured.other_seconds,
                "halo": None if measured.halo is None else asdict(measured.halo),
            },
            "memory": self.memory,
            "families": [
                {
                    "schedule": rival.label,
                    "step_seconds": rival.simulation.makespan,
                    "bubble": rival.simulation.bubble_ratio,
                    "peak_in_flight": max(rival.simulation.peak_in_flight),
                    "peak_graph_bytes": round(max(rival.simulation.peak_memory)),
                    "within_caps": rival.fits,
                }
                for rival in self.rivals
            ],
            "partition": self.partition,
            "proposed_partition": self.proposed,
            "slowest_stage_seconds": list(self.stage_seconds),
            "profile": measured.profile.to_json(),
        }


def plan_job(config: DictConfig, *, steps: int, timeout_seconds: float = 3600.0) -> Plan:
    """Run a job's first steps on P local ranks and plan.

    Args:
        config: the canonical job configuration.
        steps: profiled steps.

    Raises:
        RankError: the job fails, or is refused; the text says why.
        ValueError: nothing keeps within the memory budget.
    """
    janus = JanusConfig.from_mapping(config.runner.get("janus"))
    scheduler, gp_size = config.job.scheduler, int(config.job.graph_parallel.group_size)
    grid = Grid.of(
        world_size=scheduler.num_nodes * scheduler.ranks_per_node, pipeline_size=janus.pipeline_size, gp_size=gp_size
    )
    job = config.copy()
    with open_dict(job):
        job.runner.janus = {**(job.runner.get("janus") or {}), "profile_steps": steps, "trace": False}
    measured = run_on_ranks(
        _measure,
        job,
        steps,
        world_size=grid.P * grid.G,
        device_type=str(config.job.device_type.value),
        timeout_seconds=timeout_seconds,
    )[0]
    return make_plan(janus, grid, measured)


def make_plan(janus: JanusConfig, grid: Grid, measured: Measured) -> Plan:
    """Pure: what the measurements amount to."""
    assert janus.num_micro_batches is not None
    profile = measured.profile
    costs = profile.costs(janus.num_micro_batches)
    # a schedule by name has no cap of its own; what stands beside it is what `auto` would do
    caps = caps_of(janus if janus.chooses else replace(janus, schedule=AUTO, profile_steps=1), profile)
    expected = simulate(measured.schedule, costs, caps)
    partition = [stage.num_blocks for stage in profile.stages]
    block_costs, stage_costs = profile.block_and_stage_costs()

    def slowest(counts: list[int]) -> float:
        return max(own + count * block_costs[0] for own, count in zip(stage_costs, counts, strict=True))

    proposed = balanced_partition(block_costs, stage_costs)
    if slowest(proposed) > (1 - WORTHWHILE) * slowest(partition):
        proposed = partition
    return Plan(
        grid=grid,
        measured=measured,
        costs=costs,
        caps=caps,
        expected=expected,
        rivals=rivals(costs, caps),
        memory=[
            {"states": s.state_bytes, "graphs": round(peak), "workspace": s.workspace_bytes}
            for s, peak in zip(profile.stages, expected.peak_memory, strict=True)
        ],
        partition=partition,
        proposed=proposed,
        stage_seconds=(slowest(partition), slowest(proposed)),
    )


def gib(num_bytes: float) -> str:
    return f"{num_bytes / GIB:.3g}"


def _measure(config: DictConfig, steps: int) -> Measured | None:
    """On each rank; rank 0 returns the result."""
    logging.getLogger().setLevel(logging.WARNING)
    _set_seeds(config.job.seed)
    runner = instantiate(config.runner)
    runner.job_config = config.job
    unit = runner.train_eval_unit
    unit.load_scheduler(len(runner.train_dataloader))
    unit.model.train()
    unit.reporter.active = False
    full, shown, recorded = unit.janus.num_micro_batches, None, None
    for step, data in enumerate(steps_of(runner.train_dataloader, 1 + steps + RECORDED_STEPS)):
        unit.train_progress._num_steps_completed = step
        if step == 0:
            unit.train_step(None, data)
            continue
        report = unit.compute_gradients(data, step)
        unit.gradients.zero()
        if step > steps and (shown is None or report.num_micro_batches >= full):
            shown, recorded = report, gather_recording(unit.runtime.timeline, unit.topology)
    runner.close()
    if unit.topology.grid.rank != 0:
        return None
    assert shown is not None and recorded is not None
    return Measured(
        stages=unit.stage_parameters,
        profile=unit.choice.profile,
        schedule=unit.choice.current,
        recorded=recorded,
        seconds=shown.pipeline_seconds,
        bubble=shown.bubble,
        other_seconds=max(0.0, shown.seconds - shown.pipeline_seconds),
        halo=shown.halo,
    )
