"""What a job's phases cost on its stages: times, live bytes, messages and links, measured in the first steps of a run.

Every rank notes when its actions ran anyway (`timeline.py`). In the profiled steps it also notes what each leaves
allocated (`memory.py`) and times its blocks' forwards; nothing of that touches a tensor. Then the ranks' samples come
together, each phase is summed up by its median over micro-batches (a mean would follow the one that was interrupted),
and the result says what the simulator and the planner want to know (`Profile.costs`).

Bytes are those of the largest micro-batch seen. An FE graph counts what FE leaves, or what is left after BF if that is
more (the *merged* split keeps gradients at the boundary of the graphs until BE); an FF graph counts what FF adds.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch.distributed as dist

from fairchem_janus.data.cost import fit_cost
from fairchem_janus.engine.link import measure_link
from fairchem_janus.engine.messages import message_specs
from fairchem_janus.engine.runtime import Runtime
from fairchem_janus.parallel.marks import Mark, seconds
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.schedule import TRAINING_PHASES, Costs, Phase, Schedule


class Sample(NamedTuple):
    """One action that was measured; see `Span`. `step` tells the steps of different replicas apart, too."""

    step: int
    phase: Phase
    stage: int
    micro_batch: int
    seconds: float
    left: int = 0
    workspace: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class StageProfile:
    """What one stage costs for one micro-batch, and what its rank holds.

    Attributes:
        phase_seconds: median time of FE, FF, BF and BE.
        block_seconds: median time of one block in FE.
        num_blocks: blocks of the stage.
        fe_graph_bytes, ff_graph_bytes: alive from FE to BE and from FF to BF.
        workspace_bytes: most that a phase had allocated for a moment on top of what it left; 0 on the CPU, where
            nothing tells.
        state_bytes: parameters, gradients, optimizer state and moving average of rank p = stage.
    """

    phase_seconds: dict[str, float]
    block_seconds: float
    num_blocks: int
    fe_graph_bytes: int
    ff_graph_bytes: int
    workspace_bytes: int
    state_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile:
    """The measured costs of a job; `profile.json` in the run folder is its `to_json`.

    Attributes:
        num_steps: how many steps were profiled.
        message_bytes: mean size of what each phase sends.
        link_latency, link_bandwidth: of the slowest link, in s and bytes/s; bandwidth None if there is no link.
        graph_cost: what a graph costs by its atoms and edges, in s of one rank: `janus.gars.cost`. None if the profiled
            micro-batches do not tell, and where graph-parallel ranks share them.
    """

    device: str
    num_steps: int
    stages: list[StageProfile]
    message_bytes: dict[str, float]
    link_latency: float
    link_bandwidth: float | None
    graph_cost: dict[str, float] | None = None

    def costs(self, num_micro_batches: int) -> Costs:
        """What planning needs, in seconds and bytes, for micro-batches that are all alike."""
        return Costs(
            num_stages=len(self.stages),
            num_micro_batches=num_micro_batches,
            phase_times={phase: [s.phase_seconds[phase] for s in self.stages] for phase in TRAINING_PHASES},
            fe_graph_size=[float(s.fe_graph_bytes) for s in self.stages],
            ff_graph_size=[float(s.ff_graph_bytes) for s in self.stages],
            message_sizes={phase: self.message_bytes[phase] for phase in TRAINING_PHASES},
            link_latency=self.link_latency,
            **({} if self.link_bandwidth is None else {"link_bandwidth": self.link_bandwidth}),
        )

    def block_and_stage_costs(self) -> tuple[list[float], list[float]]:
        """Seconds of each block and of each stage besides its blocks, for `balanced_partition`.

        A block's forward is timed; its other phases are taken to cost as much more than it as the whole stage's do.
        What is left of a stage's measured time is geometry, and on the first stage the embeddings, on the last one the
        head: it stays if blocks move.
        """
        totals = [sum(stage.phase_seconds.values()) for stage in self.stages]
        blocks = [
            stage.block_seconds * total / stage.phase_seconds[Phase.FE] if stage.phase_seconds[Phase.FE] else 0.0
            for stage, total in zip(self.stages, totals, strict=True)
        ]
        block = statistics.fmean(blocks)
        rest = [max(0.0, t - stage.num_blocks * block) for t, stage in zip(totals, self.stages, strict=True)]
        return [block] * sum(stage.num_blocks for stage in self.stages), rest

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def graph_cost(samples: Iterable[Sample], loads: Mapping[tuple[int, int], tuple[int, int]]) -> dict[str, float] | None:
    """`per_atom` and `per_edge` of the time that a micro-batch takes on all stages, by least squares.

    Args:
        loads: atoms and edges of each micro-batch, by (step, micro-batch).
    """
    times: dict[tuple[int, int], float] = defaultdict(float)
    for sample in samples:
        times[sample.step, sample.micro_batch] += sample.seconds
    keys = [key for key in times if key in loads]
    try:
        cost = fit_cost([loads[k][0] for k in keys], [loads[k][1] for k in keys], [times[k] for k in keys])
    except ValueError:  # too few micro-batches, or all alike
        return None
    return {"per_atom": cost.per_atom, "per_edge": cost.per_edge}


def summarise(samples: Iterable[Sample], stage: int, *, recomputed: bool = False) -> dict[str, Any]:
    """A stage's part of `StageProfile` that follows from its samples, of all ranks that ran it.

    Args:
        recomputed: FF first ran FE again; its time is then given without that.
    """
    seconds: dict[Phase, list[float]] = {phase: [] for phase in TRAINING_PHASES}
    left: dict[tuple[int, int], dict[Phase, int]] = defaultdict(dict)
    workspace = 0
    for sample in samples:
        if sample.stage == stage:
            seconds[sample.phase].append(sample.seconds)
            left[sample.step, sample.micro_batch][sample.phase] = sample.left
            workspace = max(workspace, sample.workspace)
    medians = {str(phase): statistics.median(found) if found else 0.0 for phase, found in seconds.items()}
    if recomputed:
        medians[Phase.FF] = max(0.0, medians[Phase.FF] - medians[Phase.FE])
    fe_bytes = ff_bytes = 0
    for parts in left.values():
        after_fe, from_ff, from_bf = (parts.get(phase, 0) for phase in (Phase.FE, Phase.FF, Phase.BF))
        fe_bytes = max(fe_bytes, after_fe, after_fe + from_ff + from_bf)
        ff_bytes = max(ff_bytes, from_ff)
    return {
        "phase_seconds": medians,
        "fe_graph_bytes": fe_bytes,
        "ff_graph_bytes": ff_bytes,
        "workspace_bytes": workspace,
    }


class StepProfiler:
    """Measures the steps between `start` and `finish` on this rank.

    Args:
        num_blocks: of every stage.
        state_bytes: bytes of parameters, gradients, optimizer state and moving average on this rank.
    """

    def __init__(
        self, runtime: Runtime, topology: Topology, num_blocks: Sequence[int], state_bytes: Callable[[], int]
    ) -> None:
        self.runtime = runtime
        self.topology = topology
        self.num_blocks = num_blocks
        self.state_bytes = state_bytes
        self.num_steps = 0
        self._samples: list[Sample] = []
        self._loads: dict[tuple[int, int], tuple[int, int]] = {}
        self._messages: dict[Phase, list[int]] = {phase: [] for phase in TRAINING_PHASES}
        self._block_marks: list[tuple[Mark, Mark]] = []
        self._block_seconds: list[float] = []
        self._hooks: list[Any] = []

    def start(self) -> None:
        """The next step is measured, and those after it."""
        timeline, stage = self.runtime.timeline, self.runtime.stage
        timeline.measure_memory = True
        began: list[Mark] = []
        for index in stage.blocks:
            block = stage.model.backbone.blocks[index]
            self._hooks += [
                block.register_forward_pre_hook(lambda *_: began.append(timeline.mark())),
                block.register_forward_hook(
                    lambda *_: self._block_marks.append((began.pop(), timeline.mark()))  # None: the output stays
                ),
            ]

    def note(self, batches: Sequence[Any]) -> None:
        """A measured step is over."""
        grid = self.topology.grid
        step = self.num_steps * grid.D + grid.d
        for action, begin, end, left, workspace in self.runtime.timeline.spans():
            where = (action.phase, action.stage, action.micro_batch)
            self._samples.append(Sample(step, *where, end - begin, left, workspace))
        for index, batch in enumerate(batches):
            if batch is None:
                continue
            if (targets := batch.get("scatter_target", None)) is not None:  # one an edge, written by FE
                self._loads[step, index] = batch["pos"].shape[0], targets.shape[0]
            for phase in TRAINING_PHASES:
                specs = message_specs(phase, batch, self.runtime.stage.shape)
                self._messages[phase].append(sum(spec.num_bytes for spec in specs))
        self._block_seconds += [seconds(*marks) for marks in self._block_marks]
        self._block_marks.clear()
        self.num_steps += 1

    def finish(self, schedule: Schedule) -> Profile:
        """Stop, and bring everything together; every rank of the world must call this and gets the same profile."""
        self.runtime.timeline.measure_memory = False
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        grid = self.topology.grid
        sizes = {str(phase): statistics.fmean(found) if found else 0.0 for phase, found in self._messages.items()}
        own = {
            "p": grid.p,
            "samples": self._samples,
            "block_seconds": statistics.median(self._block_seconds) if self._block_seconds else 0.0,
            "state_bytes": self.state_bytes(),
            "message_bytes": sizes,
            "loads": self._loads,
            "link": measure_link(self.topology, max(1, round(max(sizes.values())))),
        }
        everyone: list[Any] = [own]
        if grid.D * grid.P * grid.G > 1:
            everyone = [None] * (grid.D * grid.P * grid.G)
            dist.all_gather_object(everyone, own)
        self._samples = []
        samples = [sample for part in everyone for sample in part["samples"]]
        loads = {key: load for part in everyone for key, load in part["loads"].items()}
        row_of_ff = {a.stage: row for row, actions in enumerate(schedule.rows) for a in actions if a.phase is Phase.FF}
        stages = []
        for stage in range(grid.P):
            again = stage in row_of_ff and schedule.recomputes(stage, row_of_ff[stage])
            ranks = [part for part in everyone if part["p"] == stage]
            stages.append(
                StageProfile(
                    **summarise(samples, stage, recomputed=again),
                    block_seconds=statistics.median(part["block_seconds"] for part in ranks),
                    num_blocks=self.num_blocks[stage],
                    state_bytes=max(part["state_bytes"] for part in ranks),
                )
            )
        links = [part["link"] for part in everyone if part["link"] is not None]
        return Profile(
            device=str(self.topology.device.type),
            num_steps=self.num_steps,
            stages=stages,
            message_bytes={p: statistics.fmean(part["message_bytes"][p] for part in everyone) for p in sizes},
            link_latency=max((latency for latency, _ in links), default=0.0),
            link_bandwidth=min((bandwidth for _, bandwidth in links), default=None),
            graph_cost=graph_cost(samples, loads) if grid.G == 1 else None,
        )
