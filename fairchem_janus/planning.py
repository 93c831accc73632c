"""From a job's settings and its measured profile to the schedule that it should run; no communication, no torch calls.

What `janus.schedule: auto` and `janus.wave_size: auto` choose, and what `fairchem-janus plan` shows, come from here.
"""

from __future__ import annotations

import statistics
from contextlib import suppress
from dataclasses import dataclass, replace

from fairchem_janus.config import JanusConfig
from fairchem_janus.engine.profile import Profile
from fairchem_janus.schedule import (
    FAMILIES,
    NO_CAPS,
    Caps,
    Costs,
    Schedule,
    ScheduleError,
    Simulation,
    auto,
    make_schedule,
    simulate,
    wave_sizes,
)

GIB = 2.0**30

CLEARLY = 0.05
"""Share of its time that a wave size must save over the simulator's favourite to be taken instead."""

TRIAL_STEPS = 5
"""Steps that each candidate for k runs."""

MAX_CANDIDATES = 4
"""Candidates for k that are tried: those of the smallest simulated step times."""

FEW_TRIALS = 50
"""Of the search for a schedule to start with, whose phase times are not known yet."""


def caps_of(config: JanusConfig, profile: Profile | None = None) -> Caps:
    """The caps that a job's schedule keeps within; the memory budget is left out without a profile.

    Raises:
        ValueError: the memory budget does not hold one micro-batch.
    """
    max_in_flight = config.max_in_flight
    if max_in_flight is None and config.chooses and config.memory_budget_gib is None:
        max_in_flight = 2 * config.pipeline_size if config.pipeline_size > 1 else 1  # alone, waiting for nobody
    caps = Caps(max_in_flight=max_in_flight, max_ff_graphs=config.max_ff_graphs)
    if profile is None or config.memory_budget_gib is None:
        return caps
    taken = max(stage.state_bytes + stage.workspace_bytes for stage in profile.stages)
    graphs = max(stage.fe_graph_bytes + stage.ff_graph_bytes for stage in profile.stages)
    room = config.memory_budget_gib * GIB - taken
    if room < graphs or room <= 0:
        raise ValueError(
            f"janus.memory_budget_gib={config.memory_budget_gib:g} is too small: parameters, gradients, optimizer "
            f"state and moving average take up to {taken / GIB:.3g} GiB of a rank and the graphs of one micro-batch up "
            f"to {graphs / GIB:.3g} GiB. Set it to at least {(taken + graphs) / GIB:.3g}, make micro-batches smaller "
            "(max_atoms), or use more stages (janus.pipeline_size)"
        )
    return replace(caps, memory_budget=room)


def starting_schedule(config: JanusConfig) -> Schedule:
    """The schedule that a job starts with: its own, or `wavek` until one is chosen, within the caps.

    Raises:
        ValueError: the schedule cannot be made; for a CSV file the text names file, row and column.
    """
    assert config.num_micro_batches is not None
    if config.chooses:
        return _wavek(config, config.num_micro_batches)
    try:
        return _named(config, config.num_micro_batches)
    except FileNotFoundError as error:
        raise ValueError(f"janus.schedule={config.schedule}: there is no such file") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"janus.schedule={config.schedule}: {error}") from error


def larger_schedule(config: JanusConfig, num_micro_batches: int, wave_size: int | None) -> Schedule:
    """For a step with more micro-batches than `num_micro_batches`, which a packing under a budget may need.

    A named schedule is made for as many; a plan and a CSV file are for a fixed number, so `wavek` stands in, as it does
    for a named schedule that would exceed the caps.

    Args:
        wave_size: k, if one was chosen.
    """
    if config.schedule in FAMILIES and not config.chooses:
        with suppress(ScheduleError):
            return _named(config, num_micro_batches)
    return _wavek(config, num_micro_batches, wave_size)


def _named(config: JanusConfig, num_micro_batches: int) -> Schedule:
    assert isinstance(config.wave_size, int)
    return make_schedule(
        config.schedule,
        num_stages=config.pipeline_size,
        num_micro_batches=num_micro_batches,
        wave_size=config.wave_size,
        caps=caps_of(config),
    )


