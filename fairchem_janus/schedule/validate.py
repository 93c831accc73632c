"""Check that a schedule can run: complete, well placed, free of deadlock, within its caps.

An error shows the part of the grid around the mistake, with the cell marked and row and column named::

    schedule 'mine', row 2 (rank 1), column 2: BF0 stands before FF0, which it needs (column 3)
            1      2      3    4
    row 1  FE0    FF0    BF0  BE0
    row 2  FE0  > BF0 <  FF0  BE0
"""

from __future__ import annotations

from collections import deque

from fairchem_janus.schedule.action import TRAINING_PHASES, Action, Phase, Schedule
from fairchem_janus.schedule.dataflow import dependencies, messages

COLUMNS_SHOWN = 6
"""How many columns of the grid an error shows on each side of the marked cell."""


class ScheduleError(ValueError):
    """A schedule that cannot run. `row` and `column` (from 1, `row` counts ranks) say where."""

    def __init__(self, schedule: Schedule, row: int, column: int, reason: str) -> None:
        self.row = row + 1
        self.column = column + 1
        super().__init__(
            f"schedule {schedule.name!r}, row {self.row} (rank {row}), column {self.column}: {reason}\n"
            + _grid(schedule, row, column)
        )


def validate(
    schedule: Schedule,
    *,
    phases: tuple[Phase, ...] | None = None,
    max_in_flight: int | None = None,
    max_ff_graphs: int | None = None,
) -> None:
    """Raise ScheduleError (a ValueError) unless the schedule can run. Checked, in this order:

    - every action of `phases` (default: the schedule's own), stage and micro-batch is listed exactly once, and
      nothing else is;
    - all micro-batches of a stage agree on the row of FE and BE, and on the row of FF and BF: each pair shares a graph;
    - executed in the listed orders, with messages received on every link in the order in which they were sent, the
      schedule runs to its end;
    - no rank ever has more than `max_in_flight` FE graphs alive (FE to BE; in evaluation FE to FF; a recomputed one FF
      to BF), nor more than `max_ff_graphs` FF graphs (FF to BF).
    """
    if len(schedule.rows) != schedule.num_stages:
        raise ScheduleError(
            schedule,
            min(len(schedule.rows), schedule.num_stages),
            0,
            f"{len(schedule.rows)} row(s) for {schedule.num_stages} stage(s); a schedule has one row per stage",
        )
    place = _check_complete(schedule, phases or schedule.phases)
    _check_placement(schedule, place)
    _check_runs(schedule, place)
    _check_caps(schedule, max_in_flight, max_ff_graphs)


def _check_complete(schedule: Schedule, phases: tuple[Phase, ...]) -> dict[Action, tuple[int, int]]:
    """Check that every action stands in the schedule exactly once; return each one's (row, column)."""
    place: dict[Action, tuple[int, int]] = {}
    for row, actions in enumerate(schedule.rows):
        for column, action in enumerate(actions):
            cell = action.cell(row)
            if action.phase not in phases:
                raise ScheduleError(schedule, row, column, f"{cell} does not belong in a {'-'.join(phases)} schedule")
            if not 0 <= action.stage < schedule.num_stages:
                raise ScheduleError(schedule, row, column, f"{cell}: there are {schedule.num_stages} stages")
            if not 0 <= action.micro_batch < schedule.num_micro_batches:
                reason = f"{cell}: there are {schedule.num_micro_batches} micro-batches, counted from 0"
                raise ScheduleError(schedule, row, column, reason)
            if action in place:
                first_row, first_column = place[action]
                reason = f"{cell} is listed twice; it already stands in row {first_row + 1}, column {first_column + 1}"
                raise ScheduleError(schedule, row, column, reason)
            place[action] = (row, column)
    for micro_batch in range(schedule.num_micro_batches):
        for stage in range(schedule.num_stages):
            for phase in phases:
                action = Action(phase, stage, micro_batch)
                if action not in place:
                    row, column = _where_it_belongs(schedule, place, action)
                    raise ScheduleError(schedule, row, column, f"{action.cell(row)} is missing")
    return place


def _where_it_belongs(schedule: Schedule, place: dict[Action, tuple[int, int]], missing: Action) -> tuple[int, int]:
    """Return where a missing action has to stand at the latest: before what needs it, else at the end of its row."""
    pairs = {Phase.FE: Phase.BE, Phase.BE: Phase.FE, Phase.FF: Phase.BF, Phase.BF: Phase.FF}
    partner = place.get(Action(pairs[missing.phase], missing.stage, missing.micro_batch))
    if partner is None:
        row, column = missing.stage, len(schedule.rows[missing.stage])
    else:
        row, column = partner
    for later in range(len(schedule.rows[row])):
        if missing in dependencies(schedule.rows[row][later], schedule.num_stages):
            return row, later
    return row, max(column, len(schedule.rows[row]))


def _check_placement(schedule: Schedule, place: dict[Action, tuple[int, int]]) -> None:
    """Check that the phases which share a graph, FE with BE and FF with BF, share a row for all micro-batches."""
    for action, (row, column) in place.items():
        first = Action(Phase.FE if action.phase in (Phase.FE, Phase.BE) else Phase.FF, action.stage, 0)
        home, _ = place[first]
        if row != home:
            reason = (
                f"{action.cell(row)} must run where {first.cell(home)} runs, in row {home + 1}: "
                "FE and BE of a stage share graphs and parameters, and so do FF and BF"
            )
            raise ScheduleError(schedule, row, column, reason)


