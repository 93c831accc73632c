"""The picture of a step in the terminal."""

from __future__ import annotations

from fairchem_janus.schedule import Costs, Phase, make_schedule, simulate
from fairchem_janus.schedule.draw import Block, draw, draw_rich, lanes_of


def test_columns_are_time_and_idle_time_is_visible() -> None:
    """One unit of time is two columns."""
    costs = Costs(num_stages=2, num_micro_batches=1, phase_times={"FE": 1, "FF": 2, "BF": 4, "BE": 3})
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=1)
    picture = draw(lanes_of(schedule, simulate(schedule, costs)), width=40)
    assert picture.splitlines() == [
        "rank 0 |0-......0===0#######..............0+++++",
        "rank 1 |..0-0===............0#######0+++++......",
        "- FE  = FF  # BF  + BE  . idle",
    ]


def test_deferred_work_is_drawn_too() -> None:
    costs = Costs(
        num_stages=1, num_micro_batches=1, phase_times={"FE": 1, "FF": 1, "BF": 4, "BE": 2}, deferrable_share=0.5
    )
    schedule = make_schedule("gpipe_2nd", num_stages=1, num_micro_batches=1)
    picture = draw(lanes_of(schedule, simulate(schedule, costs)), width=16)
    assert picture.splitlines()[0] == "rank 0 |0-0=0###0+wwwwww"
    assert "w W" in picture


def test_a_label_that_does_not_fit_is_left_out_rather_than_cut() -> None:
    lanes = [[Block("11", Phase.FE, 0.0, 1.0), Block("11", Phase.FF, 1.0, 4.0)]]
    assert draw(lanes, width=4).splitlines()[0] == "rank 0 |-11="


def test_a_recorded_run_need_not_start_at_zero() -> None:
    lanes = [[Block("0", Phase.FE, 100.0, 101.0)], [Block("0", Phase.FE, 101.0, 102.0)]]
    assert draw(lanes, width=4).splitlines()[:2] == ["rank 0 |0-..", "rank 1 |..0-"]


def test_colours_show_the_same_columns() -> None:
    lanes = [[Block("0", Phase.FE, 0.0, 1.0)], [Block("0", Phase.BE, 1.0, 2.0)]]
    text = draw_rich(lanes, width=4)
    assert text.plain.splitlines()[:2] == ["rank 0 |0   ", "rank 1 |  0 "]
    assert len({str(span.style) for span in text.spans if span.style}) == 2


def test_a_step_without_work_is_an_empty_picture() -> None:
    assert draw([[]], width=4).splitlines()[0] == "rank 0 |...."
