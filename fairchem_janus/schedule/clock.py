"""The clock of one rank: what is alive on it, and when its next action can start.

Shared by the simulator, which follows given lists, and by list scheduling, which writes them, so that both mean the
same by a cap and by deferred parameter gradients (W).

With `Costs.deferrable_share` > 0, BF and BE leave part of their work in a backlog. The rank works it off, oldest first
and in pieces of any size (a piece is one layer's gradient), whenever its next action still waits for a message; before
an action that would exceed a cap; and at the end. A graph stays alive until the last of its deferred work is done.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

from fairchem_janus.schedule.action import TRAINING_PHASES, Action, Phase, Schedule
from fairchem_janus.schedule.costs import Costs


@dataclass(frozen=True, kw_only=True, slots=True)
class Caps:
    """Limits on what may be alive on each rank at once. Raises ValueError for a limit below 1 (memory: of 0)."""

    max_in_flight: int | None = None
    """FE graphs, each alive from FE to BE; None: no limit."""
    max_ff_graphs: int | None = None
    """FF graphs, each alive from FF to BF; None: no limit."""
    memory_budget: float = math.inf
    """Memory of all live graphs together, in the unit of `Costs.fe_graph_size`; FE leaves room for one FF graph."""

    def __post_init__(self) -> None:
        for name in ("max_in_flight", "max_ff_graphs"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, or left out for no limit; got {value}")
        if not self.memory_budget > 0:
            raise ValueError(f"memory_budget must be positive, got {self.memory_budget}")


NO_CAPS = Caps()

ROUND_OFF = 1e-9
"""Share of a deferred piece that counts as nothing left, so that rounding keeps no graph alive."""


class Work(NamedTuple):
    """What one action costs its rank. Graphs count positive if the action makes them, negative if it frees them."""

    duration: float
    """Time that it blocks the rank, without the deferrable part."""
    deferred: float
    """Time of its deferrable part."""
    fe_graphs: int
    ff_graphs: int
    fe_memory: float
    ff_memory: float


def work_of(costs: Costs, action: Action, *, recompute: bool = False, training: bool = True) -> Work:
    """Return what an action costs its rank.

    An FE graph lives from FE to BE (evaluation: to FF), an FF graph from FF to BF (evaluation keeps none). With
    `recompute`, FF runs FE first, and that graph lives from FF to BF.
    """
    phase, stage, micro_batch = action.phase, action.stage, action.micro_batch
    deferred = costs.deferrable_time(phase, stage, micro_batch)
    duration = costs.time(phase, stage, micro_batch) - deferred
    if phase is Phase.FF and recompute:
        duration += costs.time(Phase.FE, stage, micro_batch)
    fe, ff = {
        Phase.FE: (1, 0),
        Phase.FF: (int(recompute), 1) if training else (-1, 0),
        Phase.BF: (-int(recompute), -1),
        Phase.BE: (-1, 0),
    }[phase]
    scale = costs.scales[micro_batch]
    fe_memory, ff_memory = fe * scale * costs.fe_graph_sizes[stage], ff * scale * costs.ff_graph_sizes[stage]
    return Work(duration, deferred, fe, ff, fe_memory, ff_memory)


def works_of(schedule: Schedule, costs: Costs) -> dict[Action, Work]:
    """Return what each action of a schedule costs its rank."""
    training = schedule.phases == TRAINING_PHASES
    stages_of = [{action.stage for action in actions} for actions in schedule.rows]
    again = {(row, s): schedule.recomputes(s, row) for row, stages in enumerate(stages_of) for s in stages}
    return {
        action: work_of(costs, action, recompute=again[row, action.stage], training=training)
        for row, actions in enumerate(schedule.rows)
        for action in actions
    }


class RankClock:
    """Time and live graphs of one rank while it executes actions in order.

    `ff_reserve` is the memory of the largest FF graph. It stays reserved while FE graphs are made: otherwise they could
    fill the budget, and no FF, so no BE that frees one of them, would ever fit.

    Attributes: `free`, when the rank is done with all actions so far; `busy`, how long it worked; `fe_graphs`,
    `ff_graphs`, `memory`, alive now, and the `peak_` of each; `deferred_spans`, the (start, end) of deferred work.
    """

    def __init__(self, caps: Caps, ff_reserve: float = 0.0) -> None:
        self._max_fe = math.inf if caps.max_in_flight is None else caps.max_in_flight
        self._max_ff = math.inf if caps.max_ff_graphs is None else caps.max_ff_graphs
        self._budget = caps.memory_budget * (1 + ROUND_OFF)
        self._reserve = ff_reserve
        self._backlog: deque[tuple[float, Work]] = deque()
        self._fe_memory = self._ff_memory = 0.0
        self.free = self.busy = self.peak_memory = 0.0
        self.fe_graphs = self.ff_graphs = self.peak_fe_graphs = self.peak_ff_graphs = 0
        self.deferred_spans: list[tuple[float, float]] = []

    def delay_for_room(self, work: Work) -> float | None:
        """Return how much of the backlog must be done before the graphs of an FE or FF fit; None: more than all."""
        fe, ff = self.fe_graphs + work.fe_graphs, self.ff_graphs + work.ff_graphs
        fe_memory, ff_memory = self._fe_memory + work.fe_memory, self._ff_memory + work.ff_memory
        if self._fits(fe, ff, fe_memory, ff_memory):
            return 0.0
        delay = 0.0
        for remaining, blocker in self._backlog:
            delay += remaining
            fe, ff = fe + blocker.fe_graphs, ff + blocker.ff_graphs
            fe_memory, ff_memory = fe_memory + blocker.fe_memory, ff_memory + blocker.ff_memory
            if self._fits(fe, ff, fe_memory, ff_memory):
                return delay
        return None

    def _fits(self, fe: int, ff: int, fe_memory: float, ff_memory: float) -> bool:
        within_caps = fe <= self._max_fe and ff <= self._max_ff
        return within_caps and fe_memory + max(ff_memory, self._reserve) <= self._budget

    def run(self, work: Work, arrival: float) -> float:
        """Execute an action whose inputs are all there at `arrival`, and return when it starts.

        What does not fit its caps even without a backlog runs all the same; the peaks then tell.
        """
        makes_graphs = work.fe_graphs > 0 or work.ff_graphs > 0
        if self._backlog:
            delay = (self.delay_for_room(work) if makes_graphs else None) or 0.0
            self.work_off(max(delay, arrival - self.free))
        start = max(self.free, arrival)
        self.free = start + work.duration
        self.busy += work.duration
        if makes_graphs:
            self._count(work)
            self.peak_fe_graphs = max(self.peak_fe_graphs, self.fe_graphs)
            self.peak_ff_graphs = max(self.peak_ff_graphs, self.ff_graphs)
            self.peak_memory = max(self.peak_memory, self._fe_memory + self._ff_memory)
        elif work.deferred > 0:
            self._backlog.append((work.deferred, work))
            return start
        else:
            self._count(work)
        return start

    def work_off(self, time: float = math.inf) -> None:
        """Spend up to `time` on the backlog."""
        while self._backlog and time > 0:
            remaining, work = self._backlog[0]
            spent = min(remaining, time)
            if remaining - spent < ROUND_OFF * work.deferred:
                spent = remaining
            if self.deferred_spans and self.deferred_spans[-1][1] == self.free:
                self.deferred_spans[-1] = (self.deferred_spans[-1][0], self.free + spent)
            else:
                self.deferred_spans.append((self.free, self.free + spent))
            self.free += spent
            self.busy += spent
            time -= spent
            if spent < remaining:
                self._backlog[0] = (remaining - spent, work)
            else:
                self._backlog.popleft()
                self._count(work)

    def _count(self, work: Work) -> None:
        self.fe_graphs += work.fe_graphs
        self.ff_graphs += work.ff_graphs
        self._fe_memory += work.fe_memory
        self._ff_memory += work.ff_memory
