"""The stock job in the shapes that the exactness tests need, switched to the pipeline as a user would."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fairchem.core._cli import get_hydra_config_from_yaml
from hydra.core.global_hydra import GlobalHydra
from omegaconf import DictConfig, OmegaConf, open_dict

from tests.jobs.prepare import STOCK_JOB

VARIANTS = ("mole-efs", "dense-ef", "dense-efs-one-dataset", "mole-dropout-efs")

_BACKBONE = "fairchem.core.models.uma.escn_md.eSCNMDBackbone"
_MOLE_KEYS = ("moe_dropout", "moe_layer_type", "num_experts", "use_composition_embedding", "use_global_embedding")


def adopt(*, P: int, N: int, D: int = 1) -> list[str]:
    """The override-only adoption of a stock job."""
    return [
        "runner._target_=fairchem_janus.JanusRunner",
        "+runner._recursive_=false",
        f"+runner.janus.pipeline_size={P}",
        f"+runner.janus.num_micro_batches={N}",
        f"++job.scheduler.ranks_per_node={P * D}",
    ]


def stock_config(data: Sequence[str], *overrides: str) -> DictConfig:
    """The canonical configuration of the stock job."""
    GlobalHydra.instance().clear()
    return get_hydra_config_from_yaml(str(STOCK_JOB), [*data, *overrides])


def make_variant(name: str, data: Sequence[str], *overrides: str) -> DictConfig:
    """The stock job as one of `VARIANTS`.

    - `mole-efs`: as it is: four experts, two data sets with different tasks behind one wrapper, stress on one.
    - `dense-ef`: the dense backbone, energies and forces only.
    - `dense-efs-one-dataset`: the dense backbone, plain MLP_EFS_Head, one periodic data set.
    - `mole-dropout-efs`: experts with both dropouts.
    """
    config = stock_config(data, *overrides)
    with open_dict(config):
        unit = config.runner.train_eval_unit
        if name.startswith("dense"):
            backbone = {key: value for key, value in unit.model.backbone.items() if key not in _MOLE_KEYS}
            unit.model.backbone = {**backbone, "model": _BACKBONE}
        if name == "dense-ef":
            unit.model.backbone.regress_stress = False
            drop_stress(config)
        elif name == "dense-efs-one-dataset":
            keep_datasets(config, ["omat"])
            unit.model.heads = {
                "efs": {"module": "fairchem.core.models.uma.escn_md.MLP_EFS_Head", "prefix": "omat"},
            }
        elif name == "mole-dropout-efs":
            unit.model.backbone.moe_dropout = 0.2
            unit.model.backbone.composition_dropout = 0.3
    return config


def keep_tasks(config: DictConfig, wanted: Any) -> None:
    """Drop tasks, in the unit and in the collaters of both loaders."""
    runner = config.runner
    tasks = [task for task in runner.train_eval_unit.tasks if wanted(task)]
    for node in (runner.train_eval_unit, runner.train_dataloader.collate_fn, runner.eval_dataloader.collate_fn):
        node.tasks = OmegaConf.create(tasks)


def drop_stress(config: DictConfig) -> None:
    keep_tasks(config, lambda task: task.property != "stress")
    for loader in (config.runner.train_dataloader, config.runner.eval_dataloader):
        for dataset in loader.dataset.dataset_configs.values():
            dataset.a2g_args.r_stress = False
            dataset.key_mapping.pop("stress", None)
            dataset.transforms.pop("stress_reshape_transform", None)


def keep_datasets(config: DictConfig, names: list[str]) -> None:
    keep_tasks(config, lambda task: task.datasets[0] in names)
    for loader in (config.runner.train_dataloader, config.runner.eval_dataloader):
        configs = loader.dataset.dataset_configs
        loader.dataset.dataset_configs = {name: configs[name] for name in names}
