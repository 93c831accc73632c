"""What a job's model is, read from its configuration before anything is built, and whether it can be trained here."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairchem.core.common.registry import registry
from fairchem.core.models.base import HydraModel, HydraModelV2
from fairchem.core.models.uma.escn_md import MLP_EFS_Head, eSCNMDBackbone
from fairchem.core.models.uma.escn_moe import eSCNMDMoeBackbone
from fairchem.core.units.mlip_unit.mlip_unit import initialize_finetuning_model
from fairchem.core.units.mlip_unit.utils import update_configs
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf

from fairchem_janus.model.heads import SUPPORTED_HEADS, WRAPPERS
from fairchem_janus.model.partition import partition_blocks


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """A model's settings, defaults filled in.

    Attributes:
        backbone_class: eSCNMDBackbone or eSCNMDMoeBackbone.
        backbone: its arguments.
        heads: name -> arguments, with the class's name under `module` or `_target_`.
    """

    backbone_class: type
    backbone: dict[str, Any]
    heads: dict[str, dict[str, Any]]

    @property
    def num_blocks(self) -> int:
        return int(self.backbone["num_layers"])

    @property
    def num_experts(self) -> int:
        return int(self.backbone.get("num_experts", 0))


def _plain(config: Any) -> Any:
    return OmegaConf.to_container(config, resolve=True) if OmegaConf.is_config(config) else config


def read_model_settings(model_config: Mapping[str, Any]) -> ModelSettings:
    """Settings of the model that a job's `train_eval_unit.model` describes; fine-tuning reads the checkpoint's.

    Raises:
        ValueError: the model is built by something unknown.
    """
    config = _plain(model_config)
    target = get_object(config["_target_"])
    if target is initialize_finetuning_model:
        return _settings(_finetuning_config(config))
    if inspect.isclass(target) and issubclass(target, (HydraModel, HydraModelV2)):
        if config.get("finetune_config"):
            config = _starting_checkpoint_config(config)
        return _settings(config)
    raise ValueError(
        f"runner.train_eval_unit.model._target_ is {config['_target_']}; janus knows fairchem's HydraModel and "
        "initialize_finetuning_model"
    )


def _finetuning_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration inside an inference checkpoint, with the job's overrides and heads."""
    location = config["checkpoint_location"]
    if isinstance(location, Mapping):  # the fine-tuning template's: a function that finds, or fetches, it by name
        location = instantiate(location)
    checkpoint = torch.load(location, map_location="cpu", weights_only=False, mmap=True)
    if not hasattr(checkpoint, "model_config"):
        raise ValueError(
            f"checkpoint_location: {location} is no inference checkpoint of fairchem; initialize_finetuning_model "
            "wants the inference_ckpt.pt of a checkpoint folder"
        )
    model = _plain(checkpoint.model_config)
    if config.get("overrides"):
        model = update_configs(model, config["overrides"])
    if config.get("heads"):
        model["heads"] = config["heads"]
    return model


def _starting_checkpoint_config(config: dict[str, Any]) -> dict[str, Any]:
    """`HydraModel(finetune_config=...)`: parts that the job leaves out come from the starting checkpoint."""
    location = config["finetune_config"]["starting_checkpoint"]
    checkpoint = torch.load(location, map_location="cpu", weights_only=False, mmap=True)
    if not isinstance(checkpoint, Mapping):
        raise ValueError(
            f"finetune_config.starting_checkpoint: {location} is an inference checkpoint; HydraModel reads fairchem's "
            "older files, a dictionary with `config` and `state_dict`. Start from this one with initialize_finetuning_"
            "model: {_target_: fairchem.core.units.mlip_unit.mlip_unit.initialize_finetuning_model, "
            "checkpoint_location: FILE, heads: ...}"
        )
    start = _plain(checkpoint["config"]["model"])
    merged = {part: config.get(part) or start.get(part) for part in ("backbone", "heads")}
    merged["backbone"] = merged["backbone"] | config["finetune_config"].get("override", {})
    return merged


def _settings(config: dict[str, Any]) -> ModelSettings:
    backbone = dict(config["backbone"])
    name = backbone.pop("model", None) or backbone.pop("_target_")
    backbone_class = registry.get_model_class(name)
    if backbone_class not in (eSCNMDBackbone, eSCNMDMoeBackbone):
        raise ValueError(
            f"backbone {name} cannot be cut into pipeline stages; janus trains eSCNMDBackbone (eSEN) and "
            "eSCNMDMoeBackbone (UMA) of fairchem.core.models.uma"
        )
    defaults: dict[str, Any] = {}
    for cls in reversed(backbone_class.__mro__):
        if issubclass(cls, eSCNMDBackbone):
            parameters = inspect.signature(cls.__init__).parameters.values()
            defaults |= {p.name: p.default for p in parameters if p.default is not inspect.Parameter.empty}
    heads = {name: dict(head) for name, head in (config.get("heads") or {}).items()}
    return ModelSettings(backbone_class, defaults | backbone, heads)


