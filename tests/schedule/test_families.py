"""Every family gives complete, ordered, deadlock-free lists within its caps."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import FAMILIES, Caps, Phase, evaluation_schedule, live_graphs, make_schedule, validate
from fairchem_janus.schedule.baselines import hanayo_2nd, one_f_one_b_2nd
from fairchem_janus.schedule.gpipe import gpipe_2nd
from fairchem_janus.schedule.wavek import wavek

stages = st.integers(1, 6)
micro_batches = st.integers(1, 13)


@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(num_stages=stages, num_micro_batches=micro_batches, wave_size=st.integers(1, 14))
def test_wavek_is_valid_with_at_most_2k_in_flight(num_stages, num_micro_batches, wave_size) -> None:
    schedule = wavek(num_stages=num_stages, num_micro_batches=num_micro_batches, wave_size=wave_size)
    validate(schedule, max_in_flight=2 * wave_size)


@settings(deadline=None)
@given(num_stages=stages, num_micro_batches=micro_batches, wave_size=st.integers(1, 14))
def test_wavek_issues_forward_phases_wave_by_wave(num_stages, num_micro_batches, wave_size) -> None:
    schedule = wavek(num_stages=num_stages, num_micro_batches=num_micro_batches, wave_size=wave_size)
    for row in schedule.rows:
        forward = [(a.micro_batch // wave_size, a.phase is Phase.FF) for a in row if a.phase in (Phase.FE, Phase.FF)]
        assert forward == sorted(forward)


def test_wavek_waves_are_as_large_as_the_pipeline_by_default() -> None:
    assert wavek(num_stages=3, num_micro_batches=8) == wavek(num_stages=3, num_micro_batches=8, wave_size=3)


@settings(deadline=None)
@given(num_stages=stages, num_micro_batches=micro_batches)
def test_gpipe_is_valid_and_keeps_everything_in_flight(num_stages, num_micro_batches) -> None:
    schedule = gpipe_2nd(num_stages=num_stages, num_micro_batches=num_micro_batches)
    validate(schedule, max_in_flight=num_micro_batches, max_ff_graphs=num_micro_batches)
    assert max(fe for fe, _ in live_graphs(schedule, 0)) == num_micro_batches


@settings(deadline=None)
@given(num_stages=stages, num_micro_batches=micro_batches)
def test_evaluation_is_valid_and_holds_few_graphs(num_stages, num_micro_batches) -> None:
    schedule = evaluation_schedule(num_stages, num_micro_batches)
    validate(schedule, max_in_flight=2 * num_stages - 1)
    assert schedule.phases == (Phase.FE, Phase.FF)


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(1, 1), (1, 3), (4, 1), (4, 2), (2, 5)])
def test_families_take_few_micro_batches_and_single_stages(name, num_stages, num_micro_batches) -> None:
    schedule = make_schedule(name, num_stages=num_stages, num_micro_batches=num_micro_batches)
    validate(schedule)
    assert (schedule.name, schedule.num_stages, schedule.num_micro_batches) == (name, num_stages, num_micro_batches)


def test_an_unknown_family_is_an_error_that_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match="unknown schedule 'waves': choose one of " + ", ".join(FAMILIES)):
        make_schedule("waves", num_stages=2, num_micro_batches=2)


@pytest.mark.parametrize(("num_stages", "num_micro_batches"), [(0, 2), (2, 0)])
def test_sizes_below_one_are_errors(num_stages, num_micro_batches) -> None:
    with pytest.raises(ValueError, match="at least 1 stage and 1 micro-batch"):
        make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches)


def test_a_wave_of_nothing_is_an_error() -> None:
    with pytest.raises(ValueError, match="wave_size must be at least 1, got 0"):
        make_schedule("wavek", num_stages=2, num_micro_batches=2, wave_size=0)


def test_a_named_family_beyond_the_caps_is_an_error() -> None:
    with pytest.raises(ValueError, match="FE3 is micro-batch number 4 in flight, above the cap of 3"):
        make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=4, caps=Caps(max_in_flight=3))


def test_a_csv_of_ones_own_is_a_schedule(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    made = make_schedule("wavek", num_stages=2, num_micro_batches=3)
    made.to_csv(path)
    assert make_schedule(str(path), num_stages=2, num_micro_batches=3).rows == made.rows
    with pytest.raises(ValueError, match=r"mine\.csv.*the pipeline has 3 stage"):
        make_schedule(str(path), num_stages=3, num_micro_batches=3)


def test_a_csv_of_ones_own_must_have_all_four_phases(tmp_path: Path) -> None:
    path = tmp_path / "forward_only.csv"
    evaluation_schedule(2, 2).to_csv(path)
    with pytest.raises(ValueError, match="BF0 is missing"):
        make_schedule(str(path), num_stages=2, num_micro_batches=2)


DRAWN = {
    "gpipe_2nd": (gpipe_2nd, gpipe_2nd(num_stages=2, num_micro_batches=3)),
    "wavek": (wavek, wavek(num_stages=2, num_micro_batches=4, wave_size=2)),
    "evaluation": (evaluation_schedule, evaluation_schedule(2, 4)),
    "1f1b_2nd": (one_f_one_b_2nd, one_f_one_b_2nd(num_stages=2, num_micro_batches=2)),
    "hanayo_2nd": (hanayo_2nd, hanayo_2nd(num_stages=2, num_micro_batches=2)),
}


@pytest.mark.parametrize(("function", "schedule"), DRAWN.values(), ids=DRAWN)
def test_the_example_drawn_in_a_docstring_is_what_the_function_returns(function, schedule) -> None:
    drawn = re.findall(r"^ *((?:(?:FE|FF|BF|BE)\d+(?:@\d+)?[ |]*)+)$", inspect.getdoc(function), re.MULTILINE)
    assert [line.replace("|", "").split() for line in drawn] == [
        [action.cell(row) for action in actions] for row, actions in enumerate(schedule.rows)
    ]
