"""`fairchem-janus sweep` and `results`, with a command that stands in for fairchem."""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import pytest
from click.testing import Result
from typer.testing import CliRunner

from fairchem_janus.cli.main import app
from fairchem_janus.sweep import launch

FAKE = Path(__file__).parents[1] / "sweep" / "fake_fairchem.py"
JOB = "{do: ok, lr: 1, runner: {do: '${do}', lr: '${lr}'}}\n"


@pytest.fixture(autouse=True)
def fake_fairchem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "fairchem"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setattr(launch, "fairchem_command", lambda: str(command))
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text(JOB)


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_ends_with_a_table_and_a_csv_file() -> None:
    result = call("sweep", "-c", "job.yaml", "do=ok,fail", "lr=1,2", "--jobs", "2")
    assert result.exit_code == 1, result.output  # two failed
    assert (
        "written to sweeps/job/results.csv; fairchem-janus results sweeps/job shows all runs of the folder"
        in result.output
    )
    assert "ValueError: lr=2 is too large" in result.output
    rows = list(csv.DictReader(Path("sweeps/job/results.csv").read_text().splitlines()))
    assert [(row["do"], row["lr"], row["status"]) for row in rows] == [
        ("ok", "1", "finished"),
        ("ok", "2", "finished"),
        ("fail", "1", "failed"),
        ("fail", "2", "failed"),
    ]
    first = rows[0]
    assert (first["loss"], first["val_loss"], first["atoms_per_second"]) == ("0.25", "2", "100.0")
    assert (first["bubble"], first["memory_gib"], first["seconds_per_step"]) == ("0.25", "0.5", "0.5")
    assert rows[3]["error"] == "ValueError: lr=2 is too large"


def test_without_several_values_it_is_one_run() -> None:
    result = call("sweep", "-c", "job.yaml", "lr=1", "--sweep-dir", "here")
    assert result.exit_code == 0, result.output
    (run,) = [path for path in Path("here").iterdir() if path.is_dir()]
    assert (run / "metrics.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-c", "none.yaml", "lr=1,2"], "error: none.yaml: no such job file"),
        (["-c", "job.yaml", "lr=[1,"], "error: lr=[1,: "),
        (["-c", "job.yaml", "job.run_dir=x"], "error: job.run_dir=x: a sweep gives every member its own"),
        (["-c", "job.yaml", "lrr=1,2"], "error: Could not override 'lrr'. To append to your config use +lrr=1\n"),
        (["-c", "fairchem", "lr=1,2"], "error: Cannot find primary config 'fairchem'"),
        (["-c", "job.yaml", "lr=1", "--sweep-dir", "job.yaml"], "error: no run folders can be made in job.yaml: File"),
        (["-c", "job.yaml", "lr=1", "--sweep-dir", "job.yaml/a"], "error: no run folders can be made in job.yaml/a: N"),
        (["-c", "job.yaml", "lr=1", "--sweep-dir", "/proc/a"], "error: no run folders can be made in /proc/a: "),
    ],
)
def test_bad_input_is_an_error_of_one_line(arguments: list[str], message: str) -> None:
    result = call("sweep", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith(message)
    assert result.output.count("\n") == 1
    assert not Path("sweeps").exists()


def test_members_that_do_not_compose_are_in_the_table_and_not_started() -> None:
    result = call("sweep", "-c", "job.yaml", "+job.device_type=TPU,CPU")
    assert result.exit_code == 1, result.output
    rows = list(csv.DictReader(Path("sweeps/job/results.csv").read_text().splitlines()))
    assert [(row["device_type"], row["status"]) for row in rows] == [("TPU", "failed"), ("CPU", "finished")]
    assert rows[0]["error"] == "Invalid value 'TPU', expected one of [CPU, CUDA] full_key: job.device_type"
    assert not list(Path(rows[0]["folder"]).glob("*.txt"))


def test_the_number_of_runs_at_a_time_has_a_range() -> None:
    result = call("sweep", "-c", "job.yaml", "lr=1,2", "--jobs", "0")
    assert result.exit_code == 2
    assert "--jobs" in result.output
    assert not Path("sweeps").exists()


def test_a_narrower_sweep_has_its_own_runs_in_the_table_and_results_has_all() -> None:
    call("sweep", "-c", "job.yaml", "lr=1,2")
    call("sweep", "-c", "job.yaml", "lr=2")
    assert len(Path("sweeps/job/results.csv").read_text().splitlines()) == 2
    assert len(json.loads(call("results", "sweeps/job", "--json").stdout)) == 2


def test_results_of_the_same_folders() -> None:
    call("sweep", "-c", "job.yaml", "lr=1,2")
    result = call("results", "sweeps", "--json", "--csv", "table.csv")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["lr"] for row in rows] == ["1", "2"]
    assert {row["val/loss"] for row in rows} == {2}
    assert result.stderr == "written to table.csv\n"
    assert Path("table.csv").read_text().splitlines()[0].startswith("run,status,lr,step,loss,val_loss")
    assert "finished" in call("results", "sweeps").output
    assert call("results", "sweeps", "--csv", "table.csv").stdout.endswith("written to table.csv\n")


def test_the_folder_of_the_csv_file_must_be_there() -> None:
    call("sweep", "-c", "job.yaml", "lr=1")
    result = call("results", "sweeps", "--csv", "none/table.csv")
    assert (result.exit_code, result.output) == (2, "error: --csv none/table.csv: no such folder\n")
    assert not Path("none").exists()


@pytest.mark.parametrize(("folder", "message"), [("none", "none is not a folder"), (".", ". has no run folder in it")])
def test_results_of_nothing_are_an_error(folder: str, message: str) -> None:
    result = call("results", folder)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {message}")
