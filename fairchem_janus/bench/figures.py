"""What the records of `schedules.py` amount to: speedups, bubbles and phase times; pure."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from fairchem_janus.engine.timeline import Span
from fairchem_janus.schedule import (
    TRAINING_PHASES,
    Action,
    Caps,
    Costs,
    Phase,
    Schedule,
    make_schedule,
    simulate,
)
from fairchem_janus.schedule.dataflow import executable_order

BASELINES = ("1f1b_2nd", "1f1b_2nd_contiguous", "hanayo_2nd")
UNSPLIT = "unsplit"
EAGER = "auto_eager"
"""`auto` with the *eager* split, which is what the baselines' phases cost."""

PhaseTimes = dict[Phase, list[float]]
"""Seconds of each phase on each stage."""


@dataclass(slots=True)
class Step:
    """One step of one contestant on one rank.

    Attributes:
        seconds: from the barrier before it to the barrier after it, gradients reduced.
        cpu_seconds: of this rank's computing thread.
        spans: its actions.
        cpu_of: seconds of processor time of each action; waiting takes none.
    """

    seconds: float
    cpu_seconds: float
    spans: list[Span] = field(default_factory=list)
    cpu_of: dict[Action, float] = field(default_factory=dict)

    @property
    def busy(self) -> float:
        return sum(span.end - span.start for span in self.spans)


@dataclass(slots=True)
class RankRecord:
    """What one rank saw.

    Attributes:
        steps: contestant -> one `Step` a round.
        schedules: contestant -> its schedule.
        with_memory: split -> spans of one more step, in which the bytes that each phase leaves were noted.
    """

    steps: dict[str, list[Step]]
    schedules: dict[str, Schedule]
    with_memory: dict[str, list[Span]]


def figures(records: Sequence[RankRecord], *, deeper: Sequence[int] = (4, 8)) -> dict[str, Any]:
    """What the records of all ranks amount to; see `scripts/bench_schedules.py`.

    Args:
        deeper: numbers of stages to simulate with the measured times of one stage, mean over stages.
    """
    schedule = records[0].schedules["auto"]
    seconds = {name: [step.seconds for step in steps] for name, steps in records[0].steps.items()}
    spans = {name: _spans_by_round(records, name) for name in records[0].steps if name != UNSPLIT}
    measured, simulated, over_unsplit, over_unsplit_cpu = [], [], [], []
    for turn, found in enumerate(spans["auto"]):
        ranks = [record.steps["auto"][turn] for record in records]
        unsplit = [record.steps[UNSPLIT][turn] for record in records]
        elapsed = ranks[0].spans[-1].end - ranks[0].spans[0].start  # a step begins and ends on stage 0
        busy = sum(step.busy for step in ranks)
        measured.append(1 - busy / (len(ranks) * elapsed))
        costs = costs_of(phase_times(found), schedule.num_micro_batches)
        simulated.append(simulate(schedule, costs).bubble_ratio)
        over_unsplit.append(busy / statistics.fmean(step.seconds for step in unsplit))
        cpu = sum(step.cpu_seconds for step in ranks)
        over_unsplit_cpu.append(cpu / statistics.fmean(step.cpu_seconds for step in unsplit))

    def speedup(name: str, of: dict[str, list[float]] = seconds) -> float:
        return statistics.median(b / a for a, b in zip(of["auto"], of[name], strict=True))

    replayed = {name: _replayed(records, name) for name in spans}
    rounds = zip(*(record.steps["auto"] for record in records), strict=True)
    cpu_of_step = [sum(sum(step.cpu_of.values()) for step in steps) for steps in rounds]
    times = {split: _over_rounds(spans[name]) for split, name in (("merged", "auto"), ("eager", EAGER))}
    return {
        **{f"speedup_over_{name}": speedup(name) for name in BASELINES},
        "bubble_measured": statistics.median(measured),
        "bubble_simulated": statistics.median(simulated),
        "compute_over_unsplit": statistics.median(over_unsplit),
        "split": "merged",
        "schedule": schedule.to_csv(),
        "details": {
            "replayed": {
                **{f"speedup_over_{name}": speedup(name, replayed) for name in BASELINES},
                "bubble": statistics.median(
                    1 - cpu / (len(records) * step) for cpu, step in zip(cpu_of_step, replayed["auto"], strict=True)
                ),
                "compute_over_unsplit": statistics.median(over_unsplit_cpu),
            },
            "speedup_of_merged_over_eager": speedup(EAGER),
            "step_seconds": {name: statistics.median(values) for name, values in seconds.items()},
            "bubbles_measured": measured,
            "bubbles_simulated": simulated,
            "phase_seconds": {split: {str(p): values for p, values in found.items()} for split, found in times.items()},
            "bytes_left": {
                split: bytes_left([span for record in records for span in record.with_memory[split]]) for split in times
            },
            "simulated": {
                f"P={P}, N={N}": simulated_speedups(times, P, N)
                for P in (schedule.num_stages, *deeper)
                for N in (schedule.num_micro_batches, 3 * P)
            },
        },
    }


