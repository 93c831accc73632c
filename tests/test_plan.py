"""`fairchem-janus plan`: measurements of a job turned into what it will run, and shown."""

from __future__ import annotations

import io
import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typer
from rich.console import Console
from typer.testing import CliRunner

from fairchem_janus.cli.plan import register, show, write_files
from fairchem_janus.config import JanusConfig
from fairchem_janus.model.build import StageParameters
from fairchem_janus.parallel.topology import Grid
from fairchem_janus.plan import Measured, Plan, make_plan, plan_job
from fairchem_janus.planning import planned_schedule, starting_schedule
from fairchem_janus.schedule import FAMILIES, Schedule, simulate
from fairchem_janus.schedule.draw import lanes_of
from tests.engine.test_profile import profile, stage
from tests.integration.variants import adopt, make_variant
from tests.jobs.prepare import STOCK_JOB


@pytest.fixture(scope="module")
def plan() -> Plan:
    """A job of two replicas of two stages, the first of them slow."""
    janus = JanusConfig(pipeline_size=2, num_micro_batches=6, schedule="auto")
    measured = profile(
        stage((0.02, 0.04, 0.08, 0.06), blocks=4, block=0.004), stage((0.01, 0.02, 0.04, 0.03), blocks=4, block=0.002)
    )
    schedule = planned_schedule(janus, measured)
    simulation = simulate(schedule, measured.costs(6))
    return make_plan(
        janus,
        Grid.of(world_size=4, pipeline_size=2),
        Measured(
            stages=[StageParameters(range(4), 700, 50, True), StageParameters(range(4, 8), 600, 50, True)],
            profile=measured,
            schedule=schedule,
            recorded=lanes_of(schedule, simulation),
            seconds=1.1 * simulation.makespan,
            bubble=0.2,
            other_seconds=0.01,
        ),
    )


def test_the_plan_is_the_simulation_of_what_the_job_runs(plan: Plan) -> None:
    found = json.loads(json.dumps(plan.to_json()))
    assert found["grid"] == {"D": 2, "P": 2, "G": 1}
    assert found["step_seconds"] == min(f["step_seconds"] for f in found["families"] if f["within_caps"])
    assert found["csv"] == plan.measured.schedule.to_csv()
    assert found["bubble"] >= found["bubble_lower_bound"]
    assert {family["schedule"].split()[0] for family in found["families"]} == set(FAMILIES)
    graphs = [round(peak) for peak in plan.expected.peak_memory]
    assert found["memory"] == [{"states": 1000, "graphs": bytes_, "workspace": 0} for bytes_ in graphs]


def test_a_schedule_by_name_is_held_against_what_auto_would_do(plan: Plan) -> None:
    janus = JanusConfig(pipeline_size=2, num_micro_batches=6, schedule="gpipe_2nd", profile_steps=0)
    named = make_plan(janus, plan.grid, replace(plan.measured, schedule=starting_schedule(janus)))
    assert named.to_json()["schedule"] == "gpipe_2nd" and named.caps == plan.caps
    assert named.rivals[0].simulation.makespan == plan.expected.makespan < named.expected.makespan


def test_a_slow_stage_is_relieved_of_a_block(plan: Plan) -> None:
    """Times are 200 and 100 ms; a block is taken to cost 30 ms on any stage, so moving one leaves 170 ms."""
    assert plan.partition == [4, 4] and plan.proposed == [3, 5]
    assert plan.stage_seconds == pytest.approx((0.2, 0.17))


def test_the_picture_and_the_figures_are_printed(plan: Plan) -> None:
    text = io.StringIO()
    show(plan, Console(file=text, width=120), None)
    shown = text.getvalue()
    for part in ("D=2 x P=2 x G=1", "stage 1: rank 1, 3", "parameters per stage", "auto, planned", "hanayo_2nd"):
        assert part in shown


def test_files_hold_what_was_shown(plan: Plan, tmp_path: Path) -> None:
    write_files(plan, tmp_path)
    assert json.loads((tmp_path / "plan.json").read_text()) == json.loads(json.dumps(plan.to_json()))
    read = Schedule.from_csv(tmp_path / "schedule.csv", num_stages=2, num_micro_batches=6)
    assert read.rows == plan.measured.schedule.rows
    events = json.loads((tmp_path / "plan.trace.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["name"] == "process_name"} == {"planned", "recorded"}
    assert all((tmp_path / name).stat().st_size > 1000 for name in ("planned.png", "recorded.png"))


def test_a_job_is_planned_from_its_own_model_and_data(fake_job: list[str]) -> None:
    config = make_variant("mole-efs", fake_job, *adopt(P=2, N=3, D=2), "+runner.janus.schedule=auto")
    plan = plan_job(config, steps=1, timeout_seconds=300)
    assert plan.grid == Grid(D=2, P=2, G=1, rank=0)
    assert plan.measured.schedule.name == "auto" and plan.measured.profile.num_steps == 1
    assert [len(lane) for lane in plan.measured.recorded] == [12, 12]
    assert 0 < plan.measured.bubble < 1 and 0 < plan.expected.bubble_ratio < 1
    assert all(memory["states"] > 0 and memory["graphs"] > 0 for memory in plan.memory)
    assert not (Path(config.job.run_dir) / config.job.timestamp_id / "metrics.jsonl").exists()


def test_a_job_that_cannot_run_is_an_error_and_exits_with_2(fake_job: list[str], tmp_path: Path) -> None:
    app = typer.Typer()
    app.callback()(lambda: None)  # a group of commands, as the real command line is
    register(app)
    overrides: list[Any] = [*fake_job, *adopt(P=2, N=3), "+runner.janus.wave_size=0"]
    try:
        result = CliRunner().invoke(app, ["plan", "-c", str(STOCK_JOB), *overrides])
    finally:
        logging.disable(logging.NOTSET)
    assert result.exit_code == 2
    assert "janus.wave_size must be an integer of at least 1, got 0" in result.output
