"""WaveK: micro-batches enter the pipeline k at a time, and consecutive waves overlap."""

from __future__ import annotations

import math

from fairchem_janus.schedule.action import Phase, Schedule
from fairchem_janus.schedule.clock import Caps
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.greedy import ListScheduler, Rules

PREFERENCES = (
    (Phase.FE, Phase.BF, Phase.FF, Phase.BE),
    (Phase.FE, Phase.FF, Phase.BE, Phase.BF),
)
"""Orders in which a stage picks from what is ready. The first, downward phases first, feeds the stages below and suits
large waves; the second fills the pipeline sooner and frees micro-batches sooner, which suits small ones. Of all 24
orders, one of the two was the best in each of 12 cases tried (P = 2, 4, 8; N = 8, 12, 32; k from P to N)."""


def wavek(*, num_stages: int, num_micro_batches: int, wave_size: int | None = None) -> Schedule:
    """Return the WaveK schedule with waves of `wave_size` micro-batches (k, default P; the last wave may be short).

    The rule, for each stage:

    1. all FE of a wave are issued before its first FF;
    2. FE of the next wave may start when all FF of the current one are issued, so that they fill the time in which
       the current wave's BF and BE wait for other stages; at most 2k micro-batches are in flight;
    3. BF and BE of a micro-batch may start as soon as their inputs are there;
    4. of what is ready, the stage picks by phase, in the better of two fixed orders (`PREFERENCES`); within a phase
       micro-batches go in order.

    What is ready when, and which order is better, follow from the typical phase times 1 : 1.9 : 3.6 : 2.6, so the
    schedule depends on P, N and k alone. For P = 2, N = 4, k = 2 (`|`: from here FE of the second wave may start)::

        FE0 FE1 FF0 FF1 | FE2 FE3 BF0 FF2 FF3 BF1 BF2 BE0 BF3 BE1 BE2 BE3
        FE0 FE1 FF0 FF1 | FE2 FE3 FF2 FF3 BF0 BE0 BF1 BE1 BF2 BE2 BF3 BE3

    With k >= N there is a single wave. Raises ValueError if `wave_size` is below 1.
    """
    wave_size = num_stages if wave_size is None else wave_size
    if wave_size < 1:
        raise ValueError(f"wave_size must be at least 1, got {wave_size}")
    scheduler = ListScheduler(
        Costs(num_stages=num_stages, num_micro_batches=num_micro_batches), Caps(max_in_flight=2 * wave_size)
    )
    best, shortest = None, math.inf
    for preference in PREFERENCES:
        lags = [{phase: float(preference.index(phase)) for phase in preference}] * num_stages
        rules = Rules(lags=lags, micro_batch_weight=0.0, wave_size=wave_size)
        written = scheduler.write(rules, give_up_above=shortest)
        if written is not None and written[1] < shortest:
            best, shortest = written
    assert best is not None, "the first order is never given up"
    return Schedule(num_stages, num_micro_batches, best, "wavek")
