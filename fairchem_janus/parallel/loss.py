"""The loss, normalised once for the whole global batch.

fairchem's `DDPMTLoss` divides by a sample count that it all-reduces over the whole world inside every forward. In a
pipeline only stage 0 takes a loss, and a mean over each micro-batch would depend on how graphs were packed. Here the
valid samples of every task are counted from the labels before the step, summed over the replicas in one small
all-reduce, and every micro-batch's loss gets that denominator. The sum over all micro-batches is then what plain
fairchem computes on their union, however they are packed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.modules.loss import DDPMTLoss
from fairchem.core.units.mlip_unit.mlip_unit import Task, get_output_masks
from torch import nn

from fairchem_janus.parallel.topology import Topology


class NonFiniteLossError(FloatingPointError):
    """A loss is NaN or infinite; `graphs` are positions in the micro-batch."""

    def __init__(self, graphs: list[int]) -> None:
        super().__init__("the loss is not finite")
        self.graphs = graphs


class GlobalLoss(nn.Module):
    """`DDPMTLoss` with a denominator that is set before the step.

    Attributes:
        loss_fn, reduction, coefficient: those of the `DDPMTLoss` it was made from.
        num_samples: denominator of `mean` (valid elements) and `per_structure` (structures with a label) over the
            whole global batch.

    `per_structure` differs from fairchem in one point: fairchem counts structures whose loss is not exactly zero,
    which is known only after the forward (a single atom, whose force is exactly zero, is not counted). Here
    structures with a label are counted.
    """

    def __init__(self, source: DDPMTLoss) -> None:
        super().__init__()
        self.loss_fn = source.loss_fn
        self.reduction = source.reduction
        self.coefficient = source.coefficient
        self.num_samples = 1.0

    def forward(
        self, input: torch.Tensor, target: torch.Tensor, mult_mask: torch.Tensor, natoms: torch.Tensor
    ) -> torch.Tensor:
        """This micro-batch's share of the loss, a scalar; arguments as in `DDPMTLoss.forward`.

        Raises:
            NonFiniteLossError: an element has a loss that is not finite, with or without a label (0 x NaN is NaN).
        """
        target = target.view(input.shape)
        if input.numel() == mult_mask.numel():
            mult_mask = mult_mask.view(input.shape)
        known = torch.nan_to_num(target, nan=0.0, posinf=0.0, neginf=0.0)
        loss = self.loss_fn(input, known, natoms)
        if loss.shape != mult_mask.shape:
            raise ValueError(
                f"{type(self.loss_fn).__name__} gives a loss of shape {tuple(loss.shape)} for labels with a mask of "
                f"shape {tuple(mult_mask.shape)}: fairchem's DDPMTLoss cannot mask that. For forces use L2NormLoss"
            )
        self._check_finite(loss, natoms)
        loss = loss * mult_mask
        if self.reduction == "per_structure":
            atoms = _valid_atoms(mult_mask, natoms)
            loss = loss / torch.where(atoms == 0, natoms, atoms).repeat_interleave(natoms).view(loss.shape)
        total = loss.sum()
        if self.reduction != "sum":
            total = total / self.num_samples
        return self.coefficient * total

    def _check_finite(self, loss: torch.Tensor, natoms: torch.Tensor) -> None:
        bad = ~torch.isfinite(loss.detach())
        if bool(bad.any()):
            rows = bad.view(bad.shape[0], -1).any(1)
            if rows.shape[0] != natoms.shape[0]:
                owner = torch.arange(natoms.shape[0], device=natoms.device).repeat_interleave(natoms)
                graphs = owner[rows].unique()
            else:
                graphs = rows.nonzero().view(-1)
            raise NonFiniteLossError(graphs.tolist())

    def count(self, mult_mask: torch.Tensor, natoms: torch.Tensor) -> torch.Tensor:
        """Samples that a micro-batch adds to the denominator (a scalar)."""
        if self.reduction == "per_structure":
            return (_valid_atoms(mult_mask, natoms) > 0).sum()
        return mult_mask.sum()


def _valid_atoms(mask: torch.Tensor, natoms: torch.Tensor) -> torch.Tensor:
    """Number of unmasked atoms of each structure [num_graphs]."""
    owner = torch.arange(natoms.shape[0], device=natoms.device).repeat_interleave(natoms)
    return torch.bincount(owner[mask.view(-1)], minlength=natoms.shape[0])


def with_global_losses(tasks: Sequence[Task]) -> list[Task]:
    """The tasks, each with a `GlobalLoss` in place of its `DDPMTLoss`.

    Raises:
        ValueError: a task's loss is of another class, or its reduction has nothing to reduce.
    """
    result = []
    for task in tasks:
        if type(task.loss_fn) is not DDPMTLoss:
            raise ValueError(
                f"task {task.name!r} has a loss of type {type(task.loss_fn).__name__}; janus normalises losses over "
                "the whole global batch and knows fairchem.core.modules.loss.DDPMTLoss only"
            )
        if task.loss_fn.reduction == "per_structure" and task.level != "atom":
            raise ValueError(
                f"task {task.name!r} has reduction per_structure, a mean over the atoms of each structure, but one "
                "label a structure (fairchem's DDPMTLoss crashes on it). Use mean"
            )
        # Hydra may hand tasks over as structured configurations, which cannot be copied like the dataclass
        parts = {part.name: getattr(task, part.name) for part in fields(Task)}
        result.append(Task(**{**parts, "loss_fn": GlobalLoss(task.loss_fn)}))
    return result


def count_samples(tasks: Sequence[Task], batches: Iterable[Any]) -> torch.Tensor:
    """Valid samples of each task over some micro-batches [num_tasks], float64, from their labels alone."""
    totals = torch.zeros(len(tasks), dtype=torch.float64)
    for batch in batches:
        masks = get_output_masks(batch, tasks)
        free = batch.fixed == 0
        for i, task in enumerate(tasks):
            mask = masks[task.name]
            if task.level == "atom" and task.train_on_free_atoms:
                mask = mask & free
            totals[i] += task.loss_fn.count(mask, batch.natoms).cpu()
    return totals


def set_normalisers(tasks: Sequence[Task], batches: Iterable[Any], topology: Topology | None = None) -> None:
    """Give every task's loss its denominator for one global batch; every rank must call this.

    Args:
        batches: this rank's micro-batches; those that another rank counts, and None, are left out.
        topology: None if this rank has all of the global batch.
    """
    own = [b for b in batches if b is not None and (topology is None or topology.grid.speaks_for(b))]
    totals = count_samples(tasks, own)
    if topology is not None and topology.gradient_group is not None:
        on_device = totals.to(topology.device)
        dist.all_reduce(on_device, group=topology.gradient_group)
        totals = on_device.cpu()
    for task, total in zip(tasks, totals.tolist(), strict=True):
        task.loss_fn.num_samples = max(total, 1.0)
