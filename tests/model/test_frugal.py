"""A stage is built in its own memory, with the weights of a model that is built whole."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core.models.base import HydraModel
from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint
from fairchem.core.units.mlip_unit.mlip_unit import initialize_finetuning_model
from omegaconf import OmegaConf
from torch import nn

from fairchem_janus.bench.build_memory import build_peak
from fairchem_janus.model.build import belongs_to, build_stage, stage_parameters
from fairchem_janus.model.frugal import only_blocks
from fairchem_janus.model.partition import partition_blocks
from tests.builders import EFS_HEAD, MOE_HEAD, head_config, model_config, tiny_model

pytestmark = pytest.mark.filterwarnings("ignore:More than 20 figures")

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mole": {"experts": 4},
    "grid": {"experts": 2, "ff_type": "grid", "act_type": "s2", "norm_type": "layer_norm_sh"},
    "mole-everywhere": {"experts": 2, "moe_type": "all"},
    "head-of-experts": {"experts": 2, "heads": head_config(MOE_HEAD)},
    "frozen": {"experts": 2, "freeze_backbone": True},
}


def cut(model: nn.Module, index: int, num_stages: int) -> dict[str, torch.Tensor]:
    build_stage(model, index=index, num_stages=num_stages)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def assert_same(ours: dict[str, torch.Tensor], whole: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == whole.keys()
    for name, tensor in ours.items():
        assert not tensor.is_meta, name
        assert torch.equal(tensor, whole[name]) and tensor.requires_grad == whole[name].requires_grad, name


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", MODELS)
def test_a_stage_has_the_weights_of_the_whole_model_to_the_bit(kind: str, num_stages: int) -> None:
    whole = tiny_model(**MODELS[kind])
    after = torch.get_rng_state()
    ranges = partition_blocks(4, num_stages)
    for index, blocks in enumerate(ranges):
        with only_blocks(4, blocks):
            part = tiny_model(**MODELS[kind])
        assert torch.equal(torch.get_rng_state(), after)  # whatever is drawn next is the same, too
        assert {name: p.shape for name, p in part.named_parameters()} == {
            name: p.shape for name, p in whole.named_parameters()
        }
        assert stage_parameters(part, num_stages) == stage_parameters(whole, num_stages)
        for name, parameter in part.named_parameters():
            own = belongs_to(name, ranges, index) or not name.startswith("backbone.blocks")
            assert parameter.is_meta is not own, name
        assert_same(cut(part, index, num_stages), cut(copy.deepcopy(whole), index, num_stages))


def test_a_stage_that_was_built_without_its_blocks_is_refused() -> None:
    with only_blocks(4, {0, 1}):
        model = tiny_model()
    with pytest.raises(ValueError, match=r"stage 1 holds other parameters than planned: backbone\.blocks\.2"):
        build_stage(model, index=1, num_stages=2)


def test_models_are_built_whole_again_afterwards() -> None:
    with pytest.raises(ZeroDivisionError), only_blocks(4, ()):
        raise ZeroDivisionError
    assert not any(p.is_meta for p in tiny_model().parameters())


# ---------------------------------------------------------------- fine-tuning


def inference_checkpoint(folder: Path) -> str:
    """Of a model with other weights than a new one has."""
    torch.manual_seed(7)
    config = model_config(experts=2)
    model = HydraModel(**{key: value for key, value in config.items() if key != "_target_"})
    path = folder / "inference_ckpt.pt"
    state = model.state_dict()
    torch.save(
        MLIPInferenceCheckpoint(
            model_config=OmegaConf.create(config), model_state_dict=state, ema_state_dict=state, tasks_config={}
        ),
        path,
    )
    return str(path)


@pytest.mark.parametrize("heads", [None, {"new": {"module": EFS_HEAD}}], ids=["kept-heads", "new-heads"])
def test_fine_tuning_starts_from_the_checkpoints_weights(tmp_path: Path, heads: dict[str, Any] | None) -> None:
    path = inference_checkpoint(tmp_path)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return initialize_finetuning_model(path, heads=copy.deepcopy(heads))

    whole = make()
    for index, blocks in enumerate(partition_blocks(4, 2)):
        with only_blocks(4, blocks):
            part = make()
        assert part.finetune_model_full_config == whole.finetune_model_full_config
        assert_same(cut(part, index, 2), cut(copy.deepcopy(whole), index, 2))


@pytest.mark.parametrize("keeps_backbone", [True, False])
def test_a_hydra_model_that_starts_from_another(tmp_path: Path, keeps_backbone: bool) -> None:
    """With a backbone of its own, of another depth, the one of the starting model is built and left."""
    torch.manual_seed(7)
    start = {"backbone": model_config()["backbone"], "heads": head_config(), "pass_through_head_outputs": True}
    path = tmp_path / "start.pt"
    config = {"config": {"model": {"name": "hydra", **copy.deepcopy(start)}}}
    torch.save({**config, "state_dict": HydraModel(**copy.deepcopy(start)).state_dict()}, path)
    own = {} if keeps_backbone else {"backbone": model_config(num_layers=6)["backbone"]}
    num_blocks = 4 if keeps_backbone else 6

    def make() -> nn.Module:
        torch.manual_seed(0)
        return HydraModel(
            finetune_config={"starting_checkpoint": str(path)},
            pass_through_head_outputs=True,
            heads=head_config(),
            **own,
        )

    whole = make()
    for index, blocks in enumerate(partition_blocks(num_blocks, 2)):
        with only_blocks(num_blocks, blocks):
            part = make()
        assert_same(cut(part, index, 2), cut(copy.deepcopy(whole), index, 2))


# ---------------------------------------------------------------- memory


def test_building_takes_the_memory_of_a_stage() -> None:
    """10 blocks at P = 5; the worst stage against the whole model."""
    whole, *stages = build_peak(num_blocks=10, num_stages=5, channels=128, experts=4)
    assert whole.parameter_bytes > 100e6  # large beside what the interpreter does meanwhile
    assert max(stage.peak_bytes for stage in stages) < 0.35 * whole.peak_bytes
