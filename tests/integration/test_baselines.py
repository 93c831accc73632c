"""The paper's baselines really run, and are as exact as the folded schedules that they are compared with."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core.units.mlip_unit.utils import load_inference_model
from omegaconf import DictConfig, open_dict

from fairchem_janus.model.stage import is_replicated
from fairchem_janus.schedule import make_schedule
from fairchem_janus.verify.compare import Comparison
from tests.integration.many import Job, compare_all
from tests.integration.options import energy_only
from tests.integration.train import metrics, train
from tests.integration.variants import VARIANTS, adopt, make_variant

BASELINES = ("1f1b_2nd", "1f1b_2nd_contiguous", "hanayo_2nd")

TOLERANCE = 1e-10
"""In float64, where summation order alone leaves about 1e-14."""

PARAMETER_TOLERANCE = 1e-9
"""After four steps: AdamW divides by the root of squared gradients, which magnifies rounding."""

SIZES = {2: (1, 3), 3: (2,), 4: (1, 3, 5)}
"""P -> N: one micro-batch, fewer than stages, and numbers that P does not divide. P = 3 has a middle rank, which holds
one stage only."""


def baseline(data: list[str], schedule: str, *overrides: str, P: int, N: int, D: int = 1, variant: str) -> DictConfig:
    return make_variant(variant, data, *adopt(P=P, N=N, D=D), f"+runner.janus.schedule={schedule}", *overrides)


def exactness(jobs: dict[str, DictConfig], *, world_size: int, steps: int = 1) -> list[Comparison]:
    """Compare jobs with plain fairchem; all must be exact."""
    found = compare_all({name: Job(config, steps) for name, config in jobs.items()}, world_size=world_size)
    results = []
    for name, result in found.items():
        assert isinstance(result, Comparison), f"{name}: {result}"
        assert max(result.loss, result.grad_norm, result.grad) <= TOLERANCE, (name, result)
        results.append(result)
    return results


@pytest.mark.parametrize("P", [2, pytest.param(3, marks=pytest.mark.long), pytest.param(4, marks=pytest.mark.long)])
def test_gradients_equal_single_process(fake_job: list[str], P: int) -> None:
    """Every baseline with every N, the model's variants in turn."""
    pairs = [(schedule, N) for N in SIZES[P] for schedule in BASELINES]
    jobs = {
        f"{schedule}-P{P}-N{N}-{VARIANTS[i % len(VARIANTS)]}": baseline(
            fake_job, schedule, P=P, N=N, variant=VARIANTS[i % len(VARIANTS)]
        )
        for i, (schedule, N) in enumerate(pairs)
    }
    exactness(jobs, world_size=P)


@pytest.mark.long
def test_gradients_of_two_replicas_equal_single_process(fake_job: list[str]) -> None:
    jobs = {s: baseline(fake_job, s, P=2, N=2, D=2, variant="mole-efs") for s in BASELINES}
    exactness(jobs, world_size=4)


def test_energies_alone_checkpointing_and_a_frozen_backbone(fake_job: list[str]) -> None:
    """Without forces only E and uE travel; with checkpointing BF recomputes FF's graph; frozen, BE does nothing."""
    variants = {"energies": "dense-efs-one-dataset", "checkpoint": "mole-efs", "frozen": "mole-efs"}
    jobs = {name: baseline(fake_job, "1f1b_2nd", P=2, N=2, variant=variant) for name, variant in variants.items()}
    for name, config in jobs.items():
        with open_dict(config):
            model = config.runner.train_eval_unit.model
            model.backbone.activation_checkpointing = name == "checkpoint"
            model.freeze_backbone = name == "frozen"
            if name == "energies":
                energy_only(config)
    exactness(jobs, world_size=2)


@pytest.mark.long
def test_several_steps_give_the_same_parameters(fake_job: list[str]) -> None:
    """The gradient norm counts replicated parameters once, so that clipping is fairchem's."""
    clip = "runner.train_eval_unit.clip_grad_norm=0.5"
    jobs = {schedule: baseline(fake_job, schedule, clip, P=2, N=3, variant="mole-efs") for schedule in BASELINES}
    for result in exactness(jobs, world_size=2, steps=4):
        assert result.param <= PARAMETER_TOLERANCE
        assert result.ema <= PARAMETER_TOLERANCE


def test_an_unfolded_schedule_from_a_file_runs_too(fake_job: list[str], tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    make_schedule("1f1b_2nd", num_stages=2, num_micro_batches=3).to_csv(path)
    config = baseline(fake_job, str(path), P=2, N=3, variant="dense-ef")
    exactness({"job": config}, world_size=2)


@pytest.fixture(scope="module", params=BASELINES)
def trained(request: pytest.FixtureRequest, fake_job: list[str]) -> tuple[DictConfig, list[dict[str, Any]]]:
    """A job of four steps, then an evaluation and a checkpoint, and the parameters that each rank holds at the end."""
    config = baseline(fake_job, request.param, "steps=4", "checkpoint_every=4", P=4, N=3, variant="mole-efs")
    return config, train(config, world_size=4)


@pytest.fixture(scope="module")
def folded(fake_job: list[str]) -> DictConfig:
    """The same job on the default schedule."""
    config = baseline(fake_job, "wavek", "steps=4", "checkpoint_every=4", P=4, N=3, variant="mole-efs")
    train(config, world_size=4)
    return config


def test_both_copies_of_a_parameter_stay_equal(trained: tuple[DictConfig, list[dict[str, Any]]]) -> None:
    """To the last bit: the sum over their holders is the same for both."""
    config, held = trained
    holders = Counter(name for parameters in held for name in parameters)
    folded_alone = config.runner.janus.schedule == "hanayo_2nd"
    assert {count for name, count in holders.items() if not is_replicated(name)} == {1 if folded_alone else 2}
    for name in holders:
        first, *others = [parameters[name] for parameters in held if name in parameters]
        assert all(torch.equal(first, other) for other in others), name


def test_evaluation_is_that_of_a_folded_schedule(
    trained: tuple[DictConfig, list[dict[str, Any]]], folded: DictConfig
) -> None:
    """On the moving average after the same four steps, in float32."""
    (ours,), (reference,) = ([r["eval"] for r in metrics(config) if "eval" in r] for config in (trained[0], folded))
    names = [name for name in reference if "_per_second" not in name]
    assert names and all(ours[name] == pytest.approx(reference[name], rel=1e-4, nan_ok=True) for name in names)


def test_a_checkpoint_of_a_baseline_holds_the_whole_model(
    trained: tuple[DictConfig, list[dict[str, Any]]], folded: DictConfig
) -> None:
    ours, reference = (
        load_inference_model(str(Path(config.job.metadata.checkpoint_dir) / "final" / "inference_ckpt.pt"), {})[0]
        for config in (trained[0], folded)
    )
    ours, reference = ours.state_dict(), reference.state_dict()
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        torch.testing.assert_close(ours[name], value, rtol=1e-3, atol=1e-5, msg=name)