def check_model(
    settings: ModelSettings,
    *,
    pipeline_size: int,
    num_micro_batches_in_step: int,
    partition: Sequence[int] | None = None,
) -> None:
    """Refuse what cannot be trained exactly.

    Args:
        num_micro_batches_in_step: micro-batches of one global batch, over all replicas.
        partition: blocks of each stage, None for an even split.

    Raises:
        ValueError: with the key and the fix.
    """
    backbone = settings.backbone
    if backbone["direct_forces"]:
        raise ValueError(
            "backbone.direct_forces is true: janus trains conservative models, whose forces are gradients of the "
            "energy. Set backbone.direct_forces=false (it defaults to true); train a direct-force model with "
            "fairchem's own runner and start the conserving phase from its checkpoint here"
        )
    if backbone["regress_hessian"]:
        raise ValueError("backbone.regress_hessian is true: Hessians are not trained by janus; set it to false")
    if backbone["direct_stress"]:
        raise ValueError("backbone.direct_stress is true: janus takes the stress as a gradient; set it to false")
    if backbone["execution_mode"] != "general":
        raise ValueError(
            f"backbone.execution_mode={backbone['execution_mode']!r} is for inference only; set it to 'general'"
        )
    if backbone["chg_spin_emb_type"] == "lin_emb":
        raise ValueError(
            "backbone.chg_spin_emb_type='lin_emb' overwrites the spins of the batch in fairchem, so stages would see "
            "different inputs; use 'pos_emb' or 'rand_emb'"
        )
    if settings.num_experts:
        _check_experts(backbone, num_micro_batches_in_step)
    _check_heads(settings)
    partition_blocks(settings.num_blocks, pipeline_size, partition)


def _check_experts(backbone: dict[str, Any], num_micro_batches_in_step: int) -> None:
    if backbone["moe_single"]:
        raise ValueError(
            "backbone.moe_single=true ties one expert layer across blocks; on later stages it would have a name that "
            "the unsplit model does not have. Set it to false"
        )
    if backbone["moe_expert_coefficient_norm"] == "pnorm" and num_micro_batches_in_step > 1:
        raise ValueError(
            "backbone.moe_expert_coefficient_norm='pnorm' depends on the number of graphs in a batch, so splitting the "
            "batch into micro-batches changes the model (gradients were measured 152 % off). Use 'softmax', or one "
            "micro-batch a step"
        )
    if backbone["moe_type"] in ("all", "notso2") and num_micro_batches_in_step > 1:
        raise ValueError(
            f"backbone.moe_type={backbone['moe_type']!r} mixes experts for atoms too, and fairchem deals them out by "
            "the graphs' numbers of edges: what a graph gets depends on the others in its batch, so micro-batches "
            "change the model. Use 'so2' or 'so2m0', or one micro-batch a step"
        )


def _check_heads(settings: ModelSettings) -> None:
    supported = ", ".join(cls.__name__ for cls in SUPPORTED_HEADS)
    if len(settings.heads) != 1:
        raise ValueError(
            f"the model has {len(settings.heads)} heads ({', '.join(settings.heads) or 'none'}); janus trains exactly "
            f"one energy-force head ({supported}), which gives energy, forces and stress together"
        )
    for name, head in settings.heads.items():
        head_class = _class_of(head.get("module") or head.get("_target_"))
        inner = _class_of(head.get("head_cls")) if head_class in WRAPPERS else head_class
        if head_class not in SUPPORTED_HEADS or inner is not MLP_EFS_Head:
            shown = head.get("module") or head.get("_target_")
            within = f" around {head['head_cls']}" if head.get("head_cls") else ""
            raise ValueError(
                f"head {name!r} is {shown}{within}; janus trains {supported}, wrappers around MLP_EFS_Head only. "
                "Use fairchem.core.models.uma.escn_md.MLP_EFS_Head (with backbone.regress_forces=false for energies "
                "alone)"
            )


def _class_of(name: str | None) -> type | None:
    if name is None:
        return None
    try:
        return registry.get_model_class(name)
    except RuntimeError:
        return None


def check_edges_given(settings: ModelSettings, dataset: Any, *, name: str) -> None:
    """Refuse a backbone that wants its edges from the data together with data that make none: it would see no edges.

    Args:
        dataset: the configuration of the data set of a loader.
        name: of the loader.

    Raises:
        ValueError: some part of the data is loaded without edges.
    """
    if settings.backbone.get("otf_graph", False):
        return
    arguments = dict(_arguments_of_graphs(_plain(dataset), "dataset"))
    without = [path for path, values in arguments.items() if not (values or {}).get("r_edges", False)]
    if without:
        raise ValueError(
            f"backbone.otf_graph is false, so edges must come with the data, but runner.{name}.{without[0]}.a2g_args "
            "has no r_edges: true: the model would see atoms without neighbours. Set it for every data set, with the "
            "backbone's cutoff as radius and max_neighbors as max_neigh, or set backbone.otf_graph=true"
        )


def _arguments_of_graphs(config: Any, path: str) -> Iterator[tuple[str, Any]]:
    """(where, `a2g_args`) of every data set in a configuration."""
    if not isinstance(config, Mapping):
        return
    if "a2g_args" in config:
        yield path, config["a2g_args"]
    for key, value in config.items():
        yield from _arguments_of_graphs(value, f"{path}.{key}")
