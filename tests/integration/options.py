"""Options of a UMA job, as changes of the stock job, and the cases made of them.

An option has named values; a value changes the canonical configuration. `pairwise_cases` combines them so that every
two values occur together somewhere; `CORNERS` are combinations with a reason of their own.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict

from tests.integration.pairwise import Assignment, pairwise
from tests.integration.variants import adopt, drop_stress, keep_datasets, keep_tasks, stock_config

Change = Callable[[DictConfig], None]

SEED = 0
N = 3
"""Micro-batches a step: more than one wave for P = 2, fewer than stages for P = 4."""

_LOSSES = {
    "per_atom_mae": "PerAtomMAELoss",
    "mae": "MAELoss",
    "mse": "MSELoss",
    "l2norm": "L2NormLoss",
}
_ESCN_MD = "fairchem.core.models.uma.escn_md"
_ESCN_MOE = "fairchem.core.models.uma.escn_moe"
_CHUNK_SIZE = 200


# ---------------------------------------------------------------- changes
def backbone(**values: Any) -> Change:
    return lambda config: config.runner.train_eval_unit.model.backbone.update(values)


def unit(**values: Any) -> Change:
    return lambda config: config.runner.train_eval_unit.update(values)


def janus(**values: Any) -> Change:
    return lambda config: config.runner.janus.update(values)


def together(*changes: Change) -> Change:
    def change(config: DictConfig) -> None:
        for one in changes:
            one(config)

    return change


def nothing(config: DictConfig) -> None:
    """The stock job's own value."""


def model(class_name: str = "TunedModel", **values: Any) -> Change:
    """A model of `tests/integration/models.py`; of two changes the later class wins, and all arguments stay."""

    def change(config: DictConfig) -> None:
        config.runner.train_eval_unit.model.update({"_target_": f"tests.integration.models.{class_name}", **values})

    return change


def each_task(change: Callable[[DictConfig], None], *, of: Sequence[str] = ("energy", "forces", "stress")) -> Change:
    """Change the unit's tasks that predict one of the properties."""

    def change_tasks(config: DictConfig) -> None:
        for task in config.runner.train_eval_unit.tasks:
            if task.property in of:
                change(task)

    return change_tasks


def loss(of: str, name: str, **values: Any) -> Change:
    target = f"fairchem.core.modules.loss.{_LOSSES[name]}"
    return each_task(lambda task: task.loss_fn.update({"loss_fn": {"_target_": target}, **values}), of=(of,))


def reduction(name: str) -> Change:
    """`per_structure` is for forces alone: fairchem's code for it takes one loss an atom."""
    return each_task(
        lambda task: task.loss_fn.update(reduction=name),
        of=("forces",) if name == "per_structure" else ("energy", "forces", "stress"),
    )


def datasets_of(config: DictConfig) -> list[DictConfig]:
    loaders = config.runner.train_dataloader, config.runner.eval_dataloader
    return [dataset for loader in loaders for dataset in loader.dataset.dataset_configs.values()]


def graph_arguments(**values: Any) -> Change:
    def change(config: DictConfig) -> None:
        for dataset in datasets_of(config):
            dataset.a2g_args.update(values)

    return change


def energy_only(config: DictConfig) -> None:
    energy_and_forces(config)
    keep_tasks(config, lambda task: task.property == "energy")
    backbone(regress_forces=False)(config)


def energy_and_forces(config: DictConfig) -> None:
    drop_stress(config)
    backbone(regress_stress=False)(config)


def moe_head(config: DictConfig) -> None:
    (head,) = config.runner.train_eval_unit.model.heads.values()
    mapping = {name: name for name in head.pop("dataset_names")}
    head.update(module=f"{_ESCN_MOE}.DatasetSpecificMoEWrapper", dataset_mapping=mapping)


def plain_head(config: DictConfig) -> None:
    """One MLP_EFS_Head and one task a property, shared by the data sets that have it, as in an eSEN job."""
    runner = config.runner
    runner.train_eval_unit.model.heads = {"efs": {"module": f"{_ESCN_MD}.MLP_EFS_Head"}}
    shared: dict[str, DictConfig] = {}
    for task in runner.train_eval_unit.tasks:
        if task.property in shared:
            shared[task.property].datasets += task.datasets
        else:
            shared[task.property] = task
            task.name = task.property
    runner.train_eval_unit.tasks = list(shared.values())
    for dataset in datasets_of(config):
        dataset.key_mapping = {}


