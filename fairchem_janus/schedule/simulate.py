"""When each action of a schedule runs, how long the step takes, and what stays idle or in memory.

>>> from fairchem_janus.schedule import Costs, make_schedule, simulate
>>> schedule = make_schedule("gpipe_2nd", num_stages=4, num_micro_batches=12)
>>> result = simulate(schedule, Costs(num_stages=4, num_micro_batches=12))
>>> f"{result.makespan:.1f} {result.bubble_ratio:.3f}"
'136.5 0.200'

Model: a rank executes its list in order, one action at a time, each as soon as the rank is free and its inputs are
there. Sending costs no computing time; each directed link sends one message after another, in the order in which they
were produced.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from fairchem_janus.schedule.action import Action, Schedule
from fairchem_janus.schedule.bound import lower_bound
from fairchem_janus.schedule.clock import NO_CAPS, Caps, RankClock, works_of
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.dataflow import executable_order, messages
from fairchem_janus.schedule.validate import validate


@dataclass(frozen=True, kw_only=True, slots=True)
class Simulation:
    """The outcome of `simulate`; tuples have one entry per rank, times and sizes are in the units of the costs."""

    makespan: float
    """Time from the first action's start to the last one's end, deferred work included."""
    bubble_ratio: float
    """Share of the ranks' time that is lost: 1 - useful work / (P * makespan). Recomputing FE is not useful work."""
    lower_bound: float
    """A makespan that no order of the same actions can beat."""
    bubble_lower_bound: float
    """The bubble ratio at `lower_bound`."""
    busy: tuple[float, ...]
    """Time that each rank computes."""
    peak_in_flight: tuple[int, ...]
    """Most FE graphs alive at once."""
    peak_ff_graphs: tuple[int, ...]
    """Most FF graphs alive at once."""
    peak_memory: tuple[float, ...]
    """Most memory in live graphs at once."""
    spans: dict[Action, tuple[float, float]]
    """Start and end of each action, without its deferred part."""
    deferred_spans: tuple[tuple[tuple[float, float], ...], ...]
    """Start and end of each stretch of deferred work."""
    critical_path: tuple[Action, ...]
    """Actions that follow each other without slack to the end of the step: speeding up none of them gains nothing."""


def simulate(schedule: Schedule, costs: Costs, caps: Caps = NO_CAPS) -> Simulation:
    """Run a schedule against costs. `caps` matter for deferred work alone: it is done early where it blocks a graph.

    Raises ValueError if the costs are for other numbers of stages or micro-batches, ScheduleError if the schedule
    cannot run.
    """
    if (costs.num_stages, costs.num_micro_batches) != (schedule.num_stages, schedule.num_micro_batches):
        raise ValueError(
            f"costs are for {costs.num_stages} stages and {costs.num_micro_batches} micro-batches, the schedule "
            f"{schedule.name!r} has {schedule.num_stages} and {schedule.num_micro_batches}"
        )
    validate(schedule)
    clocks, spans, causes = _execute(schedule, costs, caps)
    for clock in clocks:
        clock.work_off()
    makespan = max(clock.free for clock in clocks)
    useful = sum(costs.time(a.phase, a.stage, a.micro_batch) for a in spans)
    bound = lower_bound(schedule, costs)
    ranks = len(schedule.rows)
    return Simulation(
        makespan=makespan,
        bubble_ratio=max(0.0, 1 - useful / (ranks * makespan)) if makespan else 0.0,
        lower_bound=bound,
        bubble_lower_bound=max(0.0, 1 - useful / (ranks * bound)) if bound else 0.0,
        busy=tuple(clock.busy for clock in clocks),
        peak_in_flight=tuple(clock.peak_fe_graphs for clock in clocks),
        peak_ff_graphs=tuple(clock.peak_ff_graphs for clock in clocks),
        peak_memory=tuple(clock.peak_memory for clock in clocks),
        spans=spans,
        deferred_spans=tuple(tuple(clock.deferred_spans) for clock in clocks),
        critical_path=_critical_path(schedule, clocks, causes),
    )


def _execute(
    schedule: Schedule, costs: Costs, caps: Caps
) -> tuple[list[RankClock], dict[Action, tuple[float, float]], dict[Action, Action | None]]:
    """Run every rank's list; return the clocks, each action's span, and the action that each one had to wait for."""
    works = works_of(schedule, costs)
    consumers: dict[Action, list[tuple[tuple[int, int], Action]]] = defaultdict(list)
    for link, sent in messages(schedule).items():
        for message in sent:
            consumers[message.producer].append((link, message.consumer))
    reserve = max(costs.ff_graph_sizes) * max(costs.scales)
    clocks = [RankClock(caps, reserve) for _ in schedule.rows]
    link_free: dict[tuple[int, int], float] = defaultdict(float)
    arrivals: dict[tuple[Action, Action], float] = {}
    spans: dict[Action, tuple[float, float]] = {}
    causes: dict[Action, Action | None] = {}
    previous: dict[int, Action] = {}
    for row, action, needed in executable_order(schedule):
        arrived = [(arrivals.get((a, action), spans[a][1]), a) for a in needed]
        arrival, awaited = max(arrived, key=lambda pair: pair[0], default=(0.0, None))
        start = clocks[row].run(works[action], arrival)
        spans[action] = (start, clocks[row].free)
        causes[action] = awaited if start == arrival and awaited is not None else previous.get(row)
        previous[row] = action
        for link, consumer in consumers[action]:
            sending = max(clocks[row].free, link_free[link])
            link_free[link] = sending + costs.transfer_time(action.phase, action.micro_batch)
            arrivals[action, consumer] = link_free[link] + costs.link_latency
    return clocks, spans, causes


def _critical_path(
    schedule: Schedule, clocks: list[RankClock], causes: dict[Action, Action | None]
) -> tuple[Action, ...]:
    """Follow the causes back from the last action of the rank that ends last."""
    ends = [(clock.free, actions[-1]) for clock, actions in zip(clocks, schedule.rows, strict=True) if actions]
    path = [max(ends, key=lambda pair: pair[0])[1]] if ends else []
    while path and (cause := causes[path[-1]]) is not None:
        path.append(cause)
    return tuple(reversed(path))
