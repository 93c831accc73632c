"""`fairchem-janus data demo`, and the quickstart job on what it writes."""

from pathlib import Path

import pytest
from typer.testing import CliRunner

from fairchem_janus.cli.main import app

ROOT = Path(__file__).parents[2]
COMMAND = ["data", "demo"]
FEW = ["--num-train", "6", "--num-val", "2"]


def test_writes_and_reports(tmp_path: Path) -> None:
    result = CliRunner().invoke(app, [*COMMAND, str(tmp_path / "demo"), *FEW, "--seed", "3"])
    assert result.exit_code == 0, result.output
    assert "emt_bulk" in result.output
    assert f"{tmp_path / 'demo' / 'demo.yaml'} written; force RMS" in result.output
    again = CliRunner().invoke(app, [*COMMAND, str(tmp_path / "demo"), *FEW, "--seed", "3"])
    assert again.exit_code == 0
    assert "is already there" in again.output


def test_refuses_a_folder_with_something_else(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    result = CliRunner().invoke(app, [*COMMAND, str(tmp_path)])
    assert result.exit_code == 2
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("option", [["--num-train", "1"], ["--seed", "-1"]])
def test_refuses_bad_numbers(tmp_path: Path, option: list[str]) -> None:
    assert CliRunner().invoke(app, [*COMMAND, str(tmp_path / "demo"), *option]).exit_code == 2


@pytest.mark.parametrize("pipeline_size", [1, 2, 4])
def test_quickstart_job_composes_on_it(tmp_path: Path, pipeline_size: int) -> None:
    """As the fairchem CLI composes it, which refuses top-level keys that nothing uses."""
    from fairchem.core._cli import get_hydra_config_from_yaml

    assert CliRunner().invoke(app, [*COMMAND, str(tmp_path / "demo"), *FEW]).exit_code == 0
    config = get_hydra_config_from_yaml(
        str(ROOT / "hydra_configs" / "quickstart.yaml"),
        [f"hydra.searchpath=['{tmp_path / 'demo'}']", f"janus=p{pipeline_size}"],
    )
    assert config.job.scheduler.ranks_per_node == config.runner.janus.pipeline_size == pipeline_size
    source = config.runner.eval_dataloader.dataset.dataset_configs.emt_bulk.splits.val.src
    assert source == str(tmp_path / "demo" / "emt_bulk" / "val")
    datasets = {task.name: list(task.datasets) for task in config.runner.train_eval_unit.tasks}
    assert datasets["emt_surface_forces"] == ["emt_surface"]
    assert "emt_surface_stress" not in datasets
