"""The schedules that the four-phase pipeline is compared with: first-order schedules, stretched to second order.

A first-order pipeline knows forward and backward. Taken as such, the force model is a chain of 2P chunks, and the
backward of a chunk is the phase that differentiates it::

    chunk c      0     1    ..  P-1    P       ..  2P-1
    forward     FE_0  FE_1  .. FE_P-1  FF_P-1  ..  FF_0
    backward    BE_0  BE_1  .. BE_P-1  BF_P-1  ..  BF_0

FF as a chunk of its own does not find the graph that FE built, so it first recomputes FE, and its rank holds those
parameters a second time. Three placements of the chunks on P ranks (P = 4):

    contiguous   FE0 FE1 | FE2 FE3 | FF3 FF2 | FF1 FF0     plain 1F1B; ranks with FF have far more to do
    looped       FE0 FF3 | FE1 FF2 | FE2 FF1 | FE3 FF0     interleaved 1F1B; balanced, and the stronger of the two
    wave         FE0 FF0 | FE1 FF1 | FE2 FF2 | FE3 FF3     Hanayo with one wave (W = 1)

In all three, a rank runs a backward if one is ready, else the forward of the deepest chunk that is, and a chunk never
has more forwards without their backward than 1F1B lets it: as many as there are chunks from it to the end of the chain
(contiguous: ranks). What is ready when follows from the typical phase times, the recomputation included.
"""

from __future__ import annotations

from collections.abc import Callable

from fairchem_janus.schedule.action import Action, Phase, Schedule
from fairchem_janus.schedule.clock import work_of
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.dataflow import dependencies


def one_f_one_b_2nd(*, num_stages: int, num_micro_batches: int, contiguous: bool = False) -> Schedule:
    """Return the 1F1B-2nd schedule, chunks looped over the ranks or, with `contiguous`, two neighbours on each rank.

    Looped, P = 2, N = 2 (`@`: the stage, where it is not the row's)::

        FE0 FE1 FF0@1 FF1@1 BF0@1 BF1@1 BE0 BE1
        FE0 FE1 FF0@0 BF0@0 FF1@0 BF1@0 BE0 BE1

    At P = 4, N = 12 and typical times it has a bubble of 31.7 % (recomputing is not useful work), contiguous 40.5 %;
    the latter would be 30.6 % if recomputing cost nothing.
    """
    if contiguous:
        name, place, limit = "1f1b_2nd_contiguous", lambda c: c // 2, lambda c: num_stages - c // 2
    else:
        name, place, limit = "1f1b_2nd", lambda c: c % num_stages, lambda c: 2 * num_stages - c
    return _backward_first(num_stages, num_micro_batches, place, limit, name)


def hanayo_2nd(*, num_stages: int, num_micro_batches: int) -> Schedule:
    """Return the Hanayo-2nd schedule with one wave: the chain runs down the ranks and back up.

    FE and FF of a stage meet on one rank, but as two chunks: `Schedule.recompute` is set. P = 2, N = 2::

        FE0 FE1 FF0 BF0 FF1 BF1 BE0 BE1
        FE0 FF0 FE1 FF1 BF0 BE0 BF1 BE1

    At P = 4, N = 12 and typical times it has a bubble of 25.4 %.
    """

    def place(chunk: int) -> int:
        return min(chunk, 2 * num_stages - 1 - chunk)

    return _backward_first(
        num_stages, num_micro_batches, place, lambda chunk: 2 * num_stages - chunk, "hanayo_2nd", recompute=True
    )


def unfolded_evaluation(placed: Schedule, num_micro_batches: int) -> Schedule:
    """Return the schedule of an evaluation step on the ranks that hold what training with `placed` needs.

    FE and FF of a stage both run where its FE runs in training, so nothing is recomputed; one micro-batch after
    another. For `1f1b_2nd_contiguous`, P = 2, N = 2::

        FE0 FE0@1 FF0@1 FF0 FE1 FE1@1 FF1@1 FF1
        (nothing)
    """
    home = {
        action.stage: row for row, actions in enumerate(placed.rows) for action in actions if action.phase is Phase.FE
    }
    rows: list[list[Action]] = [[] for _ in placed.rows]
    for micro_batch in range(num_micro_batches):
        for stage in range(placed.num_stages):
            rows[home[stage]].append(Action(Phase.FE, stage, micro_batch))
        for stage in reversed(range(placed.num_stages)):
            rows[home[stage]].append(Action(Phase.FF, stage, micro_batch))
    return Schedule(placed.num_stages, num_micro_batches, tuple(map(tuple, rows)), "evaluation")


def _backward_first(
    num_stages: int,
    num_micro_batches: int,
    place: Callable[[int], int],
    limit: Callable[[int], int],
    name: str,
    recompute: bool = False,
) -> Schedule:
    """Run the chain on the clock: `place` gives a chunk's row, `limit` how many of its forwards may be open at once."""
    costs = Costs(num_stages=num_stages, num_micro_batches=num_micro_batches)
    rows: list[list[Action]] = [[] for _ in range(num_stages)]
    free = [0.0] * num_stages
    end: dict[Action, float] = {}
    issued = {(phase, stage): 0 for phase in Phase for stage in range(num_stages)}
    # (rank of the choice: backward before forward and the furthest along the chain first; row, phase, stage, chunk)
    choices = []
    for chunk in range(2 * num_stages):
        is_energy = chunk < num_stages
        stage = chunk if is_energy else 2 * num_stages - 1 - chunk
        choices.append(((0, chunk), place(chunk), Phase.BE if is_energy else Phase.BF, stage, chunk))
        choices.append(((1, -chunk), place(chunk), Phase.FE if is_energy else Phase.FF, stage, chunk))
    backward_of = {Phase.FE: Phase.BE, Phase.FF: Phase.BF}
    while len(end) < len(Phase) * num_stages * num_micro_batches:
        ready = []
        for rank, row, phase, stage, chunk in choices:
            action = Action(phase, stage, issued[phase, stage])
            if action.micro_batch == num_micro_batches:
                continue
            if phase in backward_of and action.micro_batch - issued[backward_of[phase], stage] >= limit(chunk):
                continue
            needed = dependencies(action, num_stages)
            if all(a in end for a in needed):
                ready.append((max([free[row], *(end[a] for a in needed)]), rank, row, action))
        start, _, row, action = min(ready, key=lambda choice: choice[:2])
        again = recompute or row != place(action.stage)
        end[action] = free[row] = start + work_of(costs, action, recompute=again).duration
        issued[action.phase, action.stage] += 1
        rows[row].append(action)
    return Schedule(num_stages, num_micro_batches, tuple(map(tuple, rows)), name, recompute)
