"""The energy-force head, split in two: energies on the last stage, predictions at the gate on stage 0.

fairchem's `MLP_EFS_Head` computes energies and differentiates them in one forward. In a pipeline the energies appear on
the last stage and their derivatives are complete only on stage 0. `SplitEFSHead` is the same head (same parameters and
names) with two behaviours, chosen by what the embedding dictionary holds:

- without `given`: compute the energies and leave them in `emb["energy_part"]` (undivided and unreduced, float64
  [num_graphs], eV), the root that FF differentiates;
- with `given` (see `Given`): return the energy, forces and stress predictions that belong to it.

Wrappers (`DatasetSpecificSingleHeadWrapper`, ...) run unmodified around it, so names and masks are fairchem's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from fairchem.core.models.uma.escn_md import MLP_EFS_Head
from fairchem.core.models.uma.escn_moe import DatasetSpecificMoEWrapper, DatasetSpecificSingleHeadWrapper
from fairchem.core.models.uma.outputs import compute_energy, compute_forces, compute_forces_and_stress
from torch import nn

WRAPPERS: tuple[type, ...] = (DatasetSpecificSingleHeadWrapper, DatasetSpecificMoEWrapper)
"""Heads around an inner head, which must be an MLP_EFS_Head."""

SUPPORTED_HEADS: tuple[type, ...] = (MLP_EFS_Head, *WRAPPERS)
"""Heads that can be split."""


@dataclass(slots=True)
class Given:
    """What the gate hands to the head.

    Attributes:
        energy: [num_graphs], eV, float64, total energies.
        grad_pos: dE/dpos [num_atoms, 3], eV/A; None when the model predicts no forces.
        grad_cell: dE/dcell [num_graphs, 3, 3], eV/A; None when the model predicts no stress.
    """

    energy: torch.Tensor
    grad_pos: torch.Tensor | None
    grad_cell: torch.Tensor | None


class SplitEFSHead(MLP_EFS_Head):
    """`MLP_EFS_Head` in its two halves. Made from a built head by `split_head`, never constructed."""

    def forward(self, data: Any, emb: dict[str, Any]) -> dict[str, Any]:
        if "given" in emb:
            return self._predictions(data, emb["given"])
        energy, emb["energy_part"] = compute_energy(
            emb, self.energy_block, data["batch"], len(data["natoms"]), natoms=data["natoms"], reduce=self.reduce
        )
        return self._named("energy", energy.detach())

    def _named(self, name: str, value: torch.Tensor) -> dict[str, Any]:
        return {f"{self.prefix}_{name}" if self.prefix else name: {name: value} if self.wrap_property else value}

    def _predictions(self, data: Any, given: Given) -> dict[str, Any]:
        """Energy, forces and stress with fairchem's own formulas (fairchem.core.models.uma.outputs).

        They differentiate an energy; here it is the linear function <pos, dE/dpos> + <cell, dE/dcell>, whose
        gradients are exactly the given ones.
        """
        energy = given.energy / data["natoms"] if self.reduce == "mean" else given.energy
        outputs = self._named("energy", energy)
        if given.grad_pos is None:
            return outputs
        pos = data["pos"].detach().requires_grad_()
        linear = (pos * given.grad_pos).sum()
        if given.grad_cell is None:
            return outputs | self._named("forces", compute_forces(linear, pos, training=True))
        cell = data["cell"].detach().requires_grad_()
        linear = linear + (cell * given.grad_cell).sum()
        forces, stress = compute_forces_and_stress(linear, pos, cell, batch=data["batch_full"], training=True)
        return outputs | self._named("forces", forces) | self._named("stress", stress)


def inner_head(head: nn.Module) -> nn.Module:
    """The energy-force head inside a wrapper, or the head itself."""
    return head.head if type(head) in WRAPPERS else head


def split_head(head: nn.Module) -> None:
    """Turn a built head into its split form, in place; parameters and names stay."""
    inner = inner_head(head)
    assert type(inner) is MLP_EFS_Head, f"unsupported head {type(inner)} passed the checks"
    inner.__class__ = SplitEFSHead
