"""List scheduling: write the rows of a folded schedule action by action, as the clock runs.

Whenever a rank is free, it takes, of the actions whose inputs are there or on their way, the one with the smallest

    start + patience * T * priority,     priority = micro_batch_weight * micro_batch + lag[stage][phase]

and of equals the one with the smaller priority. T is the mean time of a micro-batch on a stage, so with patience 0 a
rank never waits while it could work, and with some it waits a little for something more urgent. With weight 1, a lag
says how many micro-batches behind the first one a phase works. Within a phase, micro-batches go in order.

The makespan is exactly what `simulate` finds for the rows that were written.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fairchem_janus.schedule.action import TRAINING_PHASES, Action, Phase, Schedule
from fairchem_janus.schedule.clock import NO_CAPS, ROUND_OFF, Caps, RankClock, Work, work_of
from fairchem_janus.schedule.costs import Costs

FE, FF, BF, BE = range(4)
"""Positions of the phases in `TRAINING_PHASES`: the inner loop counts instead of hashing."""

Rows = tuple[tuple[Action, ...], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Rules:
    """What list scheduling goes by."""

    lags: Sequence[Mapping[Phase, float]]
    """For each stage: the lag of each phase, in micro-batches."""
    micro_batch_weight: float = 1.0
    """How much a micro-batch's place in the step counts; 0: phases alone decide."""
    patience: float = 0.0
    """How long a rank waits for one unit of priority, as a share of T."""
    wave_size: int | None = None
    """k of WaveK: FF waits for all FE of its wave, FE for all FF of the wave before. None: no waves."""


class ListScheduler:
    """List scheduling of folded schedules for fixed costs and caps.

    Raises ValueError if the memory budget does not hold one micro-batch on every rank.
    """

    def __init__(self, costs: Costs, caps: Caps = NO_CAPS) -> None:
        self.costs = costs
        self.caps = caps
        stages, micro_batches = range(costs.num_stages), range(costs.num_micro_batches)
        self.works: list[list[list[Work]]] = [
            [[work_of(costs, Action(phase, s, m)) for m in micro_batches] for phase in TRAINING_PHASES] for s in stages
        ]
        self.transfer_times = [[costs.transfer_time(phase, m) for m in micro_batches] for phase in TRAINING_PHASES]
        self.totals = [sum(w.duration + w.deferred for row in works for w in row) for works in self.works]
        largest = max(costs.scales)
        self.reserves = [costs.ff_graph_sizes[s] * largest for s in stages]
        for stage in stages:
            need = costs.fe_graph_sizes[stage] * largest + self.reserves[stage]
            if need > caps.memory_budget * (1 + ROUND_OFF):
                raise ValueError(
                    f"stage {stage} needs {need:g} for the graphs of the largest micro-batch, above the memory budget "
                    f"of {caps.memory_budget:g}: make micro-batches smaller or use more stages"
                )

    def write(self, rules: Rules, give_up_above: float = math.inf) -> tuple[Rows, float] | None:
        """Return the rows that the rules give and their makespan, or None once that must exceed `give_up_above`."""
        num_micro_batches = self.costs.num_micro_batches
        board = _Board(self)
        lags = [[lag[phase] for phase in TRAINING_PHASES] for lag in rules.lags]
        patience = rules.patience * sum(self.totals) / (self.costs.num_stages * num_micro_batches)
        rows: list[list[Action]] = [[] for _ in lags]

        def choose(stage: int) -> tuple[float, int, int]:
            """Return (start, stage, phase) of what the rank would do next; the start is infinite if nothing."""
            best_key, best = (math.inf, math.inf), (math.inf, stage, 0)
            for phase in range(len(TRAINING_PHASES)):
                if _wave_allows(rules.wave_size, phase, board.issued[stage], num_micro_batches):
                    start = board.start(stage, phase)
                    priority = rules.micro_batch_weight * board.issued[stage][phase] + lags[stage][phase]
                    key = (start + patience * priority, priority)
                    if start < math.inf and key < best_key:
                        best_key, best = key, (start, stage, phase)
            return best

        upcoming = [choose(stage) for stage in range(len(rows))]
        for _ in range(len(TRAINING_PHASES) * len(rows) * num_micro_batches):
            _, stage, phase = min(upcoming)
            rows[stage].append(Action(TRAINING_PHASES[phase], stage, board.issued[stage][phase]))
            changed = board.issue(stage, phase)
            if board.earliest_end(stage) > give_up_above:
                return None
            for affected in changed:
                upcoming[affected] = choose(affected)
        return tuple(map(tuple, rows)), board.end()

    def replay(self, schedule: Schedule, give_up_above: float = math.inf) -> float | None:
        """Return the makespan of a folded schedule with micro-batches in order, None if it exceeds `give_up_above`.

        None also if it does not keep within the caps. Much faster than `simulate`, and says less.
        """
        board = _Board(self)
        lists = [[TRAINING_PHASES.index(action.phase) for action in reversed(row)] for row in schedule.rows]
        pending = list(range(len(lists)))
        while pending:
            stage = pending.pop()
            while lists[stage] and board.start(stage, lists[stage][-1]) < math.inf:
                changed = board.issue(stage, lists[stage].pop())
                if board.earliest_end(stage) > give_up_above:
                    return None
                pending.extend(changed[1:])
        return None if any(lists) else board.end()


