"""The simulator against cases worked by hand, and against the bound."""

from __future__ import annotations

import doctest
import importlib
import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import (
    Action,
    Caps,
    Costs,
    Phase,
    Schedule,
    evaluation_schedule,
    make_schedule,
    simulate,
)

FE, FF, BF, BE = Phase
times = st.floats(0.1, 5.0)


def of(text: str, name: str = "by hand") -> Schedule:
    """Read rows such as `FE0 FF0 BF0 BE0 / FE0 FF0 BF0 BE0`."""
    rows = [[Action.parse(cell, row) for cell in line.split()] for row, line in enumerate(text.split("/"))]
    num_micro_batches = 1 + max(action.micro_batch for row in rows for action in row)
    return Schedule(len(rows), num_micro_batches, tuple(map(tuple, rows)), name)


def test_one_stage_has_no_bubble() -> None:
    result = simulate(of("FE0 FE1 FF0 BF0 BE0 FF1 BF1 BE1"), Costs(num_stages=1, num_micro_batches=2))
    assert result.makespan == pytest.approx(2 * 9.1)
    assert result.bubble_ratio == pytest.approx(0)
    assert result.makespan == pytest.approx(result.lower_bound)
    assert (result.peak_in_flight, result.peak_ff_graphs) == ((2,), (1,))


def test_two_stages_one_micro_batch() -> None:
    """FE 1+1, FF 2+2, BF 4+4, BE 3+3, one after another."""
    costs = Costs(num_stages=2, num_micro_batches=1, phase_times={FE: 1, FF: 2, BF: 4, BE: 3})
    result = simulate(of("FE0 FF0 BF0 BE0 / FE0 FF0 BF0 BE0"), costs)
    assert result.spans == {
        Action(FE, 0, 0): (0, 1),
        Action(FE, 1, 0): (1, 2),
        Action(FF, 1, 0): (2, 4),
        Action(FF, 0, 0): (4, 6),
        Action(BF, 0, 0): (6, 10),
        Action(BF, 1, 0): (10, 14),
        Action(BE, 1, 0): (14, 17),
        Action(BE, 0, 0): (17, 20),
    }
    assert result.makespan == result.lower_bound == 20
    assert result.bubble_ratio == result.bubble_lower_bound == 0.5
    assert result.busy == (10, 10)
    assert result.critical_path == tuple(result.spans)


def test_two_stages_two_micro_batches_with_a_wait() -> None:
    """Stage 0 waits from 2 to 4 for FF_1 of micro-batch 0; stage 1 works without a pause until BF."""
    costs = Costs(num_stages=2, num_micro_batches=2, phase_times={FE: 1, FF: 2, BF: 4, BE: 3})
    row = "FE0 FE1 FF0 FF1 BF0 BF1 BE0 BE1"
    result = simulate(of(f"{row} / {row}"), costs)
    starts = {action: start for action, (start, _) in result.spans.items()}
    assert [starts[Action(p, 0, m)] for p in Phase for m in (0, 1)] == [0, 1, 5, 7, 9, 13, 24, 27]
    assert [starts[Action(p, 1, m)] for p in Phase for m in (0, 1)] == [1, 2, 3, 5, 13, 17, 21, 24]
    assert result.makespan == 30
    assert result.lower_bound == 2 * 10 + 1 + 3
    assert result.bubble_ratio == pytest.approx(1 - 20 / 30)
    assert (result.peak_in_flight, result.peak_ff_graphs) == ((2, 2), (2, 2))


@pytest.mark.parametrize(("num_micro_batches", "bubble"), [(12, 0.20), (32, 3 / 35)])
def test_gpipe_takes_n_plus_p_minus_1_rounds(num_micro_batches: int, bubble: float) -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=4, num_micro_batches=num_micro_batches)
    result = simulate(schedule, Costs(num_stages=4, num_micro_batches=num_micro_batches))
    assert result.makespan == pytest.approx((num_micro_batches + 3) * 9.1)
    assert result.bubble_ratio == pytest.approx(bubble)
    assert result.lower_bound == pytest.approx(num_micro_batches * 9.1 + 3 * 3.6)


