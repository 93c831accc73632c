"""Models of UMA's shapes, and micro-batches of rattled crystals with random labels.

>>> model = UMA_S.build(experts=4)
>>> batches = make_batches(2, atoms=16)

Nothing here depends on what a model has learned, so weights and labels are random; times and memory follow from shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from ase.build import bulk
from fairchem.core.datasets.atomic_data import AtomicData
from fairchem.core.models.base import HydraModel
from fairchem.core.modules.loss import DDPMTLoss, L2NormLoss, MAELoss, PerAtomMAELoss
from fairchem.core.modules.normalization.normalizer import Normalizer
from fairchem.core.units.mlip_unit.mlip_unit import OutputSpec, Task, mt_collater_adapter

from fairchem_janus.prepare import key_batches

DATASET = "omat"


@dataclass(frozen=True, kw_only=True, slots=True)
class Size:
    """The shape of a model (design section 7)."""

    blocks: int
    lmax: int
    mmax: int = 2
    channels: int = 128
    experts: int = 32
    cutoff: float = 6.0
    max_neighbors: int = 300

    def build(self, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> HydraModel:
        """A model with these settings, `changes` of them, and random weights; energy, forces and stress."""
        size = replace(self, **changes)
        torch.manual_seed(seed)
        backbone = {
            "model": "fairchem.core.models.uma.escn_moe.eSCNMDMoeBackbone",
            "num_experts": size.experts,
            "moe_layer_type": "pytorch",
            "use_composition_embedding": True,
            "sphere_channels": size.channels,
            "hidden_channels": size.channels,
            "edge_channels": size.channels,
            "num_distance_basis": 64,
            "lmax": size.lmax,
            "mmax": size.mmax,
            "num_layers": size.blocks,
            "cutoff": size.cutoff,
            "max_neighbors": size.max_neighbors,
            "otf_graph": True,
            "norm_type": "rms_norm_sh",
            "act_type": "gate",
            "ff_type": "spectral",
            "direct_forces": False,
            "regress_forces": True,
            "regress_stress": True,
            "chg_spin_emb_type": "rand_emb",
            "cs_emb_grad": True,
            "dataset_emb_grad": True,
            "dataset_mapping": {DATASET: DATASET},
        }
        head = {
            "module": "fairchem.core.models.uma.escn_moe.DatasetSpecificSingleHeadWrapper",
            "head_cls": "fairchem.core.models.uma.escn_md.MLP_EFS_Head",
            "head_kwargs": {"wrap_property": False},
            "dataset_names": [DATASET],
        }
        model = HydraModel(backbone=backbone, heads={"efs": head}, pass_through_head_outputs=True)
        return model.to(dtype).train()


UMA_S = Size(blocks=4, lmax=2)
"""146 M parameters with 32 experts."""

UMA_M = Size(blocks=10, lmax=4)
"""1.4 G parameters with 32 experts."""


_KINDS = {
    "energy": ("system", [1], PerAtomMAELoss),
    "forces": ("atom", [3], L2NormLoss),
    "stress": ("system", [1, 9], MAELoss),
}


def make_tasks(kinds_of: Mapping[str, Iterable[str]] | None = None, *, dtype: str = "float32") -> list[Task]:
    """Tasks with fairchem's losses.

    Args:
        kinds_of: data set -> what it has labels of; default: energy, forces and stress of one data set.
        dtype: of the predictions.
    """
    return [
        Task(
            name=f"{dataset}_{kind}",
            level=_KINDS[kind][0],
            property=kind,
            out_spec=OutputSpec(dim=_KINDS[kind][1], dtype=dtype),
            normalizer=Normalizer(mean=0.0, rmsd=1.0),
            datasets=[dataset],
            loss_fn=DDPMTLoss(_KINDS[kind][2]()),
        )
        for dataset, kinds in (kinds_of or {DATASET: _KINDS}).items()
        for kind in kinds
    ]


def make_batches(
    count: int,
    *,
    atoms: int,
    graphs: int = 1,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    step: int = 0,
) -> list[AtomicData]:
    """Micro-batches as the loader and `BatchPreparation` make them; the same ones every time.

    Args:
        count: micro-batches.
        atoms: of each graph, rounded up to a whole number of cubic cells of copper (4 atoms; about 78 edges an atom
            within 6 A).
        graphs: in each micro-batch.
    """
    generator = torch.Generator().manual_seed(step)
    batches = []
    for index in range(count):
        samples = [_crystal(atoms, index * graphs + i, generator, dtype) for i in range(graphs)]
        batch = mt_collater_adapter(make_tasks())(samples)
        batch["graph_numbers"] = torch.arange(index * graphs, (index + 1) * graphs)
        batches.append(batch.to(device))
    key_batches(batches, seed=0, step=step)
    return batches


def _crystal(atoms: int, seed: int, generator: torch.Generator, dtype: torch.dtype) -> AtomicData:
    cells = -(-atoms // 4)
    structure = bulk("Cu", "fcc", a=3.61, cubic=True).repeat((cells, 1, 1) if cells < 4 else _box(cells))
    structure.rattle(0.1, seed=seed)
    data = AtomicData.from_ase(structure, target_dtype=dtype)
    data["dataset"], data["dataset_name"] = DATASET, DATASET
    data[f"{DATASET}_energy"] = torch.randn(1, generator=generator).to(dtype)
    data[f"{DATASET}_forces"] = torch.randn(len(structure), 3, generator=generator).to(dtype)
    data[f"{DATASET}_stress"] = torch.randn(1, 9, generator=generator).to(dtype)
    return data


def _box(cells: int) -> tuple[int, int, int]:
    """The most compact box of at least that many cells."""
    boxes = [(x, y, -(-cells // (x * y))) for x in range(1, cells + 1) for y in range(1, x + 1)]
    return min(boxes, key=lambda box: (box[0] * box[1] * box[2], max(box) - min(box)))