class _Board:
    """How far the step has come while its rows are written; `phase` counts in `TRAINING_PHASES`."""

    def __init__(self, scheduler: ListScheduler) -> None:
        self._scheduler = scheduler
        costs = scheduler.costs
        self._num_stages, self._num_micro_batches = costs.num_stages, costs.num_micro_batches
        self._clocks = [RankClock(scheduler.caps, reserve) for reserve in scheduler.reserves]
        self._link_free = [[0.0, 0.0] for _ in self._clocks]
        # [stage][phase][micro_batch]: when the message that an action needs from the neighbouring rank is there
        self._arrival = [[[math.inf] * self._num_micro_batches for _ in TRAINING_PHASES] for _ in self._clocks]
        for stage, phase in ((0, FE), (-1, FF), (0, BF), (-1, BE)):
            self._arrival[stage][phase] = [0.0] * self._num_micro_batches
        self.issued = [[0] * len(TRAINING_PHASES) for _ in self._clocks]

    def start(self, stage: int, phase: int) -> float:
        """Return when the next action of a phase could start on a rank; infinite while that is not known."""
        issued = self.issued[stage]
        m = issued[phase]
        if m == self._num_micro_batches or (phase > 0 and issued[phase - 1] <= m):
            return math.inf
        clock = self._clocks[stage]
        start = max(clock.free, self._arrival[stage][phase][m])
        if phase > FF or start == math.inf:
            return start
        delay = clock.delay_for_room(self._scheduler.works[stage][phase][m])
        return math.inf if delay is None else max(start, clock.free + delay)

    def issue(self, stage: int, phase: int) -> tuple[int, ...]:
        """Run the next action of a phase; return the stages for which `start` may have changed, `stage` first."""
        clock, m = self._clocks[stage], self.issued[stage][phase]
        clock.run(self._scheduler.works[stage][phase][m], self._arrival[stage][phase][m])
        self.issued[stage][phase] += 1
        upward = phase in (FF, BE)
        neighbour = stage - 1 if upward else stage + 1
        if not 0 <= neighbour < self._num_stages:
            return (stage,)
        sent = max(clock.free, self._link_free[stage][upward]) + self._scheduler.transfer_times[phase][m]
        self._link_free[stage][upward] = sent
        self._arrival[neighbour][phase][m] = sent + self._scheduler.costs.link_latency
        return (stage, neighbour)

    def earliest_end(self, stage: int) -> float:
        """Return when a rank would be done if it never waited again."""
        clock = self._clocks[stage]
        return clock.free - clock.busy + self._scheduler.totals[stage]

    def end(self) -> float:
        """Do what is left of the deferred work and return the makespan."""
        for clock in self._clocks:
            clock.work_off()
        return max(clock.free for clock in self._clocks)


def _wave_allows(wave_size: int | None, phase: int, issued: list[int], num_micro_batches: int) -> bool:
    """Whether the waves let a rank that has issued so many actions of each phase issue the next one of `phase`."""
    if wave_size is None or phase > FF:
        return True
    first_of_wave = issued[phase] // wave_size * wave_size
    if phase == FE:
        return issued[FF] >= first_of_wave
    return issued[FE] >= min(first_of_wave + wave_size, num_micro_batches)
