"""Cells, CSV files and cutting a schedule short."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import Action, Phase, Schedule, make_schedule, validate

sizes = st.integers(1, 6)
actions = st.builds(Action, st.sampled_from(Phase), st.integers(0, 9), st.integers(0, 99))


@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(action=actions, row=st.integers(0, 9))
def test_a_cell_reads_back_as_the_same_action(action: Action, row: int) -> None:
    assert Action.parse(action.cell(row), row) == action


def test_a_cell_names_the_stage_only_where_the_row_does_not_tell() -> None:
    action = Action(Phase.FF, 2, 3)
    assert action.cell(2) == "FF3"
    assert action.cell(0) == "FF3@2"


@pytest.mark.parametrize("cell", ["XX3", "FE", "3", "FE3@", "fe3", "FE-1", "FE3 FF3", ""])
def test_an_unknown_cell_is_an_error_that_shows_a_good_one(cell: str) -> None:
    with pytest.raises(ValueError, match=r"unknown cell.*such as FE3"):
        Action.parse(cell, 0)


@settings(deadline=None)
@given(num_stages=sizes, num_micro_batches=sizes, wave_size=sizes)
def test_csv_round_trip(num_stages: int, num_micro_batches: int, wave_size: int, tmp_path_factory) -> None:
    schedule = make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches, wave_size=wave_size)
    path = tmp_path_factory.mktemp("csv") / "wavek.csv"
    assert schedule.to_csv(path) == path.read_text()
    assert Schedule.from_csv(path) == schedule


def test_a_csv_may_be_padded_and_spaced_as_spreadsheets_do(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text("FE0, FF0 ,BF0,BE0,,\r\nFE0,FF0,BF0,BE0\r\n")
    schedule = Schedule.from_csv(path, num_stages=2, num_micro_batches=1)
    validate(schedule)
    assert schedule.name == "mine"


CORRUPTED = {
    "unknown cell": ("FE0,FF0,BF0,BE0\nFE0,FG0,BF0,BE0\n", r"bad\.csv, row 2, column 2: unknown cell 'FG0'"),
    "hole": ("FE0,,FF0,BF0,BE0\nFE0,FF0,BF0,BE0\n", r"bad\.csv, row 1, column 2: unknown cell ''"),
    "too few rows": ("FE0,FF0,BF0,BE0\n", r"bad\.csv, row 2, column 1: the file has 1 row\(s\).*2 stage"),
    "too many rows": ("FE0\nFE0\nFE0\n", r"bad\.csv, row 3, column 1: the file has 3 row\(s\).*2 stage"),
    "empty file": ("", r"bad\.csv, row 1, column 1: the file has 0 row\(s\)"),
    "wrong micro-batch": ("FE0,FF0\nFE0,FF1\n", r"bad\.csv, row 2, column 2: cell 'FF1' names micro-batch 1.*has 1 "),
    "wrong stage": ("FE0,FF0@2\nFE0,FF0\n", r"bad\.csv, row 1, column 2: cell 'FF0@2' names stage 2.*2 stages"),
}


@pytest.mark.parametrize(("text", "message"), CORRUPTED.values(), ids=CORRUPTED)
def test_a_corrupted_csv_names_file_row_and_column(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        Schedule.from_csv(path, num_stages=2, num_micro_batches=1)


@settings(deadline=None)
@given(num_stages=sizes, num_micro_batches=sizes, wave_size=sizes, data=st.data())
def test_dropping_the_last_micro_batches_leaves_a_valid_schedule(
    num_stages, num_micro_batches, wave_size, data
) -> None:
    schedule = make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches, wave_size=wave_size)
    left = data.draw(st.integers(1, num_micro_batches))
    cut = schedule.truncated(left)
    validate(cut, max_in_flight=2 * wave_size)
    assert cut.num_micro_batches == left


def test_a_schedule_cannot_be_cut_to_more_than_it_has() -> None:
    with pytest.raises(ValueError, match="3 micro-batches cannot be cut to 4"):
        make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=3).truncated(4)
