"""What one micro-batch keeps alive on one stage, from FE to BE."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch.autograd.graph import GradientEdge

from fairchem_janus.engine.autograd import Barrier


@dataclass(slots=True, weakref_slot=True)
class MicroBatch:
    """One micro-batch on one stage. Fields are filled phase by phase and dropped as early as possible.

    Attributes:
        data: the batch, on the device; fairchem writes into it during FE.
        pos, cell: leaves the forces and the stress are derivatives by.
        received: leaves [h, csd[, coefficients]] from the previous stage; empty on stage 0.
        out, root: FE's output and the root's values (see `StageOutput`).
        mole: MoLE state of this micro-batch.
        seed: the leaf g that FF started from, None on the last stage (where it is a constant one).
        ff_outputs: dE/dpos[, dE/dcell][, g for the previous stage] of this stage, with their graph.
        barrier, edges: where FF's graph enters FE's (*merged* split).
        captured: gradients that BF found at `edges`.
        second_order: what BF found for `received`.
        u_energy: dL/dE [num_graphs], on its way to the last stage.
    """

    index: int
    data: Any
    pos: torch.Tensor
    cell: torch.Tensor
    received: list[torch.Tensor] = field(default_factory=list)
    out: torch.Tensor | None = None
    root: list[torch.Tensor] = field(default_factory=list)
    mole: list[dict[str, Any]] | None = None
    seed: torch.Tensor | None = None
    ff_outputs: list[torch.Tensor] = field(default_factory=list)
    barrier: Barrier | None = None
    edges: list[GradientEdge] = field(default_factory=list)
    captured: list[tuple[GradientEdge, torch.Tensor]] = field(default_factory=list)
    second_order: list[torch.Tensor | None] = field(default_factory=list)
    u_energy: torch.Tensor | None = None
