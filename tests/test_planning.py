"""From settings and a measured profile to a schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fairchem_janus.config import JanusConfig
from fairchem_janus.planning import (
    WaveTrials,
    caps_of,
    larger_schedule,
    planned_schedule,
    rivals,
    starting_schedule,
    wave_candidates,
)
from fairchem_janus.schedule import FAMILIES, Caps, make_schedule, simulate, validate
from tests.engine.test_profile import profile, stage

TYPICAL = (1.0, 1.9, 3.6, 2.6)


def janus(**settings: Any) -> JanusConfig:
    return JanusConfig(**({"pipeline_size": 4, "num_micro_batches": 12} | settings))


MEASURED = profile(*[stage(TYPICAL)] * 4)


def test_a_named_schedule_is_what_a_job_starts_with() -> None:
    assert starting_schedule(janus(wave_size=3)) == make_schedule(
        "wavek", num_stages=4, num_micro_batches=12, wave_size=3
    )
    assert starting_schedule(janus(schedule="gpipe_2nd")).name == "gpipe_2nd"


def test_waves_shrink_to_the_caps() -> None:
    assert janus(max_in_flight=6).wave_size == 3
    assert janus(max_in_flight=8, max_ff_graphs=2).wave_size == 1
    validate(starting_schedule(janus(max_in_flight=6)), max_in_flight=6)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_in_flight": 5},
        {"max_in_flight": 1},
        {"max_ff_graphs": 1, "max_in_flight": 4},
        {"num_micro_batches": 2},
    ],
)
def test_what_chooses_later_starts_within_the_caps_too(settings: dict[str, Any]) -> None:
    config = janus(schedule="auto", **settings)
    caps = {"max_in_flight": settings.get("max_in_flight", 8), "max_ff_graphs": settings.get("max_ff_graphs")}
    for schedule in (starting_schedule(config), planned_schedule(config, MEASURED)):
        validate(schedule, **caps)
        assert schedule.is_folded


def test_a_plan_is_at_least_as_good_as_every_named_family_within_the_caps() -> None:
    config = janus(schedule="auto", max_in_flight=8)
    costs = MEASURED.costs(12)
    found = rivals(costs, caps_of(config, MEASURED))
    planned = simulate(planned_schedule(config, MEASURED), costs).makespan
    assert planned == min(rival.simulation.makespan for rival in found if rival.fits) == found[0].simulation.makespan
    assert {rival.label.split()[0] for rival in found} == set(FAMILIES)
    assert "wavek k=4" in [rival.label for rival in found]
    assert [rival.fits for rival in found] == sorted((rival.fits for rival in found), reverse=True)


def test_alone_nothing_need_be_in_flight_twice() -> None:
    schedule = planned_schedule(JanusConfig(schedule="auto", num_micro_batches=5), profile(stage(TYPICAL)))
    validate(schedule, max_in_flight=1)


GIB = 2**30


def test_a_memory_budget_is_what_states_and_workspace_leave_for_graphs() -> None:
    heavy = profile(
        *[stage(TYPICAL, state_bytes=s * GIB, fe_graph_bytes=GIB, ff_graph_bytes=GIB) for s in (2, 4, 3, 2)]
    )
    config = janus(schedule="auto", memory_budget_gib=8.0)
    assert caps_of(config, heavy) == Caps(memory_budget=4 * GIB)
    assert max(simulate(planned_schedule(config, heavy), heavy.costs(12)).peak_memory) <= 4 * GIB
    validate(starting_schedule(config), max_in_flight=2)  # nothing is known yet
    for budget in (3, 5.5):
        with pytest.raises(
            ValueError, match=rf"janus\.memory_budget_gib={budget} is too small: .* Set it to at least 6,"
        ):
            planned_schedule(janus(schedule="auto", memory_budget_gib=budget), heavy)
    planned_schedule(janus(schedule="auto", memory_budget_gib=6), heavy)
    with pytest.raises(ValueError, match=r"no wave size keeps within 2 GiB of graphs: raise janus\.max_in_flight"):
        wave_candidates(janus(wave_size="auto", memory_budget_gib=6), heavy)


def test_few_waves_are_worth_trying_the_most_promising_first() -> None:
    config = janus(wave_size="auto", max_in_flight=8)
    candidates = wave_candidates(config, MEASURED)
    assert 1 < len(candidates) <= 4
    times = [simulate(schedule, MEASURED.costs(12)).makespan for schedule in candidates.values()]
    assert times == sorted(times)
    for wave_size, schedule in candidates.items():
        validate(schedule, max_in_flight=8)
        assert schedule.rows == make_schedule("wavek", num_stages=4, num_micro_batches=12, wave_size=wave_size).rows


def test_each_wave_runs_its_steps_and_the_fastest_by_median_wins() -> None:
    schedule = make_schedule("wavek", num_stages=2, num_micro_batches=2)
    trials = WaveTrials({3: schedule, 1: schedule, 2: schedule}, num_steps=3)
    ran = []
    for seconds in (2.0, 2.0, 2.0, 1.0, 1.1, 50.0, 1.2, 1.2, 1.2):
        assert not trials.done
        ran.append(trials.current)
        trials.note(seconds)
    assert ran == [3, 3, 3, 1, 1, 1, 2, 2, 2]
    assert trials.done and trials.current == 1


@pytest.mark.parametrize("schedule", ["wavek", "gpipe_2nd", "auto"])
def test_a_step_with_more_micro_batches_than_planned_still_runs(schedule: str, tmp_path: Path) -> None:
    made = larger_schedule(janus(schedule=schedule), 15, None)
    validate(made)
    assert made.num_micro_batches == 15
    assert made.name == ("gpipe_2nd" if schedule == "gpipe_2nd" else "wavek")


def test_a_larger_step_keeps_within_the_caps_too() -> None:
    config = janus(schedule="gpipe_2nd", max_in_flight=12)
    assert starting_schedule(config).name == "gpipe_2nd"
    validate(larger_schedule(config, 15, None), max_in_flight=12)


# ---------------------------------------------------------------- a CSV file of one's own


def csv(tmp_path: Path, text: str | None = None) -> Path:
    path = tmp_path / "mine.csv"
    made = make_schedule("gpipe_2nd", num_stages=2, num_micro_batches=2).to_csv()
    path.write_text(made if text is None else text)
    return path


def test_a_csv_file_is_the_job_s_schedule(tmp_path: Path) -> None:
    path = csv(tmp_path)
    schedule = starting_schedule(janus(schedule=str(path), pipeline_size=2, num_micro_batches=2))
    assert schedule.to_csv() == path.read_text()
    larger = larger_schedule(janus(schedule=str(path), pipeline_size=2, num_micro_batches=2), 3, None)
    assert (larger.name, larger.num_micro_batches) == ("wavek", 3)


ROW = "FE0,FE1,FF0,FF1,BF0,BF1,BE0,BE1\n"


@pytest.mark.parametrize(
    ("text", "settings", "message"),
    [
        (ROW * 2, {"pipeline_size": 3}, r"mine\.csv, row 3, column 1: the file has 2 row\(s\), but .* 3 stage"),
        (ROW * 2, {"num_micro_batches": 1}, r"mine\.csv, row 1, column 2: cell 'FE1' names micro-batch 1, but a step"),
        (ROW * 2, {"num_micro_batches": 3}, r"'mine', row 1 \(rank 0\), column 9: FE2 is missing"),
        (ROW + ROW.replace("FF0", "XX0"), {}, r"mine\.csv, row 2, column 3: unknown cell 'XX0'"),
        (ROW + ROW.replace("FF0,", ""), {}, r"row 2 \(rank 1\), column 4: FF0 is missing"),
        (ROW + ROW.replace("FF0,FF1,BF0", "BF0,FF1,FF0"), {}, r"row 2 \(rank 1\), column 3: BF0 stands before FF0"),
        (ROW * 2, {"max_in_flight": 1}, r"row 1 \(rank 0\), column 2: FE1 is micro-batch number 2 in flight"),
    ],
    ids=["P", "N too small", "N too large", "unknown cell", "missing", "order", "cap"],
)
def test_what_is_wrong_in_a_csv_file_is_named_by_row_and_column(
    tmp_path: Path, text: str, settings: dict[str, Any], message: str
) -> None:
    path = csv(tmp_path, text)
    with pytest.raises(ValueError, match=message) as caught:
        starting_schedule(janus(**({"schedule": str(path), "pipeline_size": 2, "num_micro_batches": 2} | settings)))
    assert str(caught.value).startswith(f"janus.schedule={path}: ")


def test_a_csv_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"janus.schedule=.*nowhere\.csv: there is no such file"):
        starting_schedule(janus(schedule=str(tmp_path / "nowhere.csv")))
