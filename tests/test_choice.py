"""When a run changes its schedule, and what it remembers."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fairchem_janus.choice import ScheduleChoice
from fairchem_janus.config import JanusConfig
from fairchem_janus.engine.profile import Profile
from fairchem_janus.engine.step import StepReport
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.planning import planned_schedule, starting_schedule
from fairchem_janus.schedule import Schedule, make_schedule
from tests.engine.test_profile import profile, stage

MEASURED = profile(*[stage((1.0, 1.9, 3.6, 2.6))] * 2)

TWO_STAGES = Topology(Grid(D=1, P=2, G=1, rank=0), torch.device("cpu"))
"""As rank 0 of a pipeline of two sees it; what is broadcast stays here."""


class Profiler:
    """Notes when it is asked for what."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self) -> None:
        self.calls.append("start")

    def note(self, batches: Any) -> None:
        self.calls.append("note")

    def finish(self, schedule: Schedule) -> Profile:
        self.calls.append("finish")
        return MEASURED


def choice(folder: Path, **settings: Any) -> ScheduleChoice:
    config = JanusConfig(**({"pipeline_size": 2, "num_micro_batches": 4} | settings))
    return ScheduleChoice(config, TWO_STAGES, Profiler(), folder)  # type: ignore[arg-type]


def report(*, seconds: float = 1.0, num_micro_batches: int = 4, finite: bool = True) -> StepReport:
    norm = 1.0 if finite else float("nan")
    values = {"losses": [], "bad": [], "num_bad": 0, "num_graphs": 4, "num_atoms": 10, "loss": 0.0, "bubble": 0.1}
    return StepReport(
        **values, grad_norm=norm, seconds=seconds, pipeline_seconds=seconds, num_micro_batches=num_micro_batches
    )


def run(chosen: ScheduleChoice, num_steps: int, **values: Any) -> None:
    for _ in range(num_steps):
        chosen.after_step(report(**values), [None] * 4)


def test_the_first_step_warms_up_and_the_next_ones_are_profiled(tmp_path: Path) -> None:
    chosen = choice(tmp_path, profile_steps=2)
    run(chosen, 6)
    assert chosen.profiler.calls == ["start", "note", "note", "finish"]
    assert json.loads((tmp_path / "profile.json").read_text())["stages"][1]["phase_seconds"]["BF"] == 3.6
    assert chosen.current == starting_schedule(chosen.config)
    assert not (tmp_path / "schedule.csv").exists()


def test_without_profile_steps_nothing_is_measured(tmp_path: Path) -> None:
    chosen = choice(tmp_path, profile_steps=0)
    run(chosen, 3)
    assert chosen.profiler.calls == [] and not list(tmp_path.iterdir())


def test_auto_changes_to_the_plan_once_it_has_its_profile(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    chosen = choice(tmp_path, schedule="auto", profile_steps=2)
    planned = planned_schedule(chosen.config, MEASURED)
    run(chosen, 2)
    assert chosen.schedule(4).rows == starting_schedule(chosen.config).rows != planned.rows
    with caplog.at_level(logging.INFO):
        run(chosen, 1)
    assert chosen.schedule(4) == planned
    (line,) = [r.getMessage() for r in caplog.records]
    assert line.startswith("janus: auto planned ") and "from step 3 of this run on" in line
    assert (tmp_path / "schedule.csv").read_text() == planned.to_csv()
    run(chosen, 20)
    assert chosen.schedule(4) == planned


def test_wave_sizes_are_tried_five_steps_each_and_the_fastest_stays(tmp_path: Path) -> None:
    chosen = choice(tmp_path, wave_size="auto", profile_steps=1)
    run(chosen, 2)
    seconds, ran = {1: 3.0, 2: 1.0, 3: 2.0, 4: 2.5}, []
    for _ in range(40):
        if chosen.settled:
            break
        size = chosen._wave_size
        ran.append(size)
        assert chosen.schedule(4).rows == waves(size).rows
        run(chosen, 1, seconds=seconds[size], num_micro_batches=2)  # not full: does not count
        run(chosen, 1, seconds=seconds[size], finite=False)  # left out: neither
        run(chosen, 1, seconds=seconds[size])
    assert 1 < len(set(ran)) <= 4 and all(ran.count(size) == 5 for size in ran)
    assert chosen._wave_size == min(set(ran), key=lambda size: seconds[size])
    assert chosen.schedule(4).rows == waves(chosen._wave_size).rows


def waves(wave_size: int | None) -> Schedule:
    return make_schedule("wavek", num_stages=2, num_micro_batches=4, wave_size=wave_size)


@pytest.mark.parametrize("settings", [{"schedule": "auto"}, {"wave_size": "auto"}], ids=["auto", "waves"])
def test_what_was_chosen_survives_a_resume(tmp_path: Path, settings: dict[str, Any]) -> None:
    before = choice(tmp_path, **settings)
    assert before.state() == "null"
    run(before, 40)
    after = choice(tmp_path, **settings)
    after.load(before.state())
    assert after.settled and after.schedule(4).rows == before.schedule(4).rows
    run(after, 10)
    assert after.profiler.calls[-1] == "finish"  # measured again, for the record
    assert after.schedule(4).rows == before.schedule(4).rows and after.state() == before.state()


@pytest.mark.parametrize(
    "other", [{"num_micro_batches": 5}, {"max_in_flight": 3}, {"partition": [1, 3]}, {"split": "eager"}]
)
def test_a_choice_for_other_settings_is_made_again(tmp_path: Path, other: dict[str, Any]) -> None:
    before = choice(tmp_path, schedule="auto")
    run(before, 5)
    after = choice(tmp_path, schedule="auto", **other)
    after.load(before.state())
    assert not after.settled and after.current == starting_schedule(after.config)


def test_a_job_with_a_schedule_of_its_own_ignores_what_was_chosen(tmp_path: Path) -> None:
    before = choice(tmp_path, schedule="auto")
    run(before, 5)
    after = choice(tmp_path, schedule="gpipe_2nd")
    after.load(before.state())
    assert after.current.name == "gpipe_2nd" and after.state() == "null"


def test_steps_of_other_sizes_have_schedules_of_their_own(tmp_path: Path) -> None:
    chosen = choice(tmp_path, schedule="auto", profile_steps=1)
    for _ in range(2):
        for size in (0, 1, 3, 4, 6):
            schedule = chosen.schedule(size)
            assert schedule.num_micro_batches == size
            assert schedule.rows == chosen.current.truncated(size).rows if 0 < size <= 4 else True
        run(chosen, 2)
    assert chosen.settled


def test_a_budget_that_nothing_keeps_is_an_error_on_every_rank(tmp_path: Path) -> None:
    chosen = choice(tmp_path, schedule="auto", memory_budget_gib=1e-9)
    with pytest.raises(ValueError, match="memory_budget_gib=1e-09 is too small"):
        run(chosen, 5)


def test_the_recorded_step_is_written_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []
    monkeypatch.setattr("fairchem_janus.choice.write_recording", lambda *arguments: written.append(arguments))
    chosen = choice(tmp_path, trace=True, schedule="auto", profile_steps=1)
    chosen.profiler.runtime = SimpleNamespace(timeline=None)
    run(chosen, 3)
    assert written == []
    run(chosen, 7)
    ((_, schedule, _, folder),) = written
    assert schedule == chosen.current and folder == tmp_path
