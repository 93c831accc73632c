"""All stages of a pipeline in one process, one phase after another: what each phase takes on its own.

Messages are packed and unpacked as between ranks. What is missing is waiting, and a second rank's load on the machine.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from fairchem.core.datasets.atomic_data import AtomicData
from torch import nn

from fairchem_janus.bench.live import LiveBytes
from fairchem_janus.bench.workload import make_tasks
from fairchem_janus.engine.context import MicroBatch
from fairchem_janus.engine.gate import pass_gate
from fairchem_janus.engine.gradients import GradientBuffer, HeldBy
from fairchem_janus.engine.messages import message_specs, pack, unpack
from fairchem_janus.engine.phases import Phases, Tensors
from fairchem_janus.model.build import build_stage
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.schedule import TRAINING_PHASES, Phase


@dataclass(slots=True)
class PhaseFigures:
    """What the phases of one micro-batch cost on each stage, medians over repetitions.

    Attributes:
        seconds: phase -> one value a stage.
        left: phase -> bytes of live tensors that it leaves on top of what was (negative if it frees more).
    """

    seconds: dict[Phase, list[float]]
    left: dict[Phase, list[int]]

    @property
    def total_seconds(self) -> float:
        return sum(map(sum, self.seconds.values()))

    def mean(self, phase: Phase) -> float:
        """Seconds of a phase, mean over stages."""
        return statistics.fmean(self.seconds[phase])


class OneProcess:
    """A model cut into stages that share nothing but this process.

    Args:
        model: built and unsplit; it keeps its parameters, which the stages share.
        split: `merged` or `eager`.
    """

    def __init__(self, model: nn.Module, num_stages: int, device: torch.device, *, split: str = "merged") -> None:
        self.device = device
        self.topology = Topology(Grid(D=1, P=1, G=1, rank=0), device)
        self.tasks = with_global_losses(make_tasks())
        shared = list(model.parameters())
        cuts = [copy.deepcopy(model, {id(p): p for p in shared}).to(device) for _ in range(num_stages)]
        self.stages = [build_stage(cut, index=index, num_stages=num_stages) for index, cut in enumerate(cuts)]
        self.gradients = GradientBuffer([HeldBy([p for p in shared if p.requires_grad])], self.topology)
        self.phases = [Phases(stage, self.gradients, split) for stage in self.stages]
        self.noted: Callable[[Phase, int], Any] = lambda phase, stage: nullcontext()

    def step(self, make_batches: Callable[[], Sequence[AtomicData]]) -> float:
        """One global batch, micro-batch after micro-batch; returns the loss and leaves gradients in the parameters.

        Args:
            make_batches: called once for every stage, since fairchem writes into batches.
        """
        self.gradients.zero()
        copies = [list(make_batches()) for _ in self.stages]
        set_normalisers(self.tasks, copies[0])
        loss = sum(self.micro_batch(list(batches)) for batches in zip(*copies, strict=True))
        self.gradients.reduce()
        return loss

    def micro_batch(self, batches: Sequence[AtomicData]) -> float:
        """FE, FF, gate, BF, BE of one micro-batch, of which every stage gets a copy; returns its loss."""
        flight: list[MicroBatch] = []
        down = range(len(self.stages))
        message: Tensors = []
        for s in down:
            with self.noted(Phase.FE, s):
                mb, message = self.phases[s].energy_forward(0, batches[s], message)
            flight.append(mb)
            message = self._travel(Phase.FE, s, message, batches[s])
        message = []
        for s in reversed(down):
            with self.noted(Phase.FF, s):
                message = self.phases[s].force_forward(flight[s], message)
                if s == 0:
                    gate = pass_gate(self.stages[0], self.tasks, batches[0], message, training=True)
            message = self._travel(Phase.FF, s, message, batches[s]) if s else gate.cotangents
        for s in down:
            with self.noted(Phase.BF, s):
                message = self.phases[s].backward_of_force(flight[s], message)
            message = self._travel(Phase.BF, s, message, batches[s]) if s + 1 < len(down) else []
        for s in reversed(down):
            mb = flight.pop()
            with self.noted(Phase.BE, s):
                message = self.phases[s].backward_of_energy(mb, message)
                del mb
            message = self._travel(Phase.BE, s, message, batches[s]) if s else []
        return float(gate.losses.sum())

    def measure(self, make_batch: Callable[[], AtomicData], *, repetitions: int = 5) -> PhaseFigures:
        """Time every phase, after one repetition to warm up; then count what each leaves alive.

        Counting on the CPU looks at every operation, so it has a run of its own.
        """
        seconds: dict[tuple[Phase, int], list[float]] = defaultdict(list)
        self.noted = lambda phase, stage: _Timer(seconds[phase, stage], self.device)
        for repetition in range(repetitions + 1):
            if repetition == 1:
                seconds.clear()
            self.step(lambda: [make_batch()])
        left: dict[tuple[Phase, int], int] = {}
        counter = LiveBytes()
        self.noted = lambda phase, stage: _Counter(left, (phase, stage), counter)
        with counter:
            self.step(lambda: [make_batch()])
        self.noted = lambda phase, stage: nullcontext()
        stages = range(len(self.stages))
        return PhaseFigures(
            seconds={p: [statistics.median(seconds[p, s]) for s in stages] for p in TRAINING_PHASES},
            left={p: [left[p, s] for s in stages] for p in TRAINING_PHASES},
        )

    def _travel(self, phase: Phase, stage: int, message: Tensors, data: AtomicData) -> Tensors:
        if not message:
            return []
        specs = message_specs(phase, data, self.stages[stage].shape)
        return unpack(pack(message, specs), specs)


class _Timer:
    """Appends the seconds between entering and leaving."""

    def __init__(self, into: list[float], device: torch.device) -> None:
        self.into, self.device = into, device

    def __enter__(self) -> None:
        self._wait()
        self.started = time.perf_counter()

    def __exit__(self, *_: Any) -> None:
        self._wait()
        self.into.append(time.perf_counter() - self.started)

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class _Counter:
    """Notes how many bytes more are alive on leaving than on entering."""

    def __init__(self, into: dict[Any, int], key: Any, counter: LiveBytes) -> None:
        self.into, self.key, self.counter = into, key, counter

    def __enter__(self) -> None:
        self.before = self.counter.total

    def __exit__(self, *_: Any) -> None:
        self.into[self.key] = self.counter.total - self.before
