"""What code around fairchem's training does with a runner: save anywhere, load into a runner that has run, look inside.

The flows are those of fairchem's own tests of its runner; only the runner and the unit are others.
"""

from __future__ import annotations

import json
import os
import sys
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core._cli import main
from fairchem.core.common import distutils, gp_utils
from fairchem.core.components.train.train_runner import get_most_recent_viable_checkpoint_path
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf

from fairchem_janus.parallel.launch import run_on_ranks
from tests.integration.test_edge_cases import plain
from tests.integration.train import start
from tests.integration.variants import adopt, make_variant
from tests.jobs.prepare import STOCK_JOB


def weights(runner: Any) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in runner.train_eval_unit.state_dict()["model"].items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def save_and_load(config: DictConfig, loss: float) -> None:
    """On each rank."""
    runner = start(config, seed=0)
    runner.run()
    unit = runner.train_eval_unit
    assert unit.last_loss == pytest.approx(loss, rel=1e-4)
    assert unit.train_progress.num_steps_completed == config.runner.max_steps
    folder = config.job.metadata.checkpoint_dir
    before = weights(runner)
    final = sorted(os.listdir(os.path.join(folder, "final")))
    runner.save_state(folder)  # not below the folder of checkpoints, but into it
    assert sorted(os.listdir(os.path.join(folder, "final"))) == final
    assert {".metadata", "inference_ckpt.pt", "resume.yaml"} <= set(os.listdir(folder))
    assert get_most_recent_viable_checkpoint_path(folder) is not None

    other_config = deepcopy(config)
    other_config.job.metadata.checkpoint_dir = folder + "-other"
    other = start(other_config, seed=999)
    other.run()
    assert not equal(weights(other), before)
    other.load_state(folder)
    if other.train_eval_unit.lazy_state_location is not None:
        other.train_eval_unit._execute_load_state(folder)
    assert equal(weights(other), before)
    assert other.train_eval_unit.model.module.backbone.max_neighbors == 300


def last_loss(config: DictConfig) -> float:
    runner = start(config, seed=0)
    runner.run()
    return float(runner.train_eval_unit.last_loss)


@pytest.mark.parametrize("P", [1, 2])
def test_train_save_and_load(fake_job: list[str], tmp_path: Path, P: int) -> None:
    """The loss after three steps is the one that plain fairchem has for the same batches."""
    settings = ["steps=3", "checkpoint_every=100", "max_atoms=60"]
    config = make_variant("mole-efs", fake_job, *adopt(P=P, N=1), *settings)
    for part in (config.job, config.runner.train_eval_unit.job_config):
        part.run_dir = str(tmp_path)
    config.job.metadata.checkpoint_dir = str(tmp_path / "checkpoints")
    reference = plain(config)
    reference.job.metadata.checkpoint_dir = str(tmp_path / "plain")
    (loss,) = run_on_ranks(last_loss, reference, world_size=1, timeout_seconds=120.0)
    run_on_ranks(save_and_load, config, loss, world_size=P, timeout_seconds=200.0)


def fairchem(*arguments: str) -> dict[str, Any]:
    """The command in this process, again and again; returns how the training ended."""
    if gp_utils.initialized():
        gp_utils.cleanup_gp()
    distutils.cleanup()
    GlobalHydra.instance().clear()
    sys.argv[1:] = ["-c", *arguments]
    main()
    return json.loads(Path("end.json").read_text())


def train_and_resume(data: list[str], folder: Path, P: int) -> None:
    """Jobs by plain fairchem, by janus, by janus from its own checkpoints as they stand, and into other folders."""
    os.chdir(folder)
    save = "{_target_: tests.jobs.callbacks.SaveAt, steps: [2, 3, 4], checkpoint_every_n_steps: ${checkpoint_every}}"
    end = "{_target_: tests.jobs.callbacks.WriteEnd, path: end.json}"
    few = [
        "+dataset.omat_train.splits.train.sample_n=5",
        "+dataset.omol_train.splits.train.sample_n=9",
        "max_atoms=140",
        "checkpoint_every=100",
        "backbone.num_layers=2",
    ]
    common = [str(STOCK_JOB), *data, *few, f"job.run_dir={folder}", f"runner.callbacks=[{save}, {end}]"]
    unit = "runner.train_eval_unit._target_=fairchem_janus.JanusTrainEvalUnit"  # may be named, needs not be
    jobs: list[tuple[str, list[str], list[str], tuple[int, ...]]] = [
        ("by_epochs", ["epochs=2", "steps=null"], [], (2, 3)),
        ("by_steps", ["epochs=null", "steps=5"], [unit], (4,)),
    ]
    for name, limits, named, resumed in jobs:
        expected = fairchem(*common, *limits, f"+job.timestamp_id={name}_plain")
        ours = fairchem(*common, *limits, *adopt(P=P, N=1), *named, f"+job.timestamp_id={name}")
        assert ours == {**expected, "loss": pytest.approx(expected["loss"], rel=1e-4)}
        assert ours["steps_per_epoch"] == 3, "one checkpoint shall be within an epoch, one between two"
        assert ours["steps"] == {"by_epochs": 6, "by_steps": 5}[name]
        for step in resumed:
            assert fairchem(f"{folder}/{name}/checkpoints/step_{step}/resume.yaml") == ours
    resume_elsewhere(folder / "by_steps" / "checkpoints" / "step_4" / "resume.yaml", folder / "moved")
    plain_resume = folder / "by_steps_plain" / "checkpoints" / "step_4" / "resume.yaml"
    shared = "runner.train_eval_unit.job_config=${job}"
    resume_elsewhere(plain_resume, folder / "switched", *adopt(P=P, N=1), shared)
    if P == 1:
        check_refusals(plain_resume, folder / "moved" / "checkpoints" / "final")


def check_refusals(plain_resume: Path, checkpoint: Path) -> None:
    with pytest.raises(ValueError, match=r"Add this override: 'runner.train_eval_unit.job_config=\$\{job\}'"):
        fairchem(str(plain_resume), *adopt(P=1, N=1), "job.timestamp_id=refused")
    (checkpoint / "__0_0.distcp").write_bytes(b"not what was saved")
    with pytest.raises(RuntimeError, match=r"checkpoints/final is damaged; resume from an earlier one"):
        fairchem(str(checkpoint / "resume.yaml"), "runner.max_steps=6")


def resume_elsewhere(resume: Path, run: Path, *overrides: str) -> None:
    """Into a new run folder, whoever saved the checkpoint: all of the run is there, and nothing is added to the old."""
    before = sorted(resume.parents[2].rglob("*"))
    lines = [path.read_text() for path in before if path.name == "metrics.jsonl"]
    fairchem(str(resume), *overrides, f"job.timestamp_id={run.name}")
    assert sorted(resume.parents[2].rglob("*")) == before
    assert [path.read_text() for path in before if path.name == "metrics.jsonl"] == lines
    first, *_ = (run / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 4
    saved = OmegaConf.load(run / "checkpoints" / "final" / "resume.yaml")
    assert saved.job.timestamp_id == saved.runner.train_eval_unit.job_config.timestamp_id == run.name
    assert saved.runner._target_ == "fairchem_janus.JanusRunner"


@pytest.mark.parametrize("P", [1, pytest.param(2, marks=pytest.mark.long)])  # the latter starts 12 groups of ranks
def test_train_and_resume_by_epochs_and_by_steps(fake_job: list[str], tmp_path: Path, P: int) -> None:
    run_on_ranks(train_and_resume, fake_job, tmp_path, P, world_size=1, timeout_seconds=500.0)
