"""What a benchmark's records amount to."""

from __future__ import annotations

import pytest

from fairchem_janus.bench.figures import BASELINES, EAGER, UNSPLIT, RankRecord, Step, figures, phase_times, replay
from fairchem_janus.engine.timeline import Span
from fairchem_janus.schedule import Action, Costs, Phase, make_schedule, simulate

TIMES = {Phase.FE: 1.0, Phase.FF: 2.0, Phase.BF: 4.0, Phase.BE: 3.0}


def record(rank: int, seconds: dict[str, float], *, rounds: int = 3) -> RankRecord:
    """A rank's share of steps that went exactly as simulated, at P = 2 and N = 2."""
    schedule = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=2)
    simulation = simulate(schedule, Costs(num_stages=2, num_micro_batches=2, phase_times=TIMES))
    spans = [Span(action, *simulation.spans[action], left=8) for action in schedule.rows[rank]]
    cpu_of = {span.action: 10.0 * TIMES[span.action.phase] for span in spans}
    steps = {
        name: [
            Step(value * (1 + turn), 2.0, *(([], {}) if name == UNSPLIT else (spans, cpu_of))) for turn in range(rounds)
        ]
        for name, value in seconds.items()
    }
    return RankRecord(steps, dict.fromkeys(steps, schedule), {"merged": spans, "eager": spans})


def test_figures_of_steps_that_went_as_simulated() -> None:
    seconds = {"auto": 10.0, EAGER: 15.0, UNSPLIT: 40.0, **dict(zip(BASELINES, (20.0, 30.0, 17.0), strict=True))}
    result = figures([record(rank, seconds) for rank in range(2)])
    assert result["speedup_over_1f1b_2nd"] == pytest.approx(2.0)
    assert result["speedup_over_1f1b_2nd_contiguous"] == pytest.approx(3.0)
    assert result["speedup_over_hanayo_2nd"] == pytest.approx(1.7)
    assert result["bubble_measured"] == pytest.approx(result["bubble_simulated"])
    assert result["bubble_measured"] == pytest.approx(1 / 3)  # (N + P - 1) * T with N = P = 2
    assert result["compute_over_unsplit"] == pytest.approx(40.0 / 80.0)  # 2 ranks x 2 micro-batches x 10; the 2nd round
    assert result["split"] == "merged" and result["schedule"].startswith("FE0,FE1,FF0")
    details = result["details"]
    assert details["replayed"]["bubble"] == pytest.approx(1 / 3)
    assert details["replayed"]["speedup_over_1f1b_2nd"] == pytest.approx(1.0)  # all had the same schedule here
    assert details["phase_seconds"]["eager"]["BF"] == [4.0, 4.0]
    assert details["bytes_left"]["merged"]["FE"] == [8.0, 8.0]
    assert set(details["simulated"]) == {"P=2, N=2", "P=2, N=6", "P=4, N=2", "P=4, N=12", "P=8, N=2", "P=8, N=24"}


def test_a_replayed_step_takes_what_the_simulator_says() -> None:
    schedule = make_schedule("1f1b_2nd", num_stages=3, num_micro_batches=4)
    costs = Costs(num_stages=3, num_micro_batches=4, phase_times=TIMES)
    recomputing = {a for row, actions in enumerate(schedule.rows) for a in actions if schedule.recomputes(a.stage, row)}
    seconds = {
        action: TIMES[action.phase] + (TIMES[Phase.FE] if action.phase is Phase.FF and action in recomputing else 0.0)
        for actions in schedule.rows
        for action in actions
    }
    assert replay(schedule, seconds) == pytest.approx(simulate(schedule, costs).makespan)


def test_an_interrupted_phase_does_not_move_the_median() -> None:
    spans = [Span(Action(phase, 0, m), 0.0, 9.0 if m == 1 else 1.0) for phase in Phase for m in range(3)]
    assert phase_times(spans) == {phase: [1.0] for phase in Phase}