def named_head(config: DictConfig) -> None:
    """A head whose outputs are found under its own name, which is the name of the only task it can serve."""
    plain_head(config)
    (task,) = config.runner.train_eval_unit.tasks
    heads = {task.name: {"module": f"{_ESCN_MD}.MLP_EFS_Head", "wrap_property": False}}
    config.runner.train_eval_unit.model.update(heads=heads, pass_through_head_outputs=False)


def mean_energy(config: DictConfig) -> None:
    """The head's `reduce: mean`: predicts the energy per atom."""
    for head in config.runner.train_eval_unit.model.heads.values():
        (head.head_kwargs if "head_kwargs" in head else head).reduce = "mean"


def shifted_targets(config: DictConfig) -> None:
    """Normalisers with a mean, a different scale for each property, and no element references."""

    def change(task: DictConfig) -> None:
        task.pop("element_references", None)
        task.normalizer.update({"energy": {"mean": -1.5, "rmsd": 2.5}, "forces": {"mean": 0.1, "rmsd": 0.7}}.get(
            task.property, {"mean": 0.0, "rmsd": 0.2}
        ))  # fmt: skip

    each_task(change)(config)


def raw_targets(config: DictConfig) -> None:
    def change(task: DictConfig) -> None:
        task.pop("element_references", None)
        task.normalizer.update(mean=0.0, rmsd=1.0)

    each_task(change)(config)


def only(*properties: str) -> Change:
    """Train on some of what the model predicts."""
    return lambda config: keep_tasks(config, lambda task: task.property in properties)


def shared_head(config: DictConfig) -> None:
    (head,) = config.runner.train_eval_unit.model.heads.values()
    head.dataset_mapping = {"omat": "omat", "omol": "omat"}


def one_micro_batch(config: DictConfig) -> None:
    janus(num_micro_batches=1, wave_size=1)(config)


def keep_pbc(config: DictConfig) -> None:
    for loader in (config.runner.train_dataloader, config.runner.eval_dataloader):
        loader.collate_fn.exclude_keys.remove("pbc")


def _all_but(*modules: str) -> list[str]:
    """Beginnings of the names of all parameters, except those of some modules of the backbone."""
    parts = [f"blocks.{i}" for i in range(4)]
    parts += ["sphere", "charge", "spin", "dataset", "mix_csd", "routing", "composition", "edge_degree", "norm"]
    parts += ["source", "target"]
    frozen = [part for part in parts if not any(name.startswith(part) for name in modules)]
    return ["output_heads", *(f"backbone.{part}" for part in frozen)]


# ---------------------------------------------------------------- options
OPTIONS: Mapping[str, Mapping[str, Change]] = {
    "P": {str(P): janus(pipeline_size=P) for P in (2, 3, 4)},
    "split": {split: janus(split=split) for split in ("merged", "eager")},
    "predicts": {"efs": nothing, "ef": energy_and_forces, "e": energy_only},
    "datasets": {"two": nothing, "one": lambda config: keep_datasets(config, ["omat"])},
    "experts": {str(number): backbone(num_experts=number) for number in (0, 4, 8)},
    "routing": {
        "stock": nothing,
        "moe_dropout": backbone(moe_dropout=0.2),
        "composition_dropout": backbone(composition_dropout=0.3),
        "both_dropouts": backbone(moe_dropout=0.2, composition_dropout=0.3),
        "no_composition": backbone(use_composition_embedding=False),
    },
    "cs_emb_grad": {"on": nothing, "off": backbone(cs_emb_grad=False)},
    "cs_emb": {"rand": nothing, "pos": backbone(chg_spin_emb_type="pos_emb")},
    "dataset_emb_grad": {"on": nothing, "off": backbone(dataset_emb_grad=False)},
    "head": {"single": nothing, "moe": moe_head, "plain": plain_head},
    "reduce": {"sum": nothing, "mean": mean_energy},
    "checkpointing": {
        "off": nothing,
        "chunks": together(model(chunk_size=_CHUNK_SIZE), backbone(activation_checkpointing=True)),
    },
    "act": {"gate": nothing, "s2": backbone(act_type="s2")},
    "ff": {"spectral": nothing, "grid": backbone(ff_type="grid")},
    "wigner": {"quaternion": nothing, "euler": backbone(use_quaternion_wigner=False)},
    "lmax": {f"{lmax}.{mmax}": backbone(lmax=lmax, mmax=mmax) for lmax, mmax in ((2, 2), (3, 1), (3, 2), (4, 2))},
    "norm": {"rms_sh": nothing, "layer": backbone(norm_type="layer_norm"), "sh": backbone(norm_type="layer_norm_sh")},
    "balance": {
        "none": nothing,
        "charge": backbone(charge_balanced_channels=[0]),
        "spin": backbone(spin_balanced_channels=[2, 3]),
        "both": backbone(charge_balanced_channels=[0, 1], spin_balanced_channels=[4]),
    },
    "graph": {
        "forward": nothing,
        "loader": together(
            backbone(otf_graph=False), graph_arguments(r_edges=True, external_graph_method="nvidia")
        ),
    },
    "neighbors": {"all": nothing, "few": together(backbone(max_neighbors=6), graph_arguments(max_neigh=6))},
    "atoms": {"free": nothing, "all": each_task(lambda task: task.update(train_on_free_atoms=False), of=("forces",))},
    "losses": {
        "stock": nothing,
        "mae": together(loss("energy", "mae"), loss("stress", "mse")),
        "mse": loss("energy", "mse"),
    },
    "reduction": {name: reduction(name) for name in ("mean", "sum", "per_structure")},
    "targets": {"stock": nothing, "shifted": shifted_targets, "raw": raw_targets},
    "frozen": {
        "none": nothing,
        "front": model(frozen=["backbone.blocks.0", "backbone.mix_csd", "backbone.sphere", "backbone.edge_degree"]),
    },
    "decay": {
        "one_group": lambda config: config.runner.train_eval_unit.optimizer_fn.update(weight_decay=0.3),
        "two_groups": together(
            model("GroupedModel"), lambda config: config.runner.train_eval_unit.optimizer_fn.update(weight_decay=0.3)
        ),
    },
    "clip": {"idle": nothing, "active": unit(clip_grad_norm=0.05), "off": unit(clip_grad_norm=None)},
    "ema": {"on": unit(ema_decay=0.9), "off": unit(ema_decay=None)},
}  # fmt: skip
"""Option -> value -> change, applied in this order: `predicts` and `datasets` before the heads, which rename tasks."""


