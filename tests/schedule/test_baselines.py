"""The first-order schedules stretched to second order: placement, recomputation, and what they cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import (
    EVALUATION_PHASES,
    Action,
    Costs,
    Phase,
    Schedule,
    live_graphs,
    make_schedule,
    messages,
    simulate,
    unfolded_evaluation,
    validate,
)

FE, FF, BF, BE = Phase
NAMES = ["1f1b_2nd", "1f1b_2nd_contiguous", "hanayo_2nd"]
ROW_OF_FF: dict[str, Callable[[int, int], int]] = {
    "1f1b_2nd": lambda stage, num_stages: num_stages - 1 - stage,
    "1f1b_2nd_contiguous": lambda stage, num_stages: (2 * num_stages - 1 - stage) // 2,
    "hanayo_2nd": lambda stage, _: stage,
}


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(num_stages=st.integers(1, 5), num_micro_batches=st.integers(1, 9))
def test_baselines_are_valid_and_placed_as_they_say(name, num_stages, num_micro_batches) -> None:
    schedule = make_schedule(name, num_stages=num_stages, num_micro_batches=num_micro_batches)
    validate(schedule)
    for row, actions in enumerate(schedule.rows):
        for action in actions:
            energy = action.phase in (FE, BE)
            fe_row = action.stage // 2 if name.endswith("contiguous") else action.stage
            assert row == (fe_row if energy else ROW_OF_FF[name](action.stage, num_stages))


@pytest.mark.parametrize("name", NAMES)
@settings(deadline=None)
@given(num_stages=st.integers(1, 4), num_micro_batches=st.integers(1, 9))
def test_open_forwards_are_limited_as_in_1f1b(name, num_stages, num_micro_batches) -> None:
    """The chunk at position c of 2P has at most 2P - c forwards without their backward, whatever N."""
    schedule = make_schedule(name, num_stages=num_stages, num_micro_batches=num_micro_batches)
    for row, actions in enumerate(schedule.rows):
        is_open = dict.fromkeys([(p, s) for p in (FE, FF) for s in range(num_stages)], 0)
        for action in actions:
            key = (FE if action.phase in (FE, BE) else FF, action.stage)
            is_open[key] += 1 if action.phase in (FE, FF) else -1
            chunk = action.stage if key[0] is FE else 2 * num_stages - 1 - action.stage
            assert is_open[key] <= 2 * num_stages - chunk, (row, action)


def test_ff_on_another_rank_recomputes_fe_in_time_and_memory() -> None:
    schedule = make_schedule("1f1b_2nd", num_stages=2, num_micro_batches=1)
    costs = Costs(
        num_stages=2,
        num_micro_batches=1,
        phase_times={FE: 1, FF: 2, BF: 4, BE: 3},
        fe_graph_size=10,
        ff_graph_size=5,
    )
    result = simulate(schedule, costs)
    start, end = result.spans[Action(FF, 1, 0)]
    assert end - start == 1 + 2
    assert result.makespan == 20 + 2 * 1
    assert result.lower_bound == 22
    assert result.bubble_ratio == pytest.approx(1 - 20 / (2 * 22))
    assert result.peak_in_flight == (2, 2)
    assert result.peak_memory == (25, 25)
    assert live_graphs(schedule, 0) == [(1, 0), (2, 1), (2, 1), (1, 0)]


def test_hanayo_recomputes_on_the_same_rank() -> None:
    schedule = make_schedule("hanayo_2nd", num_stages=2, num_micro_batches=1)
    assert schedule.recompute
    assert not schedule.is_folded
    costs = Costs(num_stages=2, num_micro_batches=1, phase_times={FE: 1, FF: 2, BF: 4, BE: 3})
    assert simulate(schedule, costs).makespan == 22
    assert simulate(replace(schedule, recompute=False), costs).makespan == 20
    assert schedule.truncated(1).recompute


def test_the_middle_rank_of_an_odd_contiguous_pipeline_need_not_recompute() -> None:
    schedule = make_schedule("1f1b_2nd_contiguous", num_stages=3, num_micro_batches=1)
    assert not schedule.recomputes(2, 1)
    assert schedule.recomputes(0, 2)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_evaluation_runs_where_fe_runs_and_recomputes_nothing(name: str, num_stages: int) -> None:
    placed = make_schedule(name, num_stages=num_stages, num_micro_batches=2)
    schedule = unfolded_evaluation(placed, 3)
    validate(schedule, phases=EVALUATION_PHASES, max_in_flight=num_stages)
    for row, actions in enumerate(schedule.rows):
        assert {a.stage for a in actions} == {a.stage for a in placed.rows[row] if a.phase is FE}
        assert not any(schedule.recomputes(a.stage, row) for a in actions)


def test_links_of_an_unfolded_schedule_also_carry_h_and_the_second_order_gradient() -> None:
    schedule = make_schedule("1f1b_2nd", num_stages=2, num_micro_batches=1)
    sent = {link: [(m.producer.phase, m.consumer.phase) for m in found] for link, found in messages(schedule).items()}
    assert sent == {
        (0, 1): [(FE, FE), (FE, FF), (FF, FF), (BF, BE)],
        (1, 0): [(FE, FF), (BF, BF), (BF, BE), (BE, BE)],
    }


def test_csv_round_trip_with_stages_away_from_home(tmp_path) -> None:
    schedule = make_schedule("1f1b_2nd", num_stages=3, num_micro_batches=4)
    schedule.to_csv(tmp_path / "1f1b_2nd.csv")
    assert Schedule.from_csv(tmp_path / "1f1b_2nd.csv") == schedule


BUBBLES = {"1f1b_2nd": 0.317, "1f1b_2nd_contiguous": 0.405, "hanayo_2nd": 0.254, "gpipe_2nd": 0.200, "auto": 0.090}


@pytest.mark.parametrize(("name", "bubble"), BUBBLES.items(), ids=BUBBLES)
def test_bubbles_at_typical_times(name: str, bubble: float) -> None:
    """P = 4, N = 12: the figures that the docstrings and the documentation quote."""
    schedule = make_schedule(name, num_stages=4, num_micro_batches=12)
    result = simulate(schedule, Costs(num_stages=4, num_micro_batches=12))
    assert result.bubble_ratio == pytest.approx(bubble, abs=5e-4)
