"""The gate: predictions, loss and its cotangents, in one place on stage 0.

After FF has come up to stage 0, energies and their derivatives are complete. The gate makes fairchem's prediction
dictionary from detached leaves, takes the ordinary fairchem loss, and differentiates it with respect to those leaves.
Nothing about the loss is split over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairchem.core.units.mlip_unit.mlip_unit import Task, compute_loss

from fairchem_janus.engine.finite import BadSample, NonFiniteError, graph_names, graphs_with_bad_rows
from fairchem_janus.model.heads import Given
from fairchem_janus.model.stage import Stage
from fairchem_janus.parallel.loss import NonFiniteLossError


@dataclass(slots=True)
class GateResult:
    """What a micro-batch gives at the gate.

    Attributes:
        losses: this micro-batch's share of each task's loss [num_tasks], detached.
        cotangents: [uE[, w_pos[, w_cell]]]; empty in evaluation.
        predictions: fairchem's prediction dictionary, detached.
    """

    losses: torch.Tensor
    cotangents: list[torch.Tensor]
    predictions: dict[str, Any]


def pass_gate(
    stage: Stage, tasks: Sequence[Task], data: Any, message: list[torch.Tensor], *, training: bool
) -> GateResult:
    """Predictions and loss of one micro-batch.

    Args:
        message: [E[, dE/dpos[, dE/dcell]]] from FF of stage 0.
        training: whether to differentiate the loss.

    Raises:
        NonFiniteError: a prediction or a loss is NaN or infinite.
    """
    for tensor in message:
        if graphs := graphs_with_bad_rows(tensor, data):
            raise NonFiniteError([BadSample("forward", name) for name in graph_names(data, graphs)])
    leaves = [tensor.detach().requires_grad_() for tensor in message]
    energy, grad_pos, grad_cell = (*leaves, None, None)[:3]
    with torch.enable_grad():
        predictions = stage.predictions(data, Given(energy, grad_pos, grad_cell))
        try:
            losses = compute_loss(tasks, predictions, data)
        except NonFiniteLossError as error:
            raise NonFiniteError([BadSample("loss", name) for name in graph_names(data, error.graphs)]) from error
        cotangents = []
        if training:
            total = torch.stack([value.to(torch.float64) for value in losses.values()]).sum()
            grads = torch.autograd.grad(total, leaves, allow_unused=True)
            cotangents = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, leaves, strict=True)]
    values = torch.stack([value.detach().to(torch.float64) for value in losses.values()])
    return GateResult(values, cotangents, _detach(predictions))


def shut_gate(tasks: Sequence[Task], message: list[torch.Tensor]) -> GateResult:
    """What passes for a micro-batch whose step is going to be left out: nothing, so that the pipeline runs on."""
    return GateResult(torch.zeros(len(tasks), dtype=torch.float64), [torch.zeros_like(x) for x in message], {})


def _detach(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {key: _detach(item) for key, item in value.items()}
    return value