def allowed(case: Assignment) -> bool:
    """What an option cannot be combined with: without forces their losses, reductions and atoms say nothing."""
    only_energy = {"atoms": "free", "reduction": "mean"}
    return case.get("predicts") != "e" or all(case.get(name, value) == value for name, value in only_energy.items())


# ---------------------------------------------------------------- cases
@dataclass(frozen=True)
class Case:
    """The stock job with some options set.

    Attributes:
        options: option -> name of its value; the others are as in the stock job.
        change: what no option says, after them.
        D: number of replicas.
        steps: optimizer steps to compare; the second one sees what the first did to the parameters.
        parameter_tolerance: largest accepted relative error of a parameter and of its moving average. AdamW makes steps
            of the learning rate (8e-4) out of gradients that are nothing but rounding.
    """

    name: str
    options: Mapping[str, str] = field(default_factory=dict)
    change: Change = nothing
    D: int = 1
    steps: int = 2
    parameter_tolerance: float = 1e-6

    @property
    def world_size(self) -> int:
        return int(self.options.get("P", "2")) * self.D

    def config(self, data: tuple[str, ...]) -> DictConfig:
        """The canonical configuration, with `data` from `tests/jobs/prepare.py`."""
        config = copy.deepcopy(_base(data))
        with open_dict(config):
            for name, values in OPTIONS.items():
                if name in self.options:
                    values[self.options[name]](config)
            self.change(config)
            keep_tasks(config, lambda task: True)  # the collaters' copies follow the unit's
            _drop_labels_without_task(config)
        return config


def _drop_labels_without_task(config: DictConfig) -> None:
    """fairchem's collater wants the same labels in all samples; those of a task are filled in where they miss."""
    names = {task.name for task in config.runner.train_eval_unit.tasks}
    for dataset in datasets_of(config):
        for label, name in list(dataset.key_mapping.items()):
            if name not in names:
                del dataset.key_mapping[label]
                dataset.a2g_args[f"r_{label}"] = False
                dataset.transforms.pop(f"{label}_reshape_transform", None)


@cache
def _base(data: tuple[str, ...]) -> DictConfig:
    small = ["max_atoms=30", "cutoff_radius=4", f"+runner.janus.wave_size={N - 1}"]
    config = stock_config(data, *adopt(P=2, N=N), *small)
    OmegaConf.set_struct(config, False)
    for task in config.runner.train_eval_unit.tasks:
        if "omol" in task.datasets:  # or signs of absolute errors may add up to a gradient of zero and its rounding
            task.loss_fn.coefficient *= 0.7
    return config


@cache
def pairwise_cases() -> tuple[Case, ...]:
    """Every two values of two options, most new pairs first."""
    names = {name: tuple(values) for name, values in OPTIONS.items()}
    found = pairwise(names, allowed=allowed, seed=SEED)
    return tuple(Case(f"pairs{index:02d}", options) for index, options in enumerate(found))


