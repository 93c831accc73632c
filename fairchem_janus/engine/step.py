"""What a step amounts to, the same on every rank: loss, gradient norm, sizes; one small all-reduce."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from fairchem_janus.engine.finite import BadSample
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.runtime import StepResult
from fairchem_janus.engine.timeline import Timeline
from fairchem_janus.parallel.collectives import HaloMeter
from fairchem_janus.parallel.topology import Topology


@dataclass(frozen=True, slots=True)
class HaloReport:
    """Traffic between graph-parallel ranks in one step.

    Attributes:
        num_bytes: sent by all ranks together.
        seconds: in exchanges, waiting for the other ranks included; mean over ranks. It is part of the phases' time.
        comm_free_share: share of the micro-batches that needed none.
        by_micro_batch: (bytes sent, seconds) of each micro-batch on this rank.
    """

    num_bytes: int
    seconds: float
    comm_free_share: float
    by_micro_batch: list[tuple[int, float]]


@dataclass(frozen=True, slots=True)
class StepReport:
    """Figures of one optimizer step over the whole global batch.

    Attributes:
        loss: sum of `losses`.
        losses: each task's loss, coefficient included.
        grad_norm: L2 norm of the gradient over all stages, before clipping.
        num_atoms, num_graphs, num_micro_batches: in the global batch.
        bad: graphs of this rank's micro-batches with values that are not finite.
        num_bad: their number over all ranks.
        seconds: wall time of the step on this rank, forward to reduced gradients.
        pipeline_seconds: from the first phase's start to the last one's end, mean over replicas.
        bubble: share of the ranks' `pipeline_seconds` in which they waited: 1 - busy time / elapsed time.
        halo: what graph parallelism exchanged; None if G = 1.
    """

    loss: float
    losses: list[float]
    grad_norm: float
    num_atoms: int
    num_graphs: int
    num_micro_batches: int
    bad: list[BadSample]
    num_bad: int
    seconds: float
    pipeline_seconds: float
    bubble: float
    halo: HaloReport | None = None

    @property
    def is_finite(self) -> bool:
        """Whether the step may be taken."""
        return self.num_bad == 0 and math.isfinite(self.grad_norm)


def reduce_report(
    result: StepResult,
    gradients: GradientBuffer,
    batches: Sequence[Any],
    topology: Topology,
    timeline: Timeline,
    started: float,
    meter: HaloMeter | None = None,
) -> StepReport:
    """Combine every rank's part of a step; gradients must have been reduced.

    A step starts with FE and ends with BE on stage 0, so that rank's own elapsed time is the pipeline's.
    """
    counts = [0.0, 0.0, 0.0, 0.0, 0.0]
    if topology.is_first_stage:
        own = [b for b in batches if b is not None and topology.grid.speaks_for(b)]
        atoms, graphs = sum(b["pos"].shape[0] for b in own), sum(len(b["natoms"]) for b in own)
        micro_batches = len(batches) if topology.grid.g == 0 else 0
        num_dist = sum(1 for b in own if b.get("halo", None) is not None)
        counts = [float(atoms), float(graphs), float(micro_batches), float(num_dist), timeline.elapsed()]
    traffic = (0.0, 0.0) if meter is None else (float(meter.num_bytes), meter.seconds)
    figures = [gradients.squared_norm(), *counts, float(len(result.bad)), timeline.busy(), *traffic]
    parts = torch.cat([torch.tensor(figures, dtype=torch.float64), result.losses.to("cpu")])
    if dist.is_initialized() and dist.get_world_size() > 1:
        on_device = parts.to(topology.device)
        dist.all_reduce(on_device)
        parts = on_device.cpu()
    squared_norm, num_atoms, num_graphs, num_micro_batches, num_dist, elapsed, num_bad, busy, *rest = parts.tolist()
    halo_bytes, halo_seconds, *losses = rest
    grid = topology.grid
    halo = None
    if meter is not None:
        halo = HaloReport(
            num_bytes=int(halo_bytes),
            seconds=halo_seconds / (grid.D * grid.P * grid.G),
            comm_free_share=1 - num_dist / num_micro_batches if num_micro_batches else 1.0,
            by_micro_batch=_by_micro_batch(meter, len(batches)),
        )
    return StepReport(
        loss=sum(losses),
        losses=losses,
        grad_norm=math.sqrt(squared_norm),
        num_atoms=int(num_atoms),
        num_graphs=int(num_graphs),
        num_micro_batches=int(num_micro_batches),
        bad=result.bad,
        num_bad=int(num_bad),
        seconds=time.perf_counter() - started,
        pipeline_seconds=elapsed / (grid.D * grid.G),
        bubble=max(0.0, 1 - busy / (grid.P * elapsed)) if elapsed else 0.0,
        halo=halo,
    )


def _by_micro_batch(meter: HaloMeter, num_micro_batches: int) -> list[tuple[int, float]]:
    found = [(0, 0.0)] * num_micro_batches
    for (_, index), (_, num_bytes, seconds) in meter.by_label().items():
        found[index] = found[index][0] + num_bytes, found[index][1] + seconds
    return found
