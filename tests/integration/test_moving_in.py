"""A stock job is converted, swept through the fairchem command line, and its checkpoint fine-tuned by another one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fairchem.core._cli import get_hydra_config_from_yaml
from omegaconf import open_dict

from fairchem_janus.convert.convert import convert
from tests.integration.train import metrics, train
from tests.integration.variants import drop_stress, stock_config
from tests.jobs.prepare import STOCK_JOB

ROOT = Path(__file__).parents[2]
JOBS = STOCK_JOB.parent
FINETUNING_JOB = JOBS / "finetune_uma.yaml"


def converted(job: Path, **sizes: int) -> str:
    result = convert(job, pipeline_size=2, **sizes)
    assert result is not None
    return result.text


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", "from fairchem_janus.cli.main import app; app()", "sweep", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT, timeout=400)


def with_groups(job: list[str]) -> list[str]:
    """The data's overrides, for a job file that does not stand beside its groups."""
    return [text.replace("hydra.searchpath=[", f"hydra.searchpath=['{JOBS}',") for text in job]


@pytest.fixture(scope="module")
def swept(fake_job: list[str], tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[str], str]:
    """A folder with one good and one bad run of the converted stock job, the arguments, and what was printed."""
    folder = tmp_path_factory.mktemp("sweep")
    (folder / "janus.yaml").write_text(converted(STOCK_JOB))
    data = [text for text in with_groups(fake_job) if not text.startswith("job.run_dir")]
    arguments = ["-c", str(folder / "janus.yaml"), *data, "runner.janus.num_micro_batches=2,0", "steps=3"]
    arguments += ["max_atoms=60", "checkpoint_every=100", "--sweep-dir", str(folder / "runs")]
    result = sweep(*arguments)
    assert result.returncode == 1, result.stdout + result.stderr
    return folder / "runs", arguments, result.stdout


def test_a_converted_job_runs_through_a_sweep_which_survives_a_bad_member(swept: tuple) -> None:
    folder, _, output = swept
    assert "ValueError: janus.num_micro_batches must be an integer of at least 1, got 0" in output
    good, bad = sorted((path for path in folder.iterdir() if path.is_dir()), key=lambda path: "-0-" in path.name)
    assert json.loads((bad / "sweep.json").read_text())["status"] == "failed"
    assert json.loads((good / "sweep.json").read_text())["status"] == "finished"
    records = [json.loads(line) for line in (good / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [0, 1, 2]
    assert records[-1]["step"] == 3
    assert records[-1]["end"]["completed"] is True
    assert 0.1 < records[-1]["end"]["peak_memory_gib"] < 20
    lines = (folder / "results.csv").read_text().splitlines()
    assert lines[0].startswith("run,status,num_micro_batches,step,loss,val_loss,seconds_per_step")
    assert lines[1].split(",")[1:4] == ["finished", "2", "3"]
    assert float(lines[1].split(",")[4]) == pytest.approx(records[2]["loss"])


def test_run_again_it_leaves_the_finished_run_alone(swept: tuple) -> None:
    folder, arguments, _ = swept
    (good,) = (path for path in folder.iterdir() if path.name.startswith("num_micro_batches-2-"))
    before = (good / "console.log").stat().st_mtime_ns
    again = sweep(*(text.replace("2,0", "2") for text in arguments))
    assert again.returncode == 0, again.stdout + again.stderr
    assert "1/1" in again.stdout and "finished before, left as it is" in again.stdout
    assert (good / "console.log").stat().st_mtime_ns == before


def test_an_unknown_key_surfaces_with_hydras_message(tmp_path: Path) -> None:
    result = sweep("-c", str(STOCK_JOB), "nosuchkey=1,2", "--jobs", "2", "--sweep-dir", str(tmp_path))
    assert result.returncode == 2
    assert result.stderr.count("error: Could not override 'nosuchkey'. To append to your config use +nosuchkey=") == 1
    assert list(tmp_path.iterdir()) == []


def finetune(checkpoints: Path, fake_job: list[str], folder: Path, *overrides: str) -> list[dict[str, Any]]:
    """Fine-tune from `checkpoints/final` with the converted template; returns the run's metrics."""
    data = dict(text.split("=", 1) for text in fake_job)["data_root"].strip("'")
    (folder / "job.yaml").write_text(converted(FINETUNING_JOB, num_micro_batches=2))
    config = get_hydra_config_from_yaml(
        str(folder / "job.yaml"),
        [
            f"hydra.searchpath=['{JOBS}']",
            f"checkpoint_folder='{checkpoints / 'final'}'",
            f"data.train_dataset.splits.train.src='{data}/omat/train'",
            f"data.val_dataset.splits.val.src='{data}/omat/val'",
            f"job.run_dir='{folder}'",
            *overrides,
        ],
    )
    train(config, world_size=2)
    return metrics(config)


def test_the_fine_tuning_template_trains_from_the_swept_runs_checkpoint(
    swept: tuple, fake_job: list[str], tmp_path: Path
) -> None:
    (good,) = (path for path in swept[0].iterdir() if path.name.startswith("num_micro_batches-2-"))
    records = finetune(good / "checkpoints", fake_job, tmp_path)
    assert [record["step"] for record in records if "loss" in record] == [0, 1]
    assert records[-1]["end"]["completed"] is True


def test_the_conserving_phase_starts_from_a_direct_force_checkpoint(fake_job: list[str], tmp_path: Path) -> None:
    """The first phase in plain fairchem, on one rank. fairchem builds its heads once more before it replaces them, and
    MLP_Energy_Head cannot be built on a conserving backbone; MLP_EFS_Head has the same parameters."""
    config = stock_config(fake_job, "direct_forces=true", "regress_stress=false", "steps=1", "checkpoint_every=100")
    drop_stress(config)
    wrapper = "fairchem.core.models.uma.escn_moe.DatasetSpecificSingleHeadWrapper"
    heads = {"energy": "MLP_Energy_Head", "forces": "Linear_Force_Head"}
    with open_dict(config):
        config.job.run_dir = config.runner.train_eval_unit.job_config.run_dir = str(tmp_path)
        config.runner.train_eval_unit.model.heads = {
            name: {
                "module": wrapper,
                "head_cls": f"fairchem.core.models.uma.escn_md.{head}",
                "head_kwargs": {"reduce": "sum"} if name == "energy" else {},
                "dataset_names": ["omol", "omat"],
            }
            for name, head in heads.items()
        }
    train(config, world_size=1)
    overrides = "runner.train_eval_unit.model.overrides"
    checkpoints = Path(config.job.metadata.checkpoint_dir)
    (tmp_path / "conserving").mkdir()
    conserving = [
        f"+{overrides}.backbone.direct_forces=false",
        f"+{overrides}.heads.energy.head_cls=fairchem.core.models.uma.escn_md.MLP_EFS_Head",
    ]
    records = finetune(checkpoints, fake_job, tmp_path / "conserving", *conserving)
    assert [record["step"] for record in records if "loss" in record] == [0, 1]