CORNERS = (
    # recomputation reads the MoLE state of its own micro-batch, all five of them alive at once
    Case(
        "checkpointing_with_five_in_flight",
        {"experts": "8", "routing": "both_dropouts", "head": "moe", "checkpointing": "chunks", "act": "s2"},
        janus(num_micro_batches=5, wave_size=5),
    ),
    # SGD passes a wrong norm, rate or decay straight on to the parameters, where AdamW would hide a factor
    Case(
        "sgd_clipped_with_groups_and_ema",
        {"P": "3", "decay": "two_groups", "clip": "active", "ema": "on"},
        lambda config: config.runner.train_eval_unit.optimizer_fn.update(_target_="torch.optim.SGD", momentum=0.9),
        steps=4,
        parameter_tolerance=1e-12,
    ),
    Case("adamw_clipped_with_groups_and_ema", {"P": "2", "decay": "two_groups", "clip": "active"}, steps=4),
    # denominators over replicas
    Case("two_replicas_mean", {"P": "2"}, D=2),
    Case("two_replicas_sum", {"P": "2", "reduction": "sum", "losses": "mae", "atoms": "all"}, D=2),
    Case("two_replicas_per_structure", {"P": "2", "reduction": "per_structure", "head": "plain"}, D=2),
    # heads whose outputs stay under their name
    Case("named_energy_head", {"P": "3", "predicts": "e"}, named_head),
    # cotangents that are zero at the gate; without energies in the loss the head's last bias gets no gradient, and
    # fairchem's DDP ends in the second step (`test_parameters_without_gradient_...`)
    Case(
        "named_force_head",
        {"P": "2", "predicts": "ef"},
        together(only("forces"), named_head),
        steps=1,
        parameter_tolerance=1e-8,
    ),
    Case("stress_alone_trained", {"P": "3", "datasets": "one"}, only("stress"), steps=1, parameter_tolerance=1e-8),
    Case("forces_predicted_energy_trained", {"P": "3"}, only("energy")),
    Case("stress_predicted_forces_trained", {"P": "2"}, only("energy", "forces")),
    # what trains begins at another stage than 0, or only there
    Case("freeze_backbone", {"P": "4", "decay": "two_groups"}, model(freeze_backbone=True)),
    Case("freeze_backbone_energy_only", {"P": "2", "predicts": "e", "head": "moe"}, model(freeze_backbone=True)),
    Case("only_the_last_block_trains", {"P": "4"}, model(frozen=_all_but("blocks.3"))),
    Case("only_the_atom_embedding_trains", {"P": "4", "split": "eager"}, model(frozen=_all_but("sphere_embedding"))),
    Case("only_the_routing_trains", {"P": "3"}, model(frozen=_all_but("routing_mlp"))),
    Case("only_replicated_modules_train", {"P": "3"}, model(frozen=_all_but("source_embedding", "target_embedding"))),
    # experts in some layers, or for some orders
    Case("experts_in_two_layers", {"P": "4", "experts": "8"}, backbone(layers_moe=[1, 3])),
    Case("experts_for_order_0", {"P": "2", "split": "eager"}, backbone(moe_type="so2m0")),
    Case("pnorm_routing", {"P": "2"}, together(backbone(moe_expert_coefficient_norm="pnorm"), one_micro_batch)),
    Case("experts_in_all_linears", {"P": "2"}, together(backbone(moe_type="all"), one_micro_batch)),
    # data sets
    Case("data_sets_share_an_embedding", {"P": "2"}, backbone(dataset_mapping={"omat": "omat", "omol": "omat"})),
    Case("data_sets_share_a_head", {"P": "3", "head": "moe"}, shared_head),
    Case("no_dataset_embedding", {"P": "2"}, backbone(use_dataset_embedding=False)),
    # graphs
    Case("open_boundaries", {"P": "2"}, together(backbone(always_use_pbc=False), keep_pbc)),
    Case("neighbour_search_1", {"P": "3", "neighbors": "few"}, backbone(radius_pbc_version=1)),
    Case("neighbour_search_3", {"P": "2"}, backbone(radius_pbc_version=3)),
    # sizes
    Case("lmax_4_mmax_4_s2_grid", {"P": "3", "act": "s2", "ff": "grid"}, backbone(lmax=4, mmax=4, sphere_channels=4)),
    Case("mmax_0", {"P": "2"}, backbone(lmax=2, mmax=0)),
    Case("lmax_1", {"P": "2", "act": "s2", "ff": "grid"}, backbone(lmax=1, mmax=1)),
    Case("seven_blocks_on_four_stages", {"P": "4"}, backbone(num_layers=7)),
)
"""Combinations that a pair of options does not make."""
