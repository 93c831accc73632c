"""Jobs that cannot be trained exactly are refused from their configuration, naming the key and the fix."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core.models.uma.escn_md import eSCNMDBackbone
from fairchem.core.models.uma.escn_moe import eSCNMDMoeBackbone
from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint
from omegaconf import OmegaConf

from fairchem_janus.config import JanusConfig
from fairchem_janus.job import check_job
from fairchem_janus.model.checks import ModelSettings, check_edges_given, check_model, read_model_settings
from fairchem_janus.parallel.graph import read_graph_parallel
from tests.builders import DENSE, EFS_HEAD, MOE_HEAD, MOLE, SINGLE_HEAD, backbone_config, head_config, model_config

ENERGY_HEAD = "fairchem.core.models.uma.escn_md.MLP_Energy_Head"


def check(config: dict[str, Any], *, pipeline_size: int = 2, num_micro_batches_in_step: int = 4) -> ModelSettings:
    settings = read_model_settings(config)
    check_model(settings, pipeline_size=pipeline_size, num_micro_batches_in_step=num_micro_batches_in_step)
    return settings


def refusal(config: dict[str, Any], **sizes: int) -> str:
    with pytest.raises(ValueError) as caught:
        check(config, **sizes)
    return str(caught.value)


# ---------------------------------------------------------------- what is accepted


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("as_hydra_node", [False, True])
def test_a_conservative_model_is_accepted(experts: int, as_hydra_node: bool) -> None:
    config = model_config(experts=experts)
    settings = check(OmegaConf.create(config) if as_hydra_node else config)
    assert settings.backbone_class is (eSCNMDMoeBackbone if experts else eSCNMDBackbone)
    assert (settings.num_blocks, settings.num_experts) == (4, experts)
    assert list(settings.heads) == ["efs"]


@pytest.mark.parametrize("name", ["escnmd_backbone", "escnmd_moe_backbone", DENSE, MOLE])
def test_backbones_go_by_registered_name_or_path(name: str) -> None:
    settings = check(model_config(model=name))
    assert settings.backbone_class is (eSCNMDMoeBackbone if "moe" in name else eSCNMDBackbone)


@pytest.mark.parametrize(
    "head",
    [
        {"module": EFS_HEAD},
        {"_target_": EFS_HEAD},
        {"module": SINGLE_HEAD, "head_cls": EFS_HEAD, "dataset_names": ["omat"]},
        {"module": MOE_HEAD, "head_cls": EFS_HEAD, "dataset_mapping": {"omat": "omat"}},
    ],
)
def test_energy_force_heads_are_accepted(head: dict[str, Any]) -> None:
    check(model_config(heads={"anything": head}))


def test_fairchems_defaults_stand_in_for_what_the_job_leaves_out() -> None:
    settings = read_model_settings({"_target_": "fairchem.core.models.base.HydraModel", "backbone": {"model": MOLE}})
    assert settings.num_blocks == 2
    assert settings.num_experts == 8
    assert settings.backbone["moe_expert_coefficient_norm"] == "softmax"
    assert settings.backbone["direct_forces"] is True  # as in fairchem: and refused
    assert settings.backbone["execution_mode"] == "general"


def test_a_hydra_model_of_built_parts_is_read_too() -> None:
    backbone = backbone_config()
    backbone["_target_"] = backbone.pop("model")
    head = {"efs": {"_target_": EFS_HEAD}}
    config = {"_target_": "fairchem.core.models.base.HydraModelV2", "backbone": backbone, "heads": head}
    assert check(config).num_blocks == 4


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("settings", "key", "fix"),
    [
        ({"direct_forces": True}, "backbone.direct_forces is true", "Set backbone.direct_forces=false"),
        ({"regress_hessian": True}, "backbone.regress_hessian is true", "set it to false"),
        ({"direct_stress": True}, "backbone.direct_stress is true", "set it to false"),
        (
            {"execution_mode": "umas_fast_gpu"},
            "backbone.execution_mode='umas_fast_gpu' is for inference only",
            "set it to 'general'",
        ),
        (
            {"execution_mode": "umas_fast_pytorch"},
            "backbone.execution_mode='umas_fast_pytorch' is for inference only",
            "set it to 'general'",
        ),
        ({"chg_spin_emb_type": "lin_emb"}, "backbone.chg_spin_emb_type='lin_emb'", "use 'pos_emb' or 'rand_emb'"),
        ({"experts": 4, "moe_single": True}, "backbone.moe_single=true", "Set it to false"),
        (
            {"experts": 4, "moe_expert_coefficient_norm": "pnorm"},
            "backbone.moe_expert_coefficient_norm='pnorm'",
            "Use 'softmax', or one micro-batch a step",
        ),
        (
            {"experts": 4, "moe_type": "all"},
            "backbone.moe_type='all'",
            "Use 'so2' or 'so2m0', or one micro-batch a step",
        ),
        ({"model": "hydra"}, "backbone hydra cannot be cut into pipeline stages", "eSCNMDBackbone (eSEN)"),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else "",
)
def test_a_backbone_that_cannot_be_cut_exactly_is_refused(settings: dict[str, Any], key: str, fix: str) -> None:
    text = refusal(model_config(**settings))
    assert key in text
    assert fix in text


def test_a_job_that_leaves_direct_forces_out_is_told_of_the_default() -> None:
    config = model_config()
    del config["backbone"]["direct_forces"]
    assert "it defaults to true" in refusal(config)


PACKING_DEPENDENT = [{"moe_expert_coefficient_norm": "pnorm"}, {"moe_type": "all"}, {"moe_type": "notso2"}]


@pytest.mark.parametrize("settings", PACKING_DEPENDENT)
def test_what_depends_on_the_rest_of_the_batch_is_accepted_where_a_step_has_one_micro_batch(
    settings: dict[str, Any],
) -> None:
    config = model_config(experts=4, **settings)
    check(config, pipeline_size=4, num_micro_batches_in_step=1)
    text = refusal(config, pipeline_size=1, num_micro_batches_in_step=2)
    ((key, value),) = settings.items()
    assert f"backbone.{key}={value!r}" in text
    assert "or one micro-batch a step" in text


@pytest.mark.parametrize("moe_type", ["so2", "so2m0"])
def test_experts_over_edges_are_accepted(moe_type: str) -> None:
    check(model_config(experts=4, moe_type=moe_type))


@pytest.mark.parametrize("settings", [{"moe_single": True}, *PACKING_DEPENDENT])
def test_options_of_the_experts_do_not_matter_without_experts(settings: dict[str, Any]) -> None:
    check(model_config(model=MOLE, num_experts=0, **settings))


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        ({"module": ENERGY_HEAD}, ENERGY_HEAD),
        ({"module": MOE_HEAD, "head_cls": ENERGY_HEAD}, f"{MOE_HEAD} around {ENERGY_HEAD}"),
        ({"module": SINGLE_HEAD, "head_cls": ENERGY_HEAD}, f"{SINGLE_HEAD} around {ENERGY_HEAD}"),
        ({"module": SINGLE_HEAD}, SINGLE_HEAD),
        ({"module": "no_such_head"}, "no_such_head"),
        ({"module": f"{EFS_HEAD}2"}, f"{EFS_HEAD}2"),
    ],
)
def test_another_head_is_refused_by_name_with_the_one_to_use(head: dict[str, Any], shown: str) -> None:
    text = refusal(model_config(heads={"mine": head}))
    assert f"head 'mine' is {shown};" in text
    assert "Use fairchem.core.models.uma.escn_md.MLP_EFS_Head" in text


@pytest.mark.parametrize(("heads", "count"), [({}, "0 heads (none)"), ({"a": {}, "b": {}}, "2 heads (a, b)")])
def test_exactly_one_head_is_wanted(heads: dict[str, Any], count: str) -> None:
    heads = {name: head_config()["efs"] for name in heads}
    text = refusal(model_config(heads=heads))
    assert f"the model has {count}" in text
    assert "exactly one energy-force head (MLP_EFS_Head, DatasetSpecificSingleHeadWrapper," in text


def test_more_stages_than_blocks_are_refused() -> None:
    text = refusal(model_config(num_layers=3), pipeline_size=4)
    assert "janus.pipeline_size=4 is larger than the number of backbone blocks (3)" in text
    assert "to at most 3" in text


def test_a_model_built_by_something_unknown_is_refused() -> None:
    text = refusal({**model_config(), "_target_": "torch.nn.Linear"})
    assert "runner.train_eval_unit.model._target_ is torch.nn.Linear" in text
    assert "HydraModel and initialize_finetuning_model" in text


# ---------------------------------------------------------------- fine-tuning


def finetuning_job(tmp_path: Path, *, num_layers: int = 3, **job: Any) -> dict[str, Any]:
    """A job that starts from a tiny `inference_ckpt.pt`."""
    location = tmp_path / "inference_ckpt.pt"
    torch.save(
        MLIPInferenceCheckpoint(
            model_config=OmegaConf.create(model_config(experts=2, num_layers=num_layers)),
            model_state_dict={},
            ema_state_dict={},
            tasks_config={},
        ),
        location,
    )
    target = "fairchem.core.units.mlip_unit.mlip_unit.initialize_finetuning_model"
    return {"_target_": target, "checkpoint_location": str(location), **job}


def test_a_fine_tuning_job_is_checked_by_the_checkpoints_model(tmp_path: Path) -> None:
    settings = check(finetuning_job(tmp_path), pipeline_size=3)
    assert (settings.num_blocks, settings.num_experts) == (3, 2)
    text = refusal(finetuning_job(tmp_path), pipeline_size=4)
    assert "janus.pipeline_size=4 is larger than the number of backbone blocks (3)" in text


def test_overrides_of_a_fine_tuning_job_count(tmp_path: Path) -> None:
    job = finetuning_job(tmp_path, overrides={"backbone": {"execution_mode": "umas_fast_gpu"}})
    assert "backbone.execution_mode='umas_fast_gpu'" in refusal(job)


def test_heads_of_a_fine_tuning_job_replace_the_checkpoints(tmp_path: Path) -> None:
    check(finetuning_job(tmp_path, heads={"new": {"module": EFS_HEAD}}))
    assert "head 'new' is" in refusal(finetuning_job(tmp_path, heads={"new": {"module": ENERGY_HEAD}}))


def starting_job(tmp_path: Path, **job: Any) -> dict[str, Any]:
    """A `HydraModel` that starts from a training checkpoint of another."""
    location = tmp_path / "checkpoint.pt"
    torch.save({"config": {"model": model_config(num_layers=3)}}, location)
    finetune = {"starting_checkpoint": str(location), **job.pop("finetune", {})}
    return {"_target_": "fairchem.core.models.base.HydraModel", "finetune_config": finetune, **job}


def test_parts_that_a_starting_checkpoint_gives_are_read_from_it(tmp_path: Path) -> None:
    assert check(starting_job(tmp_path)).num_blocks == 3
    text = refusal(starting_job(tmp_path, heads={"new": {"module": ENERGY_HEAD}}))
    assert "head 'new' is" in text
    text = refusal(starting_job(tmp_path, finetune={"override": {"direct_forces": True}}))
    assert "backbone.direct_forces is true" in text


def test_checkpoints_of_the_other_kind_are_refused_with_what_reads_them(tmp_path: Path) -> None:
    inference = finetuning_job(tmp_path)["checkpoint_location"]
    text = refusal({**starting_job(tmp_path), "finetune_config": {"starting_checkpoint": inference}})
    assert "is an inference checkpoint" in text and "initialize_finetuning_model" in text
    older = starting_job(tmp_path)["finetune_config"]["starting_checkpoint"]
    assert "is no inference checkpoint" in refusal({**finetuning_job(tmp_path), "checkpoint_location": older})


# ---------------------------------------------------------------- the job around the model


def job_refusal(
    *,
    world_size: int = 2,
    gp_size: int = 1,
    unit: dict[str, Any] | None = None,
    janus: dict[str, Any] | None = None,
    **model: Any,
) -> str:
    with pytest.raises(ValueError) as caught:
        check_job(
            {"graph_parallel": {"group_size": gp_size}},
            unit or {},
            JanusConfig.from_mapping(janus or {"pipeline_size": 2, "num_micro_batches": 2}),
            read_model_settings(model_config(**model)),
            world_size=world_size,
            rank=0,
        )
    return str(caught.value)


def test_a_job_that_fits_gives_the_grid_of_ranks() -> None:
    grid = check_job(
        {"graph_parallel": {"group_size": 1}},
        {"train_strategy": "ddp"},
        JanusConfig(pipeline_size=2, num_micro_batches=2),
        read_model_settings(model_config()),
        world_size=4,
        rank=3,
    )
    assert (grid.D, grid.P, grid.G, grid.rank) == (2, 2, 1, 3)


def test_a_world_that_is_no_grid_is_refused() -> None:
    text = job_refusal(world_size=3)
    assert "the world has 3 ranks" in text
    assert "Set job.scheduler.ranks_per_node" in text


def test_a_world_that_does_not_fit_graph_parallelism_is_refused_with_the_grid() -> None:
    text = job_refusal(gp_size=2, world_size=6)
    assert "G = job.graph_parallel.group_size = 2" in text
    assert "  p=0 rank 0 rank 1\n  p=1 rank 2 rank 3" in text


def test_graph_parallelism_that_fairchem_cannot_run_is_refused() -> None:
    with pytest.raises(ValueError, match=r"partition=SPATIAL needs job.graph_parallel.mode=ALL_TO_ALL"):
        read_graph_parallel({"graph_parallel": {"group_size": 2, "mode": "allgather", "partition": "spatial"}})


@pytest.mark.parametrize("size", [0, -1])
def test_a_graph_parallel_size_that_is_none_is_refused(size: int) -> None:
    with pytest.raises(ValueError, match=f"job.graph_parallel.group_size must be at least 1 .* got {size}"):
        read_graph_parallel({"graph_parallel": {"group_size": size}})


def test_the_modes_of_a_resume_file_are_names() -> None:
    config = read_graph_parallel({"graph_parallel": {"group_size": 2, "mode": "ALL_TO_ALL", "partition": "SPATIAL"}})
    assert (config.mode, config.partition) == ("all_to_all", "spatial")


def test_comm_free_micro_batches_fall_into_parts_and_count_as_several() -> None:
    """`pnorm` depends on what else is in a batch."""
    norm = {"experts": 4, "moe_expert_coefficient_norm": "pnorm"}
    janus = {"pipeline_size": 1, "num_micro_batches": 1}
    assert "pnorm" in job_refusal(world_size=2, gp_size=2, janus=janus, **norm)


@pytest.mark.parametrize("strategy", ["fsdp", "FSDP"])
def test_fsdp_is_refused(strategy: str) -> None:
    text = job_refusal(unit={"train_strategy": strategy})
    assert "train_eval_unit.train_strategy=fsdp" in text
    assert "remove it (or set it to ddp)" in text


def test_too_many_stages_are_refused_whatever_the_world() -> None:
    text = job_refusal(world_size=5, janus={"pipeline_size": 5, "num_micro_batches": 5})
    assert "janus.pipeline_size=5 is larger than the number of backbone blocks (4)" in text


def test_pnorm_counts_the_micro_batches_of_all_replicas() -> None:
    """One micro-batch on each of two replicas makes two in the global batch."""
    norm = {"experts": 4, "moe_expert_coefficient_norm": "pnorm"}
    assert "pnorm" in job_refusal(world_size=2, janus={"pipeline_size": 1, "num_micro_batches": 1}, **norm)


def test_pnorm_and_a_budget_that_may_split_the_only_micro_batch_are_refused() -> None:
    norm = {"experts": 4, "moe_expert_coefficient_norm": "pnorm"}
    gars = {"graphs_per_step": 4, "max_atoms": 50}
    assert "pnorm" in job_refusal(
        world_size=1, janus={"pipeline_size": 1, "num_micro_batches": 1, "gars": gars}, **norm
    )


def test_data_without_edges_are_refused_where_the_backbone_makes_none() -> None:
    """fairchem would train on atoms without neighbours, silently."""
    given, missing = {"a2g_args": {"r_edges": True}}, {"a2g_args": {"r_energy": True}}
    loader, own = read_model_settings(model_config(otf_graph=False)), read_model_settings(model_config())
    dataset = {"dataset_configs": {"omat": given, "omol": missing}}
    with pytest.raises(ValueError) as caught:
        check_edges_given(loader, OmegaConf.create(dataset), name="train_dataloader")
    assert "runner.train_dataloader.dataset.dataset_configs.omol.a2g_args has no r_edges: true" in str(caught.value)
    check_edges_given(own, dataset, name="train_dataloader")
    check_edges_given(loader, {"dataset_configs": {"omat": given}}, name="train_dataloader")
