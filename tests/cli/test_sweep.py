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


@pytest.fixture(autouse=True)
def fake_fairchem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    command = tmp_path / "fairchem"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    command.chmod(0o755)
    monkeypatch.setattr(launch, "fairchem_command", lambda: str(command))
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.yaml").write_text("runner: {}\n")


def call(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def test_ends_with_a_table_and_a_csv_file() -> None:
    result = call("sweep", "-c", "job.yaml", "do=ok,fail", "lr=1,2", "--jobs", "2")
    assert result.exit_code == 1, result.output  # two failed
    assert "written to sweeps/job/results.csv" in result.output
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
        (["-c", "job.yaml", "lr=1,2", "--jobs", "0"], "error: --jobs must be at least 1, got 0"),
        (["-c", "job.yaml", "lr=[1,"], "error: lr=[1,: "),
        (["-c", "job.yaml", "job.run_dir=x"], "error: job.run_dir=x: a sweep gives every member its own"),
    ],
)
def test_bad_input_is_an_error_of_one_line(arguments: list[str], message: str) -> None:
    result = call("sweep", *arguments)
    assert result.exit_code == 2
    assert result.output.startswith(message)
    assert result.output.count("\n") == 1
    assert not Path("sweeps").exists()


def test_results_of_the_same_folders() -> None:
    call("sweep", "-c", "job.yaml", "lr=1,2")
    result = call("results", "sweeps", "--json", "--csv", "out/table.csv")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)
    assert [row["lr"] for row in rows] == ["1", "2"]
    assert {row["val/loss"] for row in rows} == {2}
    assert Path("out/table.csv").read_text().splitlines()[0].startswith("run,status,lr,step,loss,val_loss")
    assert "finished" in call("results", "sweeps").output


@pytest.mark.parametrize(("folder", "message"), [("none", "none is not a folder"), (".", ". has no run folder in it")])
def test_results_of_nothing_are_an_error(folder: str, message: str) -> None:
    result = call("results", folder)
    assert result.exit_code == 2
    assert result.output.startswith(f"error: {message}")
