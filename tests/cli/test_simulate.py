"""`fairchem-janus simulate`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from subprocess import run

import pytest
import typer
from typer.testing import CliRunner

from fairchem_janus.cli.simulate import register
from fairchem_janus.schedule import make_schedule

app = typer.Typer()
app.callback()(lambda: None)  # a group of commands, as the real command line is
register(app)

SIZES = ["simulate", "--stages", "4", "--micro-batches", "12"]
KEYS = [
    "makespan",
    "bubble_ratio",
    "lower_bound",
    "bubble_lower_bound",
    "peak_in_flight",
    "peak_ff_graphs",
    "per_stage",
]


def as_json(*arguments: str) -> dict:
    result = CliRunner().invoke(app, [*SIZES, "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_json_has_all_the_numbers() -> None:
    numbers = as_json("--phase-times", "1,1.9,3.6,2.6", "--schedule", "gpipe_2nd")
    assert list(numbers) == KEYS
    assert numbers["makespan"] == pytest.approx(136.5)
    assert numbers["bubble_ratio"] == pytest.approx(0.2)
    assert numbers["lower_bound"] == pytest.approx(120)
    assert numbers["bubble_lower_bound"] == pytest.approx(0.09)
    assert (numbers["peak_in_flight"], numbers["peak_ff_graphs"]) == (12, 12)
    assert [stage["stage"] for stage in numbers["per_stage"]] == [0, 1, 2, 3]
    assert all(stage["busy"] + stage["idle"] == pytest.approx(136.5) for stage in numbers["per_stage"])


def test_auto_is_the_default_and_keeps_its_caps() -> None:
    numbers = as_json("--max-in-flight", "8")
    assert numbers["bubble_ratio"] <= 0.10
    assert numbers["peak_in_flight"] <= 8
    assert as_json("--max-in-flight", "12", "--max-ff-graphs", "4")["peak_ff_graphs"] <= 4


def test_split_weight_grad_lowers_the_floor() -> None:
    numbers = as_json("--max-in-flight", "8", "--split-weight-grad")
    assert numbers["bubble_lower_bound"] == pytest.approx(0.027, abs=1e-3)
    assert numbers["bubble_ratio"] <= 0.03


def test_wave_size_is_that_of_wavek() -> None:
    assert as_json("--schedule", "wavek", "--wave-size", "3")["peak_in_flight"] <= 6


def test_phase_times_are_used() -> None:
    assert as_json("--schedule", "gpipe_2nd", "--phase-times", "1,1,1,1")["makespan"] == pytest.approx(60)


def test_graph_parallel_ranks_share_the_work_and_pay_for_halos() -> None:
    whole = as_json("--schedule", "gpipe_2nd")["makespan"]
    arguments = ["--schedule", "gpipe_2nd", "--gp-size", "2", "--halo-share", "0.5"]
    assert as_json(*arguments)["makespan"] == pytest.approx(0.75 * whole)
    assert as_json(*arguments, "--comm-free-share", "1")["makespan"] == pytest.approx(0.5 * whole)
    half = as_json(*arguments, "--comm-free-share", "0.5")["makespan"]
    assert 0.5 * whole < half < 0.75 * whole


def test_a_csv_can_be_simulated(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    make_schedule("wavek", num_stages=4, num_micro_batches=12).to_csv(path)
    assert as_json("--schedule", str(path)) == as_json("--schedule", "wavek")


def test_people_get_a_table_and_a_picture() -> None:
    result = CliRunner().invoke(app, [*SIZES, "--schedule", "wavek", "--wave-size", "6"])
    assert result.exit_code == 0
    for part in ("schedule wavek", "makespan", "bubble ratio", "peak in flight", "rank 3 |", "- FE  = FF"):
        assert part in result.output


WRONG = {
    "schedule": (["--schedule", "best"], "unknown schedule 'best': choose one of auto, wavek, gpipe_2nd"),
    "times": (["--phase-times", "1,2,3"], "--phase-times '1,2,3': expected four numbers"),
    "number": (["--phase-times", "1,2,3,x"], "expected four numbers"),
    "cap": (["--schedule", "gpipe_2nd", "--max-in-flight", "3"], "above the cap of 3"),
    "no cap": (["--max-ff-graphs", "0"], "max_ff_graphs must be at least 1"),
    "file": (["--schedule", "missing.csv"], "missing.csv"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_mistakes_are_one_line_errors(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(app, [*SIZES, *arguments])
    assert result.exit_code == 1
    assert result.stderr.startswith("error: ")
    assert message in result.stderr


def test_planning_needs_neither_torch_nor_fairchem() -> None:
    code = "import sys, fairchem_janus.schedule.draw; print({'torch', 'fairchem'} & set(sys.modules))"
    result = run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert result.stdout.strip() == "set()"
