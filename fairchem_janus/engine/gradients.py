"""Gradients of one step: accumulated over micro-batches, summed over ranks, measured, clipped.

Gradients are *sums*, never means: every micro-batch's loss already carries the denominator of the whole global batch.
They live in two flat buffers of this class's own (parameters that only this stage holds; parameters that every stage
holds), so that each reduction is one message, and two parameters that autograd hands one tensor never share storage.
"""

from __future__ import annotations

from collections.abc import Sequence

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


class GradientBuffer:
    """Gradients of a stage's trainable parameters.

    Attributes:
        parameters: in the order in which `add` takes gradients.
    """

    def __init__(self, stage: Stage, topology: Topology) -> None:
        trainable = stage.trainable()
        dtypes = {p.dtype for _, p in trainable}
        if len(dtypes) > 1:
            raise ValueError(f"all trainable parameters must be of one type, found {sorted(map(str, dtypes))}")
        own = [p for name, p in trainable if not is_replicated(name)]
        shared = [p for name, p in trainable if is_replicated(name)]
        self.topology = topology
        self.parameters = [*own, *shared]
        self._own, self._shared = _Flat(own), _Flat(shared)
        self._views = [*self._own.views, *self._shared.views]

    def zero(self) -> None:
        self._own.storage.zero_()
        self._shared.storage.zero_()
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
        present = torch.tensor([g is not None for g in grads], device=self._own.storage.device)
        self._own.counts += present[: len(self._own.parameters)].to(self._own.counts.dtype)
        self._shared.counts += present[len(self._own.parameters) :].to(self._shared.counts.dtype)

    def reduce(self) -> None:
        """Sum over the ranks that hold the same parameters, and hand the result to the parameters' `.grad`.

        A parameter that no micro-batch of any rank reached keeps `grad` None, as in a plain backward.
        """
        self._shared.all_reduce(self.topology.pipeline_group)
        for flat in (self._own, self._shared):
            flat.all_reduce(self.topology.gradient_group)
            for parameter, view, count in zip(flat.parameters, flat.views, flat.counts.tolist(), strict=True):
                parameter.grad = view if count else None

    def squared_norm(self) -> float:
        """This rank's part of the squared gradient norm: summed over the world it counts every parameter once."""
        grid = self.topology.grid
        if grid.d or grid.g:
            return 0.0
        flats = (self._own, self._shared) if self.topology.is_first_stage else (self._own,)
        views = [view for flat in flats for view in flat.views]
        if not views:
            return 0.0
        return float(torch.stack(torch._foreach_norm(views)).to(torch.float64).square().sum())

    def clip(self, total_norm: float, max_norm: float) -> None:
        """Scale all gradients as `torch.nn.utils.clip_grad_norm_` does."""
        factor = min(1.0, max_norm / (total_norm + 1e-6))
        self._own.storage.mul_(factor)
        self._shared.storage.mul_(factor)
