"""Fine-tuning from an inference checkpoint of a UMA-like model: fairchem's ways to do it, each as exact as training."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core.calculate.ase_calculator import FAIRChemCalculator
from fairchem.core.units.mlip_unit.utils import load_inference_model, update_configs
from omegaconf import DictConfig, OmegaConf, open_dict

from fairchem_janus.verify.compare import compare
from tests.integration.many import Job, traces_of
from tests.integration.options import Change, plain_head, together
from tests.integration.train import train
from tests.integration.variants import adopt, keep_tasks, make_variant

TOLERANCE = 1e-10
FINETUNE = "fairchem.core.units.mlip_unit.mlip_unit.initialize_finetuning_model"
EFS_HEAD = "fairchem.core.models.uma.escn_md.MLP_EFS_Head"


@pytest.fixture(scope="module")
def start(fake_job: list[str]) -> Path:
    """`inference_ckpt.pt` of a model with experts, trained for two steps on two data sets."""
    config = make_variant("mole-efs", fake_job, *adopt(P=1, N=1), "steps=2", "checkpoint_every=100")
    train(config, world_size=1)
    return Path(config.job.metadata.checkpoint_dir) / "final" / "inference_ckpt.pt"


@pytest.fixture(scope="module")
def old_start(start: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same weights in the format that `HydraModel(finetune_config=...)` reads."""
    checkpoint = torch.load(start, weights_only=False)
    model, _ = load_inference_model(str(start))
    config = deepcopy(checkpoint.model_config)
    config = OmegaConf.to_container(config) if OmegaConf.is_config(config) else config
    config.pop("_target_", None)
    path = tmp_path_factory.mktemp("old") / "checkpoint.pt"
    torch.save({"config": {"model": {"name": "hydra", **config}}, "state_dict": model.state_dict()}, path)
    return path


def starting_from(checkpoint: Path, **arguments: Any) -> Change:
    """fairchem's fine-tuning template: model settings from the checkpoint, with overrides, heads kept or new."""

    def change(config: DictConfig) -> None:
        overrides = {"backbone": {"max_neighbors": 20}}
        config.runner.train_eval_unit.model = {
            "_target_": FINETUNE,
            "checkpoint_location": str(checkpoint),
            "overrides": overrides,
            **arguments,
        }

    return change


def hydra_model(checkpoint: Path, **arguments: Any) -> Change:
    """`HydraModel(finetune_config=...)` with the job's own heads on the checkpoint's backbone."""

    def change(config: DictConfig) -> None:
        model = config.runner.train_eval_unit.model
        heads, identity = model.heads, model.model_id
        config.runner.train_eval_unit.model = {
            "_target_": model._target_,
            "finetune_config": {"starting_checkpoint": str(checkpoint), "override": {"max_neighbors": 20}},
            "heads": heads,
            "model_id": identity,
            "pass_through_head_outputs": True,
            **arguments,
        }

    return change


def balanced_sampler(config: DictConfig) -> None:
    """The sampler of fairchem's fine-tuning template before 2.0, still in many job files."""
    for loader in (config.runner.train_dataloader, config.runner.eval_dataloader):
        loader.batch_sampler_fn = {
            "_target_": "fairchem.core.common.data_parallel.BalancedBatchSampler",
            "_partial_": True,
            "batch_size": 2,
            "shuffle": True,
            "seed": 0,
        }


NEW_HEAD = {"energyandforcehead": {"module": EFS_HEAD}}


@pytest.fixture(scope="module")
def jobs(fake_job: list[str], start: Path, old_start: Path) -> dict[str, DictConfig]:
    """Jobs at P = 2, by name."""
    changes: dict[str, Change] = {
        "kept heads": starting_from(start),
        "new head": together(plain_head, starting_from(start, heads=NEW_HEAD)),
        "balanced sampler": together(starting_from(start), balanced_sampler),
        "hydra model": hydra_model(old_start),
        "hydra model, frozen": hydra_model(old_start, freeze_backbone=True),
    }
    made = {}
    for name, change in changes.items():
        config = make_variant("mole-efs", fake_job, *adopt(P=2, N=2))
        with open_dict(config):
            change(config)
            keep_tasks(config, lambda task: True)  # the collaters' copies follow the unit's
        made[name] = config
    return made


def test_gradients_equal_single_process(jobs: dict[str, DictConfig]) -> None:
    work = {name: Job(config, steps=2) for name, config in jobs.items()}
    for name, (ours, reference) in traces_of(work, world_size=2).items():
        result = compare(ours, reference)
        assert result.passes(TOLERANCE), f"{name}: {result}"
        frozen = [parameter for parameter in ours.gradients[0] if parameter.startswith("backbone")]
        assert (not frozen) == (name == "hydra model, frozen"), name


@pytest.mark.parametrize("P", [1, 2])
def test_a_fine_tuned_model_is_exported_as_fairchem_does(fake_job: list[str], start: Path, P: int) -> None:
    config = make_variant("mole-efs", fake_job, *adopt(P=P, N=2), "steps=2", "checkpoint_every=100")
    with open_dict(config):
        starting_from(start)(config)
    train(config, world_size=P)
    final = Path(config.job.metadata.checkpoint_dir) / "final" / "inference_ckpt.pt"
    before, after = (torch.load(path, weights_only=False) for path in (start, final))
    assert after.model_config == update_configs(before.model_config, {"backbone": {"max_neighbors": 20}})
    old, model = (load_inference_model(str(path))[0] for path in (start, final))
    assert model.backbone.max_neighbors == 20
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, old.state_dict()[name])]
    assert any(name.startswith("backbone.blocks.0") for name in changed)
    assert any(name.startswith("output_heads") for name in changed)
    assert FAIRChemCalculator.from_model_checkpoint(str(final), task_name="omat", device="cpu") is not None
