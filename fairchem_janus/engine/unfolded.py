"""The runtime of unfolded schedules, in which FF of a stage runs apart from its FE: the paper's baselines.

Where FF does not find the graph that FE built, it first recomputes FE, and that graph is its own::

    FE_s   builds a graph and sends h[s+1] down                        h[s]: to FF_s as well
    FF_s   builds the graph again from h[s], differentiates it, sends g[s] up
    BF_s   walks FF's graph and the recomputed one to the end          (the *eager* split: there is nothing to merge
           and sends v[s+1] down                                        with, BE's graph is another)
                                                                       second-order gradient of h[s], uE: to BE_s
    BE_s   walks FE's graph for the first order, adds what BF_s found for h[s], sends u[s] up

What a message holds follows from its two ends:

==========  ==================================================================================
FE -> FE    h, csd embedding[, expert mixing coefficients]: what FE made for the next stage
FE -> FF    the same, as FE received it from the previous stage (stage 0: nothing is sent)
FF -> FF    as in a folded schedule; so are BF -> BF and BE -> BE (`engine/messages.py`)
BF -> BE    uE = dL/dE, and on all stages but 0 the second-order gradients of what FE received
==========  ==================================================================================

Parameters with two holders: see `engine/held.py`. In evaluation FF runs where FE ran, and nothing is recomputed.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from fairchem.core.units.mlip_unit.mlip_unit import Task

from fairchem_janus.engine.context import MicroBatch
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.messages import TensorSpec, message_specs
from fairchem_janus.engine.phases import Phases, Tensors
from fairchem_janus.engine.runtime import Runtime, StepResult
from fairchem_janus.model.stage import ModelShape, Stage
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.schedule import Action, Phase, Schedule, unfolded_evaluation
from fairchem_janus.schedule.dataflow import Message, dependencies, inbound, row_of_each_action

Link = tuple[Action, Action]
"""Producer and consumer of a message."""


def link_specs(producer: Action, consumer: Action, data: Any, shape: ModelShape) -> list[TensorSpec]:
    """Tensors that travel from one action to another, in order; see the table above."""
    if consumer.phase is producer.phase:
        return message_specs(producer.phase, data, shape)
    received = [] if producer.stage == 0 else message_specs(Phase.FE, data, shape)
    if producer.phase is Phase.FE:
        return received
    return [TensorSpec((data["natoms"].shape[0],), torch.float64), *received]


class UnfoldedRuntime(Runtime):
    """Runs action lists on a rank that holds several stages.

    Args:
        stages: by index, those that this rank's row has actions of.
        placed: a schedule, for its placement.
        Others: as in `Runtime`; the split is always *eager*.
    """

    def __init__(
        self,
        stages: dict[int, Stage],
        placed: Schedule,
        topology: Topology,
        tasks: Sequence[Task],
        gradients: GradientBuffer | None,
        *,
        autocast_dtype: torch.dtype | None = None,
        skip_non_finite: bool = False,
    ) -> None:
        super().__init__(
            stages[min(stages)],
            topology,
            tasks,
            gradients,
            split="eager",
            autocast_dtype=autocast_dtype,
            skip_non_finite=skip_non_finite,
        )
        for stage in stages.values():
            stage.model.to(topology.device)
        self._placed = placed
        in_loss = self.phases.energy_in_loss
        self._phases = {i: Phases(stage, gradients, "eager", energy_in_loss=in_loss) for i, stage in stages.items()}
        self._energy_graphs: dict[tuple[int, int], MicroBatch] = {}  # by stage and micro-batch; FE to BE
        self._force_graphs: dict[tuple[int, int], MicroBatch] = {}  # FF to BF
        self._here: dict[Link, Tensors] = {}  # messages from this rank to itself
        self._consumers: dict[Action, list[tuple[Action, int]]] = {}
        self._row_of: dict[Action, int] = {}
        self._schedule: Schedule | None = None

    def _neighbours(self) -> list[int]:
        return [row for row in range(self.topology.grid.P) if row != self.topology.grid.p]

    def evaluation_schedule(self, num_micro_batches: int) -> Schedule:
        return unfolded_evaluation(self._placed, num_micro_batches)

    def run(self, schedule: Schedule, batches: Sequence[Any]) -> StepResult:
        """As in `Runtime`."""
        result = super().run(schedule, batches)
        assert not self._energy_graphs and not self._force_graphs and not self._here, "graphs left after the step"
        return result

    def _expect(self, schedule: Schedule, batches: Sequence[Any]) -> None:
        row = self.topology.grid.p
        self._schedule, self._row_of, self._consumers = schedule, row_of_each_action(schedule), defaultdict(list)
        for action, home in self._row_of.items():
            for producer in dependencies(action, schedule.num_stages):
                self._consumers[producer].append((action, home))
        for source, arriving in inbound(schedule, row).items():
            specs = [(self._link(m), self._specs(*self._link(m), batches)) for m in arriving]
            self._receives[source].expect([(link, spec) for link, spec in specs if spec])

    @staticmethod
    def _link(message: Message) -> Link:
        return message.producer, message.consumer

    def _specs(self, producer: Action, consumer: Action, batches: Sequence[Any]) -> list[TensorSpec]:
        return link_specs(producer, consumer, batches[producer.micro_batch], self.stage.shape)

    def _execute(self, action: Action, batches: Sequence[Any], result: StepResult) -> None:
        run = {
            Phase.FE: self._energy_forward,
            Phase.FF: self._force_forward,
            Phase.BF: self._backward_of_force,
            Phase.BE: self._backward_of_energy,
        }[action.phase]
        with torch.enable_grad():
            made = run(action, batches, result)
        for consumer, row in self._consumers[action]:
            if consumer.phase not in made:
                continue  # the consumer finds what it needs in the graph itself
            if row == self.topology.grid.p:
                self._here[action, consumer] = [tensor.detach() for tensor in made[consumer.phase]]
            elif specs := self._specs(action, consumer, batches):
                self._sends[row].send(made[consumer.phase], specs)

    # ---------------------------------------------------------------- phases: each returns what its consumers get
    def _energy_forward(self, action: Action, batches: Sequence[Any], result: StepResult) -> dict[Phase, Tensors]:
        mb, message = self._build(action, self._from(Phase.FE, action, step=-1), batches)
        self._energy_graphs[action.stage, action.micro_batch] = mb
        return {Phase.FE: message, **({Phase.FF: mb.received} if self._recomputes(action) and mb.received else {})}

    def _force_forward(self, action: Action, batches: Sequence[Any], result: StepResult) -> dict[Phase, Tensors]:
        key = action.stage, action.micro_batch
        if self._recomputes(action):
            inputs = [] if action.stage == 0 else self._from(Phase.FE, action)
            received = self._from(Phase.FF, action, step=1)
            mb, _ = self._build(action, inputs, batches)
        else:
            mb, received = self._energy_graphs[key], self._from(Phase.FF, action, step=1)
        if self.training:
            self._force_graphs[key] = mb
        else:
            del self._energy_graphs[key]
        message = self._phases[action.stage].force_forward(mb, received)
        if action.stage == 0:
            self._pass_gate(action.micro_batch, mb.data, message, result)
        return {Phase.FF: message}

    def _backward_of_force(self, action: Action, batches: Sequence[Any], result: StepResult) -> dict[Phase, Tensors]:
        mb = self._force_graphs.pop((action.stage, action.micro_batch))
        first = action.stage == 0
        received = self._cotangents.pop(action.micro_batch) if first else self._from(Phase.BF, action, step=-1)
        message = self._phases[action.stage].backward_of_force(mb, received)
        found = mb.second_order or [None] * len(mb.received)
        second_order = [torch.zeros_like(x) if g is None else g for g, x in zip(found, mb.received, strict=True)]
        assert mb.u_energy is not None
        return {Phase.BF: message, Phase.BE: [mb.u_energy, *second_order]}

    def _backward_of_energy(self, action: Action, batches: Sequence[Any], result: StepResult) -> dict[Phase, Tensors]:
        mb = self._energy_graphs.pop((action.stage, action.micro_batch))
        mb.u_energy, *second_order = self._from(Phase.BF, action)
        mb.second_order = list(second_order)
        received = self._from(Phase.BE, action, step=1)
        return {Phase.BE: self._phases[action.stage].backward_of_energy(mb, received)}

    # ---------------------------------------------------------------- helpers
    def _recomputes(self, action: Action) -> bool:
        """Whether FF of the action's stage builds a graph of its own."""
        assert self._schedule is not None
        force = Action(Phase.FF, action.stage, action.micro_batch)
        return self._schedule.recomputes(action.stage, self._row_of[force])

    def _build(self, action: Action, received: Tensors, batches: Sequence[Any]) -> tuple[MicroBatch, Tensors]:
        """Run FE of a stage. fairchem writes into a batch, so each graph gets one of its own.

        The caller's gets what the graph behind the gate writes: fairchem's metrics read it there.
        """
        data = batches[action.micro_batch]
        gate = action.stage == 0 and (action.phase is Phase.FF or not self._recomputes(action))
        if not gate:
            data = copy.copy(data)
            data.__keys__ = set(data.__keys__)
        with self._autocast():
            return self._phases[action.stage].energy_forward(action.micro_batch, data, received)

    def _from(self, phase: Phase, consumer: Action, *, step: int = 0) -> Tensors:
        """The message from `phase` of the stage `step` further on; [] beyond the ends of the pipeline."""
        stage = consumer.stage + step
        if not 0 <= stage < self.topology.grid.P:
            return []
        producer = Action(phase, stage, consumer.micro_batch)
        source = self._row_of[producer]
        if source == self.topology.grid.p:
            return self._here.pop((producer, consumer))
        message = self._receives[source].take((producer, consumer))
        self.timeline.inputs_arrived()
        return message