def test_stages_may_have_times_of_their_own_and_micro_batches_a_scale() -> None:
    costs = Costs(
        num_stages=2,
        num_micro_batches=2,
        phase_times={FE: [1, 2], FF: 1, BF: 1, BE: [3, 1]},
        micro_batch_scale=[1, 2],
    )
    row = "FE0 FF0 BF0 BE0 FE1 FF1 BF1 BE1"
    result = simulate(of(f"{row} / {row}"), costs)
    assert result.spans[Action(BE, 0, 0)] == (8, 11)
    assert result.makespan == 11 + 2 * 11
    assert result.busy == (3 * 6, 3 * 5)


def test_a_message_takes_latency_and_size_over_bandwidth() -> None:
    costs = Costs(
        num_stages=2,
        num_micro_batches=1,
        phase_times=dict.fromkeys(Phase, 1),
        link_latency=0.25,
        link_bandwidth=4,
        message_sizes={FE: 2, FF: 4},
    )
    spans = simulate(of("FE0 FF0 BF0 BE0 / FE0 FF0 BF0 BE0"), costs).spans
    assert spans[Action(FE, 1, 0)][0] == 1 + 0.5 + 0.25
    assert spans[Action(FF, 0, 0)][0] == 3.75 + 1 + 0.25
    assert spans[Action(BF, 1, 0)][0] == 7 + 0.25


def test_a_link_sends_one_message_after_another_while_the_rank_computes() -> None:
    costs = Costs(
        num_stages=2, num_micro_batches=3, phase_times=dict.fromkeys(Phase, 1), message_sizes={FE: 3}, link_bandwidth=1
    )
    spans = simulate(make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=3), costs).spans
    assert [spans[Action(FE, 0, m)][0] for m in range(3)] == [0, 1, 2]
    assert [spans[Action(FE, 1, m)][0] for m in range(3)] == [4, 7, 10]


def test_memory_is_that_of_the_live_graphs() -> None:
    costs = Costs(num_stages=1, num_micro_batches=2, fe_graph_size=10, ff_graph_size=[4], micro_batch_scale=[1, 0.5])
    assert simulate(of("FE0 FE1 FF0 BF0 BE0 FF1 BF1 BE1"), costs).peak_memory == (19,)
    assert simulate(of("FE0 FE1 FF0 FF1 BF0 BE0 BF1 BE1"), costs).peak_memory == (21,)


def test_evaluation_frees_the_graph_after_ff() -> None:
    costs = Costs(num_stages=2, num_micro_batches=9, fe_graph_size=1, phase_times=dict.fromkeys(Phase, 1))
    result = simulate(evaluation_schedule(2, 9), costs)
    assert (result.peak_in_flight, result.peak_ff_graphs, result.peak_memory) == ((3, 1), (0, 0), (3, 1))
    assert result.makespan == result.lower_bound == 2 * 9 + 2


def test_deferred_gradients_fill_the_wait() -> None:
    """Half of BF (2) and of BE (1) waits; stage 0 does BF's while BF_1 and BE_1 of the micro-batch run."""
    costs = Costs(num_stages=2, num_micro_batches=1, phase_times={FE: 1, FF: 1, BF: 4, BE: 2}, deferrable_share=0.5)
    result = simulate(of("FE0 FF0 BF0 BE0 / FE0 FF0 BF0 BE0"), costs)
    assert result.spans[Action(BF, 0, 0)] == (4, 6)
    assert result.spans[Action(BF, 1, 0)] == (6, 8)
    assert result.spans[Action(BE, 1, 0)] == (8, 9)
    assert result.spans[Action(BE, 0, 0)] == (9, 10)
    assert result.deferred_spans == (((6, 8), (10, 11)), ((9, 12),))
    assert result.makespan == 12
    assert result.busy == (8, 8)


def test_a_graph_lives_until_its_deferred_gradients_are_done_and_a_cap_makes_them_run_earlier() -> None:
    row = "FE0 FF0 BF0 BE0 FE1 FF1 BF1 BE1"
    costs = Costs(num_stages=1, num_micro_batches=2, deferrable_share=0.5)
    assert simulate(of(row), costs).peak_in_flight == (2,)
    capped = simulate(of(row), costs, Caps(max_in_flight=1))
    assert capped.peak_in_flight == (1,)
    assert capped.makespan == pytest.approx(2 * 9.1)
    assert simulate(of(row), costs).peak_ff_graphs == (2,)
    assert simulate(of(row), costs, Caps(max_ff_graphs=1)).peak_ff_graphs == (1,)


