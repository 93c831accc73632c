"""Checkpoints under unsplit names: resumed at the same P, and exported to plain fairchem."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core.units.mlip_unit.utils import load_inference_model
from omegaconf import DictConfig
from torch.distributed.checkpoint import FileSystemReader

from tests.integration.train import metrics, train
from tests.integration.variants import adopt, make_variant

STEPS, SAVED_AT = 5, 3


@pytest.fixture(scope="module", params=[1, 2], ids=lambda P: f"P{P}")
def run(request: pytest.FixtureRequest, fake_job: list[str]) -> tuple[int, DictConfig, list[dict[str, Any]]]:
    """A job of five steps that saved a checkpoint at step 3."""
    P = request.param
    config = make_variant(
        "mole-dropout-efs", fake_job, *adopt(P=P, N=2), f"steps={STEPS}", f"checkpoint_every={SAVED_AT}"
    )
    return P, config, train(config, world_size=P)


def checkpoint(config: DictConfig, name: str) -> Path:
    return Path(config.job.metadata.checkpoint_dir) / name


def test_names_are_those_of_the_unsplit_model(run: tuple[int, DictConfig, Any]) -> None:
    _, config, _ = run
    stored = FileSystemReader(checkpoint(config, "final")).read_metadata().state_dict_metadata
    model = load_inference_model(str(checkpoint(config, "final") / "inference_ckpt.pt"), return_checkpoint=False)
    names = {f"unit_state.model.{name}" for name in model.state_dict()}
    assert {key for key in stored if key.startswith("unit_state.model.")} == names
    moments = {f"unit_state.optim.state.{n}.exp_avg" for n, p in model.named_parameters() if p.requires_grad}
    assert moments <= set(stored)


def test_resumed_run_ends_where_the_uninterrupted_one_does(
    run: tuple[int, DictConfig, list[dict[str, Any]]],
) -> None:
    P, config, uninterrupted = run
    resumed_config = config.copy()
    resumed_config.job.timestamp_id = config.job.timestamp_id + "-resumed"
    resumed_config.runner.train_eval_unit.job_config.timestamp_id = resumed_config.job.timestamp_id
    resumed_config.job.metadata.checkpoint_dir = str(checkpoint(config, "") / "of-resumed-run")
    resumed_config.job.runner_state_path = str(checkpoint(config, f"step_{SAVED_AT}"))
    resumed = train(resumed_config, world_size=P)
    for before, after in zip(uninterrupted, resumed, strict=True):
        assert before.keys() == after.keys()
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, msg=name)
    losses = {r["step"]: r["loss"] for r in metrics(config) if "loss" in r}
    assert {r["step"]: r["loss"] for r in metrics(resumed_config) if "loss" in r} == {
        step: losses[step] for step in range(SAVED_AT, STEPS)
    }


def test_a_run_that_max_steps_ended_in_mid_epoch_is_extended_with_the_rest_of_the_epoch(
    run: tuple[int, DictConfig, list[dict[str, Any]]],
) -> None:
    """torchtnt counts the epoch as completed; plain fairchem would leave the rest of its graphs out."""
    P, config, uninterrupted = run
    short, extended = config.copy(), config.copy()
    for name, part in (("short", short), ("extended", extended)):
        part.job.timestamp_id = f"{config.job.timestamp_id}-{name}"
        part.runner.train_eval_unit.job_config.timestamp_id = part.job.timestamp_id
        part.job.metadata.checkpoint_dir = str(checkpoint(config, "") / f"of-{name}-run")
    short.runner.max_steps = SAVED_AT
    train(short, world_size=P)
    extended.job.runner_state_path = str(checkpoint(short, "final"))
    for before, after in zip(uninterrupted, train(extended, world_size=P), strict=True):
        for name in before:
            torch.testing.assert_close(after[name], before[name], rtol=0, atol=0, msg=name)


@pytest.mark.parametrize("run", [2], ids=["P2"], indirect=True)
def test_inference_checkpoint_loads_where_this_package_is_not_installed(run: tuple[int, DictConfig, Any]) -> None:
    _, config, _ = run
    program = (
        "import sys; sys.modules['fairchem_janus'] = None\n"
        "from ase.build import bulk\n"
        "from fairchem.core import FAIRChemCalculator\n"
        "from fairchem.core.units.mlip_unit import load_predict_unit\n"
        f"unit = load_predict_unit({str(checkpoint(config, 'final') / 'inference_ckpt.pt')!r}, device='cpu')\n"
        "atoms = bulk('Si', cubic=True)\n"
        "atoms.calc = FAIRChemCalculator(unit, task_name='omat')\n"
        "assert atoms.get_forces().shape == (8, 3)\n"
        "print('energy', atoms.get_potential_energy())\n"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr[-2000:]
    assert "energy" in result.stdout
