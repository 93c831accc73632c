"""Parts that a job file can name, for what fairchem's own do not take from it."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from fairchem.core.datasets.atomic_data import AtomicData
from fairchem.core.models.base import HydraModel
from fairchem.core.models.uma import escn_md
from fairchem.core.units.mlip_unit._metrics import Metrics
from fairchem.core.units.mlip_unit.mlip_unit import MLIPTrainEvalUnit, mt_collater_adapter
from torch import nn

from fairchem_janus.verify.trace import cast_batch


class TunedModel(HydraModel):
    """`HydraModel` with more knobs.

    Args:
        chunk_size: edges in a chunk of activation checkpointing, which fairchem fixes at 131,072.
        frozen: beginnings of the names of parameters that are not trained.
        rows: parameter -> row -> number to fill it with.
        dtype: such as `float64`.
    """

    def __init__(
        self,
        *,
        chunk_size: int | None = None,
        frozen: Sequence[str] = (),
        rows: Mapping[str, Mapping[int, float]] | None = None,
        dtype: str = "float32",
        **kwargs: Any,
    ) -> None:
        default = escn_md.ESCNMD_DEFAULT_EDGE_ACTIVATION_CHECKPOINT_CHUNK_SIZE
        name = "ESCNMD_DEFAULT_EDGE_ACTIVATION_CHECKPOINT_CHUNK_SIZE"
        with patch.object(escn_md, name, chunk_size or default):
            super().__init__(**kwargs)
        for parameter_name, parameter in self.named_parameters():
            if parameter_name.startswith(tuple(frozen)):
                parameter.requires_grad = False
            for row, value in (rows or {}).get(parameter_name, {}).items():
                parameter.data[row] = value
        self.to(getattr(torch, dtype))


class GroupedModel(TunedModel):
    """A model that tells which parameters get no weight decay; fairchem's own keeps that to its backbone."""

    def no_weight_decay(self) -> set[str]:
        return self.backbone.no_weight_decay()


def double_collater(**kwargs: Any) -> Callable[[list[AtomicData]], AtomicData]:
    """fairchem's collater; batches are in float64."""
    collate = mt_collater_adapter(**kwargs)
    return lambda samples: cast_batch(collate(samples), torch.float64)


def noisy_collater(**kwargs: Any) -> Callable[[list[AtomicData]], AtomicData]:
    """fairchem's collater; positions are moved by draws from Python's, NumPy's and torch's generators."""
    collate = mt_collater_adapter(**kwargs)

    def noisy(samples: list[AtomicData]) -> AtomicData:
        batch = collate(samples)
        size = 0.02 * (1 + random.random() + float(np.random.rand()))  # noqa: NPY002 - the one that fairchem seeds
        batch.pos += size * torch.randn_like(batch.pos)
        return batch

    return noisy


class SteepLoss(nn.Module):
    """The absolute error, with a gradient that is not a number for structures of `num_atoms` atoms."""

    def __init__(self, num_atoms: int) -> None:
        super().__init__()
        self.num_atoms = num_atoms

    def forward(self, pred: torch.Tensor, target: torch.Tensor, natoms: torch.Tensor) -> torch.Tensor:
        steep = (natoms == self.num_atoms).view(pred.shape)
        root = torch.sqrt(torch.where(steep, 0.0 * pred, 1.0))  # the derivative at 0 is infinite
        return (pred - target).abs() + torch.where(steep, root, 0.0)


def mended_unit(**kwargs: Any) -> MLIPTrainEvalUnit:
    """fairchem's unit in a process whose `Metrics` can add nothing to nothing (fairchem's divide by zero)."""
    add = Metrics.__iadd__
    Metrics.__iadd__ = lambda self, other: add(self, other) if self.numel + other.numel else self
    return MLIPTrainEvalUnit(**kwargs)


def poisoned_collater(
    poison: Mapping[str, Mapping[str, float]], **kwargs: Any
) -> Callable[[list[AtomicData]], AtomicData]:
    """fairchem's collater, and labels overwritten afterwards.

    Args:
        poison: sid -> label -> value for its last component, on the first atom.
    """
    collate = mt_collater_adapter(**kwargs)

    def poisoned(samples: list[AtomicData]) -> AtomicData:
        batch = collate(samples)
        for sid, labels in poison.items():
            if sid in batch.sid:
                graph = batch.sid.index(sid)
                for name, value in labels.items():
                    per_graph = batch[name].shape[0] == len(batch.natoms)
                    row = graph if per_graph else int(batch.natoms[:graph].sum())
                    batch[name].view(batch[name].shape[0], -1)[row, -1] = value
        return batch

    return poisoned
