"""What the validator refuses, and how it says so."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import Phase, Schedule, ScheduleError, evaluation_schedule, make_schedule, validate


def read(tmp_path: Path, *rows: str) -> Schedule:
    path = tmp_path / "mine.csv"
    path.write_text("\n".join(row.replace(" ", ",") for row in rows) + "\n")
    return Schedule.from_csv(path)


REFUSED = {
    "missing": (
        ["FE0 FE1 FF0 FF1 BF0 BF1 BE0 BE1", "FE0 FE1 FF0 FF1 BF0 BE0 BE1"],
        (2, 7),
        "BF1 is missing",
    ),
    "missing at the end": (["FE0 FF0 BF0", "FE0 FF0 BF0 BE0"], (1, 4), "BE0 is missing"),
    "twice": (["FE0 FF0 BF0 BE0", "FE0 FF0 BF0 FF0 BE0"], (2, 4), "FF0 is listed twice.*row 2, column 2"),
    "wrong order": (
        ["FE0 FF0 BF0 BE0", "FE0 BF0 FF0 BE0"],
        (2, 2),
        r"BF0 stands before FF0, which it needs \(column 3\)",
    ),
    "deadlock": (
        ["FE0 FF0 FE1 FF1 BF0 BF1 BE0 BE1", "FE0 FE1 FF0 FF1 BF0 BF1 BE0 BE1"],
        (1, 2),
        "deadlock: row 1 waits in FF0 for FF0.*row 2 waits in FE1 for FE1",
    ),
    "graph on another rank": (
        ["FE0 FF0 BF0 BE0@1", "FE0 FF0 BF0 BE0@0"],
        (1, 4),
        "BE0@1 must run where FE0 runs, in row 2",
    ),
}


@pytest.mark.parametrize(("rows", "place", "message"), REFUSED.values(), ids=REFUSED)
def test_the_error_names_row_and_column_and_marks_the_cell(rows, place, message, tmp_path: Path) -> None:
    with pytest.raises(ScheduleError, match=message) as caught:
        validate(read(tmp_path, *rows))
    assert (caught.value.row, caught.value.column) == place
    assert f"row {place[0]} (rank {place[0] - 1}), column {place[1]}: " in str(caught.value)
    cells = rows[place[0] - 1].split()
    marked = cells[place[1] - 1] if place[1] <= len(cells) else "?"
    grid = str(caught.value).splitlines()[1:]
    assert len(grid) == 1 + len(rows)
    assert [f"> {marked} <" in line for line in grid] == [row == place[0] for row in range(len(grid))]


def test_a_long_grid_is_cut_around_the_mark() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=40)
    broken = replace(schedule, rows=(schedule.rows[0], schedule.rows[1][:100] + schedule.rows[1][101:]))
    with pytest.raises(ScheduleError, match="BF20 is missing") as caught:
        validate(broken)
    assert max(map(len, str(caught.value).splitlines()[1:])) < 120


def test_the_wrong_number_of_rows_is_refused() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=1)
    with pytest.raises(ScheduleError, match=r"row 2 \(rank 1\), column 1: 1 row\(s\) for 2 stage"):
        validate(replace(schedule, rows=schedule.rows[:1]))


def test_actions_that_do_not_exist_are_refused() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=2)
    with pytest.raises(ScheduleError, match="FE1: there are 1 micro-batches, counted from 0"):
        validate(replace(schedule, num_micro_batches=1))
    with pytest.raises(ScheduleError, match="BF0 does not belong in a FE-FF schedule"):
        validate(schedule, phases=(Phase.FE, Phase.FF))
    with pytest.raises(ScheduleError, match="BF0 is missing"):
        validate(evaluation_schedule(2, 1), phases=tuple(Phase))


def test_caps_are_checked_at_the_action_that_exceeds_them() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=3)
    validate(schedule, max_in_flight=3, max_ff_graphs=3)
    with pytest.raises(ScheduleError, match="FE2 is micro-batch number 3 in flight, above the cap of 2") as caught:
        validate(schedule, max_in_flight=2)
    assert (caught.value.row, caught.value.column) == (1, 3)
    with pytest.raises(ScheduleError, match="FF1 makes FF graph number 2, above the cap of 1") as caught:
        validate(schedule, max_ff_graphs=1)
    assert (caught.value.row, caught.value.column) == (1, 5)


@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(data=st.data(), num_stages=st.integers(1, 4), num_micro_batches=st.integers(1, 5))
def test_losing_any_action_is_noticed(data, num_stages, num_micro_batches) -> None:
    schedule = make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches)
    row = data.draw(st.integers(0, num_stages - 1))
    column = data.draw(st.integers(0, 4 * num_micro_batches - 1))
    actions = list(schedule.rows[row])
    lost = actions.pop(column)
    rows = (*schedule.rows[:row], tuple(actions), *schedule.rows[row + 1 :])
    with pytest.raises(ScheduleError, match=f"{lost.cell(row)} is missing") as caught:
        validate(replace(schedule, rows=rows))
    assert caught.value.row == row + 1


@settings(deadline=None)
@given(data=st.data(), num_stages=st.integers(1, 4), num_micro_batches=st.integers(1, 4))
def test_a_micro_batchs_own_phases_in_any_wrong_order_are_noticed(data, num_stages, num_micro_batches) -> None:
    schedule = make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches)
    row = data.draw(st.integers(0, num_stages - 1))
    micro_batch = data.draw(st.integers(0, num_micro_batches - 1))
    actions = list(schedule.rows[row])
    columns = [column for column, action in enumerate(actions) if action.micro_batch == micro_batch]
    first, second = sorted(data.draw(st.permutations(columns))[:2])
    actions[first], actions[second] = actions[second], actions[first]
    with pytest.raises(ScheduleError, match=r"stands before|deadlock"):
        validate(replace(schedule, rows=(*schedule.rows[:row], tuple(actions), *schedule.rows[row + 1 :])))