def _wavek(config: JanusConfig, num_micro_batches: int, wave_size: int | None = None) -> Schedule:
    """`wavek` for typical phase times; where its smallest wave exceeds the caps, a list that does not."""
    caps = caps_of(config)
    if wave_size is None:
        # what fits a memory budget is not known yet, so it starts with as little in flight as there can be
        limits = [cap // 2 for cap in (caps.max_in_flight, caps.max_ff_graphs) if cap is not None]
        wave_size = 1 if config.memory_budget_gib is not None else max(1, min([config.pipeline_size, *limits]))
    P, N = config.pipeline_size, num_micro_batches
    try:
        return make_schedule("wavek", num_stages=P, num_micro_batches=N, wave_size=wave_size, caps=caps)
    except ScheduleError:
        return auto(Costs(num_stages=P, num_micro_batches=N), caps, num_trials=FEW_TRIALS)


def planned_schedule(config: JanusConfig, profile: Profile) -> Schedule:
    """What `schedule: auto` runs from here on. Raises ValueError as `caps_of` does."""
    assert config.num_micro_batches is not None
    return auto(profile.costs(config.num_micro_batches), caps_of(config, profile))


def wave_candidates(config: JanusConfig, profile: Profile) -> dict[int, Schedule]:
    """Sizes that `wave_size: auto` tries, with their schedules, the one of the smallest simulated step time first.

    Raises:
        ValueError: no wave keeps within the caps.
    """
    assert config.num_micro_batches is not None
    costs, caps = profile.costs(config.num_micro_batches), caps_of(config, profile)
    found: dict[tuple, tuple[float, int, Schedule]] = {}
    for wave_size in wave_sizes(config.num_micro_batches):
        rival = _rival(f"wavek k={wave_size}", "wavek", costs, caps, wave_size)
        if rival is not None and rival.fits:
            found.setdefault(rival.schedule.rows, (rival.simulation.makespan, wave_size, rival.schedule))
    if not found:
        raise ValueError(
            f"no wave size keeps within {_describe(caps)}: raise janus.max_in_flight, janus.max_ff_graphs or "
            "janus.memory_budget_gib, or use janus.schedule=auto, which needs less in flight"
        )
    best = sorted(found.values(), key=lambda item: item[:2])[:MAX_CANDIDATES]
    return {wave_size: schedule for _, wave_size, schedule in best}


@dataclass(frozen=True, slots=True)
class Rival:
    """A schedule that a job could run, on the job's costs. `fits`: within the caps."""

    label: str
    schedule: Schedule
    simulation: Simulation
    fits: bool


def rivals(costs: Costs, caps: Caps) -> list[Rival]:
    """All families on the same costs, the fastest first; of `wavek` the best k within the caps, and k = P."""
    names = {name: name for name in FAMILIES if name != "wavek"}
    found = [_rival(label, name, costs, caps) for label, name in names.items()]
    waves = [_rival(f"wavek k={k}", "wavek", costs, caps, k) for k in wave_sizes(costs.num_micro_batches)]
    within = [wave for wave in waves if wave is not None and wave.fits]
    if within:
        found.append(min(within, key=lambda wave: wave.simulation.makespan))
    default = f"wavek k={costs.num_stages}"
    found += [wave for wave in waves if wave is not None and wave.label == default and wave not in found]
    return sorted((r for r in found if r is not None), key=lambda rival: (not rival.fits, rival.simulation.makespan))


def _rival(label: str, name: str, costs: Costs, caps: Caps, wave_size: int | None = None) -> Rival | None:
    """A family on these costs; None if it cannot be made within the caps at all (`auto`)."""
    try:
        schedule = make_schedule(
            name,
            num_stages=costs.num_stages,
            num_micro_batches=costs.num_micro_batches,
            wave_size=wave_size,
            costs=costs,
            caps=caps if name == "auto" else NO_CAPS,
        )
    except ValueError:
        return None
    simulation = simulate(schedule, costs, caps)
    fits = (
        (caps.max_in_flight is None or max(simulation.peak_in_flight) <= caps.max_in_flight)
        and (caps.max_ff_graphs is None or max(simulation.peak_ff_graphs) <= caps.max_ff_graphs)
        and max(simulation.peak_memory) <= caps.memory_budget
    )
    return Rival(label, schedule, simulation, fits)


def _describe(caps: Caps) -> str:
    parts = []
    if caps.max_in_flight is not None:
        parts.append(f"{caps.max_in_flight} in flight")
    if caps.max_ff_graphs is not None:
        parts.append(f"{caps.max_ff_graphs} FF graphs")
    if caps.memory_budget != float("inf"):
        parts.append(f"{caps.memory_budget / GIB:.3g} GiB of graphs")
    return ", ".join(parts) or "no cap"


class WaveTrials:
    """Candidates for k in turn, some steps each; the one of the smallest median wins.

    The simulator's favourite comes first, and stays unless another takes `CLEARLY` less time: a few steps of different
    graphs tell no smaller difference.

    Attributes:
        candidates: k with its schedule.
        times: k with what its steps took, per atom.
    """

    def __init__(self, candidates: dict[int, Schedule], num_steps: int = TRIAL_STEPS) -> None:
        self.candidates = candidates
        self.num_steps = num_steps
        self.times: dict[int, list[float]] = {wave_size: [] for wave_size in candidates}

    @property
    def current(self) -> int:
        """The k to run next; once all have run, the best."""
        for wave_size, times in self.times.items():
            if len(times) < self.num_steps:
                return wave_size
        medians = {wave_size: statistics.median(times) for wave_size, times in self.times.items()}
        first, best = next(iter(medians)), min(medians, key=medians.__getitem__)
        return best if medians[best] < (1 - CLEARLY) * medians[first] else first

    @property
    def done(self) -> bool:
        return all(len(times) >= self.num_steps for times in self.times.values())

    def note(self, seconds_per_atom: float) -> None:
        """What a step with `current` took."""
        self.times[self.current].append(seconds_per_atom)
