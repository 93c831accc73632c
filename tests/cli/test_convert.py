"""`fairchem-janus convert` at the command line; what it does to jobs is tested in tests/convert."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from click.testing import Result
from typer.testing import CliRunner

from fairchem_janus.cli.main import app

JOBS = Path(__file__).parents[1] / "jobs"
STOCK_JOB = JOBS / "stock_uma.yaml"


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    yield
    logging.disable(logging.NOTSET)


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["convert", *map(str, arguments)])


def test_without_output_the_job_and_nothing_else_is_printed() -> None:
    result = call(STOCK_JOB, "--pipeline", 4)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["runner"]["janus"] == {"pipeline_size": 4, "num_micro_batches": 8}
    assert "before it was 1" in result.stderr


def test_an_output_file_and_how_to_run_it(tmp_path: Path) -> None:
    output = tmp_path / "job.yaml"
    result = call(STOCK_JOB, "data_root=here", "--pipeline", 2, "--data", 2, "--micro-batches", 3, "-o", output)
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(output.read_text())["job"]["scheduler"]["ranks_per_node"] == 4
    assert f"{output}: D x P x G = 2 x 2 x 1, N = 3. Run it: fairchem -c {output}" in result.stderr
    assert f"add \"hydra.searchpath=['{JOBS}']\"" in result.stderr
    twice = tmp_path / "twice.yaml"
    again = call(output, "--pipeline", 4, "-o", twice, f"hydra.searchpath=['{JOBS}']")
    assert (again.exit_code, again.stdout, twice.exists()) == (2, "", False)
    assert f"error: {output} is a janus job already, and nothing was written." in again.stderr
    assert "runner.janus.pipeline_size=4 " in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.yaml", "--pipeline", 2], "error: none.yaml: no such job file"),
        ([STOCK_JOB, "--pipeline", 0], "error: --pipeline must be at least 1, got 0"),
        ([STOCK_JOB, "--pipeline", 5], "error: janus.pipeline_size=5 is larger than the number of backbone blocks (4)"),
        ([STOCK_JOB, "--pipeline", 2, "-o", STOCK_JOB], f"error: -o {STOCK_JOB} is the job file itself"),
        ([STOCK_JOB, "--pipeline", 2, "-o", "no/folder.yaml"], "error: -o no/folder.yaml: no such folder"),
    ],
)
def test_bad_input_is_an_error_of_one_line(arguments: list[str | Path], message: str) -> None:
    before = STOCK_JOB.read_text()
    result = call(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].startswith(message)
    assert STOCK_JOB.read_text() == before
