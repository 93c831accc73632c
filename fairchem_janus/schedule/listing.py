"""`auto`: the shortest schedule that a seeded search over list scheduling finds for given costs and caps.

A micro-batch passes 4*P stations: FE down, FF up, BF down, BE up. In an even flow each of them works a fixed number of
micro-batches behind the first; these lags are the priorities of list scheduling (`greedy.py`). They grow along the
chain, evenly within a phase and by a jump where it turns, so seven steps give them all, here 2, 4, 6, 8 for the phases
and 1 for each turn (P = 3)::

              FE       FF       BF       BE
    stage 0    0        7  -1->  8       23
               |        ^        |        ^
    stage 1    1        5       11       19
               v        |        v        |
    stage 2    2  -1->  3       14  -1-> 15

The last one is about the number of micro-batches in flight. List scheduling shows anomalies, a looser cap can make a
schedule longer, hence a search: random steps first, then variations of the best. The named families compete on the
same costs, so `auto` is never worse than the best of them within the caps.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace

from fairchem_janus.schedule.action import Phase, Schedule
from fairchem_janus.schedule.bound import lower_bound
from fairchem_janus.schedule.clock import NO_CAPS, Caps
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.gpipe import gpipe_2nd
from fairchem_janus.schedule.greedy import ListScheduler, Rules
from fairchem_janus.schedule.wavek import wavek

SEARCHED_ACTIONS = 200_000
"""How many actions the search lists in all, so that it takes 1 to 2 s whatever P and N (P = 8, N = 64: 97 trials)."""

RANDOM_SHARE = 0.3
"""Share of the trials that draw all numbers anew; the others vary the best."""

PATIENCES = (0.0, 0.01, 0.03, 0.1)
"""What `Rules.patience` is drawn from. Waiting pays a little or not at all."""

VARIATION = 0.3
"""Standard deviation of the logarithm of a variation."""

SAME = 1e-9
"""Relative difference up to which two makespans count as equal."""


def auto(costs: Costs, caps: Caps = NO_CAPS, *, seed: int = 0, num_trials: int | None = None) -> Schedule:
    """Return the folded schedule of the smallest makespan found, named `auto`; it keeps within `caps` on every rank.

    `num_trials` is how many sets of rules the search tries (default: what `SEARCHED_ACTIONS` allows, at least 50). The
    same arguments give the same schedule. Raises ValueError if one micro-batch exceeds the memory budget, and for less
    than one trial.
    """
    scheduler = ListScheduler(costs, caps)
    rng = random.Random(seed)
    schedule = replace(gpipe_2nd(num_stages=costs.num_stages, num_micro_batches=costs.num_micro_batches), name="auto")
    floor = lower_bound(schedule, costs)
    steps, patience, shortest = _random_steps(rng, costs, caps), 0.0, math.inf
    if num_trials is None:
        num_trials = max(50, SEARCHED_ACTIONS // sum(map(len, schedule.rows)))
    if num_trials < 1:
        raise ValueError(f"num_trials must be at least 1, got {num_trials}")
    for trial in range(num_trials):
        if trial < RANDOM_SHARE * num_trials:
            new_steps, new_patience = _random_steps(rng, costs, caps), rng.choice(PATIENCES)
        else:
            new_steps = [step * math.exp(rng.gauss(0.0, VARIATION)) for step in steps]
            new_patience = patience * math.exp(rng.gauss(0.0, VARIATION))
        rules = Rules(lags=chain_lags(new_steps, costs.num_stages), patience=new_patience)
        # An equal makespan is taken too: it lets the search cross plateaus.
        written = scheduler.write(rules, give_up_above=shortest * (1 + SAME))
        if written is not None:
            steps, patience = new_steps, new_patience
            if written[1] < shortest * (1 - SAME):
                schedule, shortest = replace(schedule, rows=written[0]), written[1]
            if shortest <= floor * (1 + SAME):
                return schedule
    for rival in _named_families(costs, caps):
        makespan = scheduler.replay(rival, give_up_above=shortest)
        if makespan is not None and makespan < shortest * (1 - SAME):
            schedule, shortest = replace(rival, name="auto"), makespan
    return schedule


def chain_lags(steps: Sequence[float], num_stages: int) -> list[dict[Phase, float]]:
    """Return the lag of each phase on each stage.

    `steps` are the lags gained on the way through all stages in FE, FF, BF, BE, then in the turns FE-FF on the last
    stage, FF-BF on stage 0 and BF-BE on the last stage.
    """
    fe, ff, bf, be, turn_ff, turn_bf, turn_be = steps
    lags = []
    for stage in range(num_stages):
        down = stage / max(num_stages - 1, 1)
        up = 1 - down
        lag_ff = fe + turn_ff + up * ff
        lag_bf = fe + turn_ff + ff + turn_bf + down * bf
        lag_be = fe + turn_ff + ff + turn_bf + bf + turn_be + up * be
        lags.append({Phase.FE: down * fe, Phase.FF: lag_ff, Phase.BF: lag_bf, Phase.BE: lag_be})
    return lags


def _random_steps(rng: random.Random, costs: Costs, caps: Caps) -> list[float]:
    """Draw seven steps whose sum is of the order of the micro-batches in flight: as many as the cap, but at most 3*P.

    More than that is hardly ever of use, and costs memory.
    """
    steps = [rng.expovariate(1.0) for _ in range(7)]
    in_flight = min(caps.max_in_flight or math.inf, costs.num_micro_batches, 3 * costs.num_stages)
    total = rng.uniform(0.3, 1.5) * in_flight
    return [step * total / sum(steps) for step in steps]


def _named_families(costs: Costs, caps: Caps) -> Iterator[Schedule]:
    """Yield the named folded schedules that may keep within the caps: a wave of k has k micro-batches in flight."""
    sizes = {"num_stages": costs.num_stages, "num_micro_batches": costs.num_micro_batches}
    yield gpipe_2nd(**sizes)
    largest_wave = min(caps.max_in_flight or costs.num_micro_batches, costs.num_micro_batches)
    for wave_size in wave_sizes(largest_wave):
        yield wavek(**sizes, wave_size=wave_size)


def wave_sizes(largest: int) -> list[int]:
    """Return the wave sizes worth trying up to `largest`: all up to 32, every second one up to 64, and so on."""
    return sorted({k for k in range(1, largest + 1) if k % math.ceil(k / 32) == 0} | {largest})
