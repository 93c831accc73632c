"""Gradients of one step: accumulated over micro-batches, summed over ranks, measured, clipped.

Gradients are *sums*, never means: every micro-batch's loss already carries the denominator of the whole global batch.
They live in flat buffers of this class's own, one for all parameters that the same ranks of the pipeline hold (those of
this stage alone; those of every stage), so that each reduction is one message, and two parameters that autograd hands
one tensor never share storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from fairchem_janus.model.stage import Stage, is_replicated
from fairchem_janus.parallel.topology import Topology


class _Flat:
    """Zeroed storage for some parameters' gradients, and a count of contributions to each."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        self.parameters = parameters
        dtype = parameters[0].dtype if parameters else torch.float32
        device = parameters[0].device if parameters else None
        sizes = [p.numel() for p in parameters]
        self.storage = torch.zeros(sum(sizes) + len(sizes), dtype=dtype, device=device)
        pieces = self.storage.split([*sizes, len(sizes)])
        self.views = [piece.view(p.shape) for piece, p in zip(pieces, parameters, strict=False)]
        self.counts = pieces[-1]

    def all_reduce(self, group: dist.ProcessGroup | None) -> None:
        if group is not None and self.parameters:
            dist.all_reduce(self.storage, group=group)


class HeldBy(NamedTuple):
    """Some parameters, and who else in the pipeline holds them.

    Attributes:
        group: the ranks of this pipeline that hold them; None if this rank is the only one.
        counts: whether this rank is the one that counts them in the gradient norm.
    """

    parameters: list[nn.Parameter]
    group: dist.ProcessGroup | None = None
    counts: bool = True


def _held_by_stage(stage: Stage, topology: Topology) -> list[HeldBy]:
    """A stage's own parameters, and those that every stage holds."""
    own = [p for name, p in stage.trainable() if not is_replicated(name)]
    shared = [p for name, p in stage.trainable() if is_replicated(name)]
    return [HeldBy(own), HeldBy(shared, topology.pipeline_group, topology.is_first_stage)]


class GradientBuffer:
    """Gradients of a rank's trainable parameters.

    Args:
        holder: the rank's one stage, or what it holds (unfolded schedules, `engine/held.py`).

    Attributes:
        parameters: in the order in which `add` takes gradients.
    """

    def __init__(self, holder: Stage | list[HeldBy], topology: Topology) -> None:
        held = holder if isinstance(holder, list) else _held_by_stage(holder, topology)
        self.topology = topology
        self.parameters = [p for part in held for p in part.parameters]
        dtypes = {p.dtype for p in self.parameters}
        if len(dtypes) > 1:
            raise ValueError(f"all trainable parameters must be of one type, found {sorted(map(str, dtypes))}")
        self._parts = [(_Flat(part.parameters), part) for part in held]
        self._views = [view for flat, _ in self._parts for view in flat.views]

    def zero(self) -> None:
        for flat, _ in self._parts:
            flat.storage.zero_()
        for parameter in self.parameters:
            parameter.grad = None

    def add(self, grads: Sequence[torch.Tensor | None]) -> None:
        """Add one phase's gradients, in the order of `parameters`; None adds nothing."""
        views, values = [], []
        for view, grad in zip(self._views, grads, strict=True):
            if grad is not None:
                views.append(view)
                values.append(grad)
        if views:
            torch._foreach_add_(views, values)
        self._count(grads)

    def _count(self, grads: Sequence[torch.Tensor | None]) -> None:
        sizes = [len(flat.parameters) for flat, _ in self._parts]
        present = torch.tensor([g is not None for g in grads], device=self._parts[0][0].storage.device)
        for (flat, _), added in zip(self._parts, present.split(sizes), strict=True):
            flat.counts += added.to(flat.counts.dtype)

    def reduce(self) -> None:
        """Sum over the ranks that hold the same parameters, and hand the result to the parameters' `.grad`.

        A parameter that no micro-batch of any rank reached keeps `grad` None, as in a plain backward.
        """
        for flat, part in self._parts:
            flat.all_reduce(part.group)
            flat.all_reduce(self.topology.gradient_group)
            for parameter, view, count in zip(flat.parameters, flat.views, flat.counts.tolist(), strict=True):
                parameter.grad = view if count else None

    def squared_norm(self) -> float:
        """This rank's part of the squared gradient norm: summed over the world it counts every parameter once."""
        grid = self.topology.grid
        if grid.d or grid.g:
            return 0.0
        views = [view for flat, part in self._parts if part.counts for view in flat.views]
        if not views:
            return 0.0
        return float(torch.stack(torch._foreach_norm(views)).to(torch.float64).square().sum())

    def clip(self, total_norm: float, max_norm: float) -> None:
        """Scale all gradients as `torch.nn.utils.clip_grad_norm_` does."""
        factor = min(1.0, max_norm / (total_norm + 1e-6))
        for flat, _ in self._parts:
            flat.storage.mul_(factor)