def _check_runs(schedule: Schedule, place: dict[Action, tuple[int, int]]) -> None:
    """Execute the lists with one first-in-first-out queue per link; a rank that can never go on is a deadlock."""
    to_receive = {link: deque(sent) for link, sent in messages(schedule).items()}
    received: list[set[Action]] = [set() for _ in schedule.rows]
    done: set[Action] = set()
    position = [0] * len(schedule.rows)
    progress = True
    while progress:
        progress = False
        for row, actions in enumerate(schedule.rows):
            for (_, target), queue in to_receive.items():
                while target == row and queue and queue[0].producer in done:
                    received[row].add(queue.popleft().producer)
            while position[row] < len(actions):
                needed = dependencies(actions[position[row]], schedule.num_stages)
                if not all(a in (done if place[a][0] == row else received[row]) for a in needed):
                    break
                done.add(actions[position[row]])
                position[row] += 1
                progress = True
    stuck = [row for row, actions in enumerate(schedule.rows) if position[row] < len(actions)]
    for row in stuck:
        action = schedule.rows[row][position[row]]
        for wanted in dependencies(action, schedule.num_stages):
            wanted_row, wanted_column = place[wanted]
            if wanted_row == row and wanted_column > position[row]:
                reason = f"{action.cell(row)} stands before {wanted.cell(row)}, which it needs"
                raise ScheduleError(schedule, row, position[row], f"{reason} (column {wanted_column + 1})")
    if stuck:
        reason = _describe_deadlock(schedule, place, position, stuck[0])
        raise ScheduleError(schedule, stuck[0], position[stuck[0]], reason)


def _describe_deadlock(schedule: Schedule, place: dict[Action, tuple[int, int]], position: list[int], row: int) -> str:
    """Follow the waiting ranks from `row` until one repeats, and say who waits for what."""
    chain = []
    seen: set[int] = set()
    while row not in seen:
        seen.add(row)
        action = schedule.rows[row][position[row]]
        needed = next(a for a in dependencies(action, schedule.num_stages) if place[a][1] >= position[place[a][0]])
        next_row, next_column = place[needed]
        chain.append(
            f"row {row + 1} waits in {action.cell(row)} for {needed.cell(next_row)} "
            f"(row {next_row + 1}, column {next_column + 1})"
        )
        row = next_row
    return "deadlock: " + "; ".join(chain)


def _check_caps(schedule: Schedule, max_in_flight: int | None, max_ff_graphs: int | None) -> None:
    """Count the graphs alive on each rank as its list runs."""
    for row, actions in enumerate(schedule.rows):
        for column, (fe_graphs, ff_graphs) in enumerate(live_graphs(schedule, row)):
            cell = actions[column].cell(row)
            if max_in_flight is not None and fe_graphs > max_in_flight:
                reason = f"{cell} is micro-batch number {fe_graphs} in flight, above the cap of {max_in_flight}"
                raise ScheduleError(schedule, row, column, reason)
            if max_ff_graphs is not None and ff_graphs > max_ff_graphs:
                reason = f"{cell} makes FF graph number {ff_graphs}, above the cap of {max_ff_graphs}"
                raise ScheduleError(schedule, row, column, reason)


def live_graphs(schedule: Schedule, row: int) -> list[tuple[int, int]]:
    """Return, for each action of a row, how many FE and FF graphs are alive on that rank while it runs.

    An FE graph lives from FE to BE, in evaluation to FF; one that FF recomputed lives until BF. An FF graph lives from
    FF to BF; evaluation keeps none.
    """
    training = schedule.phases == TRAINING_PHASES
    again = {s: schedule.recomputes(s, row) for s in {action.stage for action in schedule.rows[row]}}
    fe_graphs = ff_graphs = 0
    counts = []
    for action in schedule.rows[row]:
        recomputed = again[action.stage]
        if action.phase is Phase.FE or (action.phase is Phase.FF and recomputed):
            fe_graphs += 1
        if action.phase is Phase.FF and training:
            ff_graphs += 1
        counts.append((fe_graphs, ff_graphs))
        if action.phase is (Phase.BE if training else Phase.FF) or (action.phase is Phase.BF and recomputed):
            fe_graphs -= 1
        if action.phase is Phase.BF:
            ff_graphs -= 1
    return counts


def _grid(schedule: Schedule, row: int, column: int) -> str:
    """Return the rows as aligned columns around (row, column), that cell between `>` and `<`."""
    first = max(0, column - COLUMNS_SHOWN)
    columns = range(first, column + COLUMNS_SHOWN + 1)
    lines = [["", *(str(c + 1) for c in columns)]]
    for r in range(max(len(schedule.rows), row + 1)):
        actions = schedule.rows[r] if r < len(schedule.rows) else ()
        cells = [actions[c].cell(r) if c < len(actions) else "" for c in columns]
        if r == row:
            cells[column - first] = f"> {cells[column - first] or '?'} <"
        lines.append([f"row {r + 1}", *cells])
    widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
    return "\n".join("  ".join(t.center(w) for t, w in zip(line, widths, strict=True)).rstrip() for line in lines)
