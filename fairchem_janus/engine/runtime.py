"""Executes a schedule on one stage: receive, run a phase, send; nothing here knows where the schedule came from."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from fairchem.core.units.mlip_unit.mlip_unit import Task

from fairchem_janus.engine.channel import Inbound, Outbound
from fairchem_janus.engine.context import MicroBatch
from fairchem_janus.engine.finite import BadSample, NonFiniteError
from fairchem_janus.engine.gate import GateResult, pass_gate, shut_gate
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.messages import message_specs
from fairchem_janus.engine.phases import Phases
from fairchem_janus.engine.timeline import Timeline
from fairchem_janus.model.stage import Stage
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.schedule import Action, Phase, Schedule, evaluation_schedule
from fairchem_janus.schedule.dataflow import inbound


class PhaseError(RuntimeError):
    """A phase failed; the text says on which rank, stage, phase, micro-batch and graphs."""


@dataclass(slots=True)
class StepResult:
    """What one pass over a global batch left on this rank.

    Attributes:
        losses: sum over this replica's micro-batches of each task's loss [num_tasks], float64; zero but on stage 0.
            Of the graph-parallel ranks that share a dist micro-batch, the first one has its loss and gate.
        bad: graphs with values that are not finite, found at the gate.
        gates: what each micro-batch gave at the gate, by its number (stage 0).
    """

    losses: torch.Tensor
    bad: list[BadSample] = field(default_factory=list)
    gates: dict[int, GateResult] = field(default_factory=dict)


class Runtime:
    """Runs action lists on one stage.

    Args:
        stage: the stage, in training or evaluation weights.
        tasks: with `GlobalLoss`es whose normalisers are set before every step.
        gradients: None for evaluation.
        autocast_dtype: bfloat16 to run the forwards under autocast, as fairchem's `bf16` does; None for none.
        skip_non_finite: note NaN and Inf at the gate in the result and go on, instead of raising.
    """

    def __init__(
        self,
        stage: Stage,
        topology: Topology,
        tasks: Sequence[Task],
        gradients: GradientBuffer | None,
        *,
        split: str = "merged",
        autocast_dtype: torch.dtype | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        self.stage = stage
        self.topology = topology
        self.tasks = tasks
        self.training = gradients is not None
        self.autocast_dtype = autocast_dtype
        self.skip_non_finite = skip_non_finite
        energy_in_loss = any("energy" in task.property for task in tasks)
        self.phases = Phases(stage, gradients, split, energy_in_loss=energy_in_loss)
        self.timeline = Timeline(topology.device)
        self._in_flight: dict[int, MicroBatch] = {}
        self._cotangents: dict[int, list[torch.Tensor]] = {}
        grid = topology.grid
        self._sends: dict[int, Outbound] = {}
        self._receives: dict[int, Inbound] = {}
        for neighbour in self._neighbours():
            send_group, receive_group = topology.down_group, topology.up_group
            if neighbour < grid.p:
                send_group, receive_group = receive_group, send_group
            assert send_group is not None and receive_group is not None
            peer = grid.rank_at(p=neighbour)
            self._sends[neighbour] = Outbound(send_group, peer)
            self._receives[neighbour] = Inbound(receive_group, peer, topology.device)

    def _neighbours(self) -> list[int]:
        """Stages that this one exchanges messages with."""
        grid = self.topology.grid
        return [stage for stage in (grid.p - 1, grid.p + 1) if 0 <= stage < grid.P]

    def evaluation_schedule(self, num_micro_batches: int) -> Schedule:
        """What to `run` for an evaluation step."""
        return evaluation_schedule(self.topology.grid.P, num_micro_batches)

    def run(self, schedule: Schedule, batches: Sequence[Any]) -> StepResult:
        """Execute this stage's row of `schedule` on the replica's micro-batches (on the device, unused so far).

        One that is None is left out; the ranks of a pipeline agree on that.

        Raises:
            PhaseError: a phase raised.
        """
        assert schedule.num_micro_batches == len(batches)
        result = StepResult(torch.zeros(len(self.tasks), dtype=torch.float64))
        schedule = schedule.without([index for index, data in enumerate(batches) if data is None])
        self._expect(schedule, batches)
        self.timeline.begin()
        for action in schedule.rows[self.topology.grid.p]:
            try:
                if (halo := batches[action.micro_batch].get("halo", None)) is not None:
                    halo.meter.label = action.phase, action.micro_batch
                name = f"janus {action.phase}{action.micro_batch}"
                with torch.autograd.profiler.record_function(name), self.timeline.action(action):
                    self._execute(action, batches, result)
            except Exception as error:
                raise self._explain(error, action, batches[action.micro_batch]) from error
        for channel in self._sends.values():
            channel.flush()
        assert not self._in_flight and not self._cotangents, "micro-batches left alive after the step"
        return result

    def _expect(self, schedule: Schedule, batches: Sequence[Any]) -> None:
        """Announce every message of the step to its channel, in the sender's order."""
        for source, arriving in inbound(schedule, self.stage.index).items():
            specs = [
                message_specs(m.producer.phase, batches[m.producer.micro_batch], self.stage.shape) for m in arriving
            ]
            self._receives[source].expect([(m.producer, spec) for m, spec in zip(arriving, specs, strict=True)])

    def _execute(self, action: Action, batches: Sequence[Any], result: StepResult) -> None:
        phase, index, stage = action.phase, action.micro_batch, self.stage
        data = batches[index]
        with torch.enable_grad():
            if phase is Phase.FE:
                received = [] if stage.is_first else self._take(Action(Phase.FE, stage.index - 1, index))
                with self._autocast():
                    self._in_flight[index], message = self.phases.energy_forward(index, data, received)
                self._send(action, stage.index + 1, message, data)
            elif phase is Phase.FF:
                received = [] if stage.is_last else self._take(Action(Phase.FF, stage.index + 1, index))
                message = self.phases.force_forward(self._in_flight[index], received)
                if stage.is_first:
                    self._pass_gate(index, data, message, result)
                self._send(action, stage.index - 1, message, data)
                if not self.training:
                    del self._in_flight[index]
            elif phase is Phase.BF:
                received = (
                    self._cotangents.pop(index)
                    if stage.is_first
                    else self._take(Action(Phase.BF, stage.index - 1, index))
                )
                message = self.phases.backward_of_force(self._in_flight[index], received)
                self._send(action, stage.index + 1, message, data)
            else:
                received = [] if stage.is_last else self._take(Action(Phase.BE, stage.index + 1, index))
                message = self.phases.backward_of_energy(self._in_flight.pop(index), received)
                self._send(action, stage.index - 1, message, data)

    def _autocast(self) -> Any:
        if self.autocast_dtype is None:
            return nullcontext()
        return torch.autocast(device_type=self.topology.device.type, dtype=self.autocast_dtype)

    def _pass_gate(self, index: int, data: Any, message: list[torch.Tensor], result: StepResult) -> None:
        if (halo := data.get("halo", None)) is not None:
            halo.meter.label = "gate", index
            message = halo.sum(message)
        speaks = self.topology.grid.speaks_for(data)
        try:
            with self._autocast():
                gate = pass_gate(self.stage, self.tasks, data, message, training=self.training)
        except NonFiniteError as error:
            if not self.skip_non_finite:
                raise
            result.bad += error.samples if speaks else []
            gate = shut_gate(self.tasks, message)
            if not self.training:
                return
        if speaks:
            result.losses += gate.losses.cpu()
            result.gates[index] = gate
        if self.training:
            self._cotangents[index] = gate.cotangents

    def _take(self, producer: Action) -> list[torch.Tensor]:
        message = self._receives[producer.stage].take(producer)
        self.timeline.inputs_arrived()
        return message

    def _send(self, action: Action, target: int, message: list[torch.Tensor], data: Any) -> None:
        if target in self._sends:
            self._sends[target].send(message, message_specs(action.phase, data, self.stage.shape))

    def _explain(self, error: Exception, action: Action, data: Any) -> PhaseError:
        ids = list(data.get("graph_ids", []))
        if isinstance(error, NonFiniteError):
            ids = [sample.graph for sample in error.samples]
        shown = ", ".join(ids[:8]) + (f" and {len(ids) - 8} more" if len(ids) > 8 else "")
        where = traceback.extract_tb(error.__traceback__)[-1]
        return PhaseError(
            f"{self.topology.grid.describe_rank()}, stage {action.stage}, {action.phase} of micro-batch "
            f"{action.micro_batch} (graphs {shown or 'unknown'}): {type(error).__name__}: {error} "
            f"[{where.filename}:{where.lineno}]"
        )
