"""What one side of a comparison recorded."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from fairchem_janus.engine.step import HaloReport
from fairchem_janus.verify.maes import Sums

Named = dict[str, torch.Tensor]


@dataclass(slots=True)
class Trace:
    """A few optimizer steps of one side.

    Attributes:
        losses, grad_norms: one number a step (the norm before clipping).
        gradients: by name, one dictionary a step, as the optimizer saw them.
        parameters: by name, after the last step.
        ema: their moving average after the last step; empty for a job without one.
        batches: indices of the graphs of each step: replica x micro-batch x graph.
        maes: absolute errors of each step's predictions.
        halos: what the graph-parallel ranks of rank 0's group exchanged in each step; None where G = 1.
        steps_per_epoch: optimizer steps in an epoch, for the learning-rate schedule.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    gradients: list[Named] = field(default_factory=list)
    parameters: Named = field(default_factory=dict)
    ema: Named = field(default_factory=dict)
    batches: list[list[list[list[int]]]] = field(default_factory=list)
    maes: list[Sums] = field(default_factory=list)
    halos: list[HaloReport | None] = field(default_factory=list)
    steps_per_epoch: int = 0


def record_gradients(optimizer: torch.optim.Optimizer, model: nn.Module, into: list[Named]) -> Any:
    """Append the model's gradients to `into` just before every step of the optimizer; returns the hook's handle."""

    def hook(*_: Any) -> None:
        into.append({n: p.grad.detach().clone().cpu() for n, p in named_parameters(model) if p.grad is not None})

    return optimizer.register_step_pre_hook(hook)


def named_parameters(model: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters under the names of the bare model, whatever wraps it."""
    return [(name.removeprefix("module."), p) for name, p in model.named_parameters()]


def snapshot_parameters(model: nn.Module) -> Named:
    return {name: p.detach().clone().cpu() for name, p in named_parameters(model)}


def cast_batch(batch: Any, dtype: torch.dtype) -> Any:
    """All floating-point tensors of a batch in `dtype`; `AtomicData` insists on one type, so after collation."""
    return batch.apply(lambda x: x.to(dtype) if x.is_floating_point() else x)