def _spans_by_round(records: Sequence[RankRecord], name: str) -> list[list[Span]]:
    rounds = zip(*(record.steps[name] for record in records), strict=True)
    return [[span for step in steps for span in step.spans] for steps in rounds]


def _over_rounds(rounds: Sequence[list[Span]]) -> PhaseTimes:
    return phase_times([span for spans in rounds for span in spans])


def _replayed(records: Sequence[RankRecord], name: str) -> list[float]:
    """Each round's step of a contestant, put together from its actions' processor time."""
    rounds = zip(*(record.steps[name] for record in records), strict=True)
    durations = [{action: cpu for step in steps for action, cpu in step.cpu_of.items()} for steps in rounds]
    return [replay(records[0].schedules[name], found) for found in durations]


def replay(schedule: Schedule, seconds: Mapping[Action, float]) -> float:
    """The time of a step whose actions take `seconds`, each as soon as its rank is free and its inputs are there.

    What is left of a measured step once messages and other processes are taken out of it.
    """
    ends: dict[Action, float] = {}
    free = [0.0] * len(schedule.rows)
    for row, action, needed in executable_order(schedule):
        ends[action] = free[row] = max([free[row], *(ends[a] for a in needed)]) + seconds[action]
    return max(free)


def simulated_speedups(times: dict[str, PhaseTimes], num_stages: int, num_micro_batches: int) -> dict[str, float]:
    """Makespans relative to `auto`'s, for stages that all cost the mean of the measured ones.

    The baselines have the phase times of the *eager* split, and recompute.

    Args:
        times: `merged` and `eager`.
    """
    costs = {
        split: costs_of({p: [statistics.fmean(values)] * num_stages for p, values in found.items()}, num_micro_batches)
        for split, found in times.items()
    }
    ours = simulate(auto(costs["merged"]), costs["merged"])
    result = {"bubble_auto": ours.bubble_ratio}
    for name in BASELINES:
        theirs = simulate(baseline(name, num_stages, num_micro_batches), costs["eager"])
        result[f"speedup_over_{name}"] = theirs.makespan / ours.makespan
    return result


def phase_times(spans: Sequence[Span]) -> PhaseTimes:
    """Median over micro-batches of each phase on each stage."""
    found: dict[tuple[Phase, int], list[float]] = defaultdict(list)
    for span in spans:
        found[span.action.phase, span.action.stage].append(span.end - span.start)
    stages = sorted({stage for _, stage in found})
    return {phase: [statistics.median(found[phase, stage]) for stage in stages] for phase in TRAINING_PHASES}


def bytes_left(spans: Sequence[Span]) -> dict[str, list[float]]:
    """Median over micro-batches of the bytes that each phase leaves on each stage (negative if it frees more)."""
    left = [Span(span.action, 0.0, float(span.left)) for span in spans]
    return {str(phase): values for phase, values in phase_times(left).items()}


def baseline(name: str, num_stages: int, num_micro_batches: int) -> Schedule:
    return make_schedule(name, num_stages=num_stages, num_micro_batches=num_micro_batches)


def auto(costs: Costs) -> Schedule:
    """What `janus.schedule: auto` plans when a job sets no caps: at most 2P micro-batches in flight, as in 1F1B."""
    caps = Caps(max_in_flight=2 * costs.num_stages)
    sizes = costs.num_stages, costs.num_micro_batches
    return make_schedule("auto", num_stages=sizes[0], num_micro_batches=sizes[1], costs=costs, caps=caps)


def costs_of(times: PhaseTimes, num_micro_batches: int) -> Costs:
    return Costs(num_stages=len(times[Phase.FE]), num_micro_batches=num_micro_batches, phase_times=dict(times))