def test_the_bound_counts_deferred_work_only_beyond_the_way_up() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=4, num_micro_batches=12)
    bound = simulate(schedule, Costs(num_stages=4, num_micro_batches=12, deferrable_share=0.5)).lower_bound
    assert bound == pytest.approx(12 * 9.1 + 3 * 1)


@st.composite
def problems(draw, max_share: float = 0.5) -> tuple[Schedule, Costs]:
    """A schedule of any named family, and costs of all kinds for it."""
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    costs = Costs(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        phase_times={phase: draw(st.lists(times, min_size=num_stages, max_size=num_stages)) for phase in Phase},
        micro_batch_scale=draw(st.lists(times, min_size=num_micro_batches, max_size=num_micro_batches)),
        link_latency=draw(st.floats(0, 2)),
        link_bandwidth=draw(st.sampled_from([0.5, 2.0, math.inf])),
        message_sizes={phase: draw(st.floats(0, 1)) for phase in Phase},
        deferrable_share=draw(st.sampled_from([0.0, max_share])),
    )
    name = draw(st.sampled_from(["gpipe_2nd", "wavek"]))
    sizes = {"num_stages": num_stages, "num_micro_batches": num_micro_batches}
    return make_schedule(name, **sizes, wave_size=draw(st.integers(1, 6))), costs


@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(problem=problems())
def test_nothing_beats_the_bound_and_work_is_conserved(problem) -> None:
    schedule, costs = problem
    result = simulate(schedule, costs)
    assert result.makespan >= result.lower_bound * (1 - 1e-9)
    assert 0 <= result.bubble_lower_bound <= result.bubble_ratio + 1e-9 < 1
    for stage, busy in enumerate(result.busy):
        work = sum(costs.time(a.phase, a.stage, a.micro_batch) for a in schedule.rows[stage])
        assert busy == pytest.approx(work)
        assert busy <= result.makespan * (1 + 1e-9)


@settings(deadline=None)
@given(problem=problems(max_share=0.0))
def test_without_links_the_critical_path_is_as_long_as_the_step(problem) -> None:
    schedule, costs = problem
    costs = replace(costs, link_latency=0.0, message_sizes={})
    result = simulate(schedule, costs)
    assert result.spans[result.critical_path[0]][0] == 0
    assert sum(costs.time(a.phase, a.stage, a.micro_batch) for a in result.critical_path) == pytest.approx(
        result.makespan
    )


def test_costs_for_other_sizes_are_an_error() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=3)
    with pytest.raises(ValueError, match="costs are for 2 stages and 4 micro-batches, the schedule 'gpipe_2nd' has 2"):
        simulate(schedule, Costs(num_stages=2, num_micro_batches=4))


def test_a_schedule_that_cannot_run_is_an_error() -> None:
    with pytest.raises(ValueError, match="BF0 stands before FF0"):
        simulate(of("FE0 BF0 FF0 BE0"), Costs(num_stages=1, num_micro_batches=1))


WRONG_COSTS = {
    "count": ({"micro_batch_scale": [1, 2, 3]}, r"micro_batch_scale has 3 value\(s\), expected 1 or 2"),
    "negative": ({"fe_graph_size": -1}, "fe_graph_size must be finite and not negative, got -1"),
    "nan": ({"link_latency": math.nan}, "link_latency must be finite and not negative"),
    "phase missing": ({"phase_times": {FE: 1, FF: 1}}, "phase_times has no time for BF, BE"),
    "bandwidth": ({"link_bandwidth": 0}, "link_bandwidth must be positive, got 0"),
    "share": ({"deferrable_share": 1}, "deferrable_share must be at least 0 and below 1, got 1"),
}


@pytest.mark.parametrize(("wrong", "message"), WRONG_COSTS.values(), ids=WRONG_COSTS)
def test_wrong_costs_are_errors(wrong, message) -> None:
    with pytest.raises(ValueError, match=message):
        Costs(num_stages=2, num_micro_batches=2, **wrong)


@pytest.mark.parametrize("cap", ["max_in_flight", "max_ff_graphs", "memory_budget"])
def test_caps_of_nothing_are_errors(cap: str) -> None:
    with pytest.raises(ValueError, match=f"{cap} must be"):
        Caps(**{cap: 0})


@pytest.mark.parametrize("module", ["fairchem_janus.schedule", "fairchem_janus.schedule.simulate"])
def test_the_example_in_the_module_is_true(module: str) -> None:
    # not an attribute of the package: there, `simulate` is the function
    assert doctest.testmod(importlib.import_module(module)).failed == 0
