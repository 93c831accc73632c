"""GPipe for four phases, and the schedule of an evaluation step."""

from __future__ import annotations

from fairchem_janus.schedule.action import TRAINING_PHASES, Action, Phase, Schedule


def gpipe_2nd(*, num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the GPipe-2nd schedule: all FE, then all FF, all BF, all BE, micro-batches in order.

    Every row is the same list. For P = 2, N = 3::

        FE0 FE1 FE2 FF0 FF1 FF2 BF0 BF1 BF2 BE0 BE1 BE2
        FE0 FE1 FE2 FF0 FF1 FF2 BF0 BF1 BF2 BE0 BE1 BE2

    Each phase drains the pipeline on its own, so a step takes (N + P - 1)*T with T = tFE + tFF + tBF + tBE, and all N
    micro-batches are in flight. It needs nothing but N >= 1, and is the yardstick for the other families.
    """
    rows = tuple(
        tuple(Action(phase, stage, m) for phase in TRAINING_PHASES for m in range(num_micro_batches))
        for stage in range(num_stages)
    )
    return Schedule(num_stages, num_micro_batches, rows, "gpipe_2nd")


def evaluation_schedule(num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the schedule of an evaluation step: FE and FF only, each micro-batch's FF as early as it can be.

    The last stage runs FF of a micro-batch right after its FE; a stage d steps above it runs 2d more FE first, which
    is how long the first FF takes to arrive when FE and FF cost the same. So stage s holds at most 2*(P-1-s) + 1
    micro-batches, whatever N. For P = 2, N = 4::

        FE0 FE1 FE2 FF0 FE3 FF1 FF2 FF3
        FE0 FF0 FE1 FF1 FE2 FF2 FE3 FF3
    """
    rows = []
    for stage in range(num_stages):
        ahead = 2 * (num_stages - 1 - stage)
        row = []
        for step in range(num_micro_batches + ahead):
            if step < num_micro_batches:
                row.append(Action(Phase.FE, stage, step))
            if step >= ahead:
                row.append(Action(Phase.FF, stage, step - ahead))
        rows.append(tuple(row))
    return Schedule(num_stages, num_micro_batches, tuple(rows), "evaluation")
