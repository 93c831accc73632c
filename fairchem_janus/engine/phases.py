"""The four phases of one micro-batch on one stage.

Stage s computes h[s+1] = f_s(h[s], pos, cell; theta_s). With E the sum of energies and L the loss:

- FE: run f_s, keep the graph.
- FF: (g[s], fpos_s, fcell_s) = grad(h[s+1], (h[s], pos, cell), g[s+1], create_graph=True); the sums of fpos_s and
  fcell_s over the stages are dE/dpos and dE/dcell.
- BF: differentiate (g[s], fpos_s, fcell_s) with cotangents (v[s], w_pos, w_cell); the gradient for g[s+1] is v[s+1].
- BE: differentiate h[s+1] with cotangent u[s+1]; u[s] = first-order part + what BF left for h[s].

Two exact ways to share the work between BF and BE: *merged* (BF stops where FF's graph enters FE's, and BE walks FE's
graph once for both orders) and *eager* (BF walks FE's graph too).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from fairchem_janus.engine.autograd import Barrier, boundary_edges, reachable_nodes
from fairchem_janus.engine.context import MicroBatch
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.model.stage import Stage

Tensors = list[torch.Tensor]


class Phases:
    """FE, FF, BF and BE of one stage. Messages in and out are those of `engine/messages.py`.

    Args:
        stage: the stage to run.
        gradients: where parameter gradients are accumulated; None for evaluation, where FF builds no graph.
        split: `merged` or `eager`.
        energy_in_loss: whether the loss depends on the energies, and not on their derivatives alone; what only the
            energies reach (the last bias of the head) then gets no gradient, rather than a zero.
    """

    def __init__(
        self, stage: Stage, gradients: GradientBuffer | None, split: str, *, energy_in_loss: bool = True
    ) -> None:
        self.energy_in_loss = energy_in_loss
        self.stage = stage
        self.gradients = gradients
        self.split = split

    # ---------------------------------------------------------------- FE
    def energy_forward(self, index: int, data: Any, received: Tensors) -> tuple[MicroBatch, Tensors]:
        """FE. Returns the new micro-batch and the message for the next stage ([] on the last)."""
        shape = self.stage.shape
        data["pos"] = data["pos"].detach().requires_grad_(shape.forces)
        data["cell"] = data["cell"].detach().requires_grad_(shape.stress)
        mb = MicroBatch(index=index, data=data, pos=data["pos"], cell=data["cell"])
        mb.received = [tensor.detach().requires_grad_() for tensor in received]
        with self.stage.mole_state(None):
            result = self.stage.forward(data, mb.received[0] if received else None, mb.received[1:])
            mb.mole = self.stage.snapshot_mole_state()
        mb.out, mb.root = result.out, result.root
        return mb, [] if self.stage.is_last else [mb.out, *mb.root]

    # ---------------------------------------------------------------- FF
    def force_forward(self, mb: MicroBatch, received: Tensors) -> Tensors:
        """FF. `received`: [E[, g, dE/dpos[, dE/dcell]]] from the next stage, [] on the last.

        Returns [E[, g, dE/dpos[, dE/dcell]]] with this stage's share added; on stage 0 the entry g is left out.
        """
        assert mb.out is not None
        energy = mb.out.detach() if self.stage.is_last else received[0]
        shape = self.stage.shape
        if not shape.forces:
            return [energy]
        if self.stage.is_last:
            seed = torch.ones_like(mb.out)
            sums: Tensors = []
        else:
            seed = received[1].detach()
            mb.seed = seed.requires_grad_(self.gradients is not None)
            sums = received[2:]
        wrt = [mb.pos, *([mb.cell] if shape.stress else []), *mb.received[:1]]
        training = self.gradients is not None
        fe_nodes = reachable_nodes([mb.out, *mb.root]) if training and self.split == "merged" else set()
        with self.stage.mole_state(mb.mole):
            grads = torch.autograd.grad(mb.out, wrt, seed, create_graph=training, allow_unused=True)
        outputs = [torch.zeros_like(x) if g is None else g for g, x in zip(grads, wrt, strict=True)]
        if training:
            mb.ff_outputs = outputs
            if self.split == "merged":
                mb.edges = boundary_edges(outputs, fe_nodes)
                mb.barrier = Barrier()
                mb.barrier.put_on(mb.edges)
        derivatives = outputs[: 1 + shape.stress]
        totals = [d.detach() + s for d, s in zip(derivatives, sums, strict=True)] if sums else derivatives
        to_previous = [] if self.stage.is_first else outputs[-1:]
        return [energy, *to_previous, *(total.detach() for total in totals)]

    # ---------------------------------------------------------------- BF
    def backward_of_force(self, mb: MicroBatch, received: Tensors) -> Tensors:
        """BF. `received`: [uE[, v, w_pos[, w_cell]]], from the gate (without v) or the previous stage.

        Returns the same for the next stage.
        """
        mb.u_energy = received[0]
        shape = self.stage.shape
        if not shape.forces:
            return [mb.u_energy]
        v, w = ([], received[1:]) if self.stage.is_first else (received[1:2], received[2:])
        pairs = [(o, c) for o, c in zip(mb.ff_outputs, [*w, *v], strict=True) if o.requires_grad]
        seeds = [] if mb.seed is None else [mb.seed]
        parameters = self._parameters()
        inputs = [*seeds, *parameters, *mb.received]
        grads = self._grad(mb, pairs, [*inputs, *mb.edges], retain_graph=True, barrier=True)
        next_v = [torch.zeros_like(s) if g is None else g for s, g in zip(seeds, grads, strict=False)]
        grads = grads[len(seeds) :]
        self._accumulate(grads[: len(parameters)])
        mb.second_order = grads[len(parameters) : len(parameters) + len(mb.received)]
        found = grads[len(parameters) + len(mb.received) :]
        mb.captured = [(edge, g) for edge, g in zip(mb.edges, found, strict=True) if g is not None]
        mb.ff_outputs, mb.edges, mb.seed = [], [], None
        return [mb.u_energy, *next_v, *w]

    # ---------------------------------------------------------------- BE
    def backward_of_energy(self, mb: MicroBatch, received: Tensors) -> Tensors:
        """BE. `received`: [u, u_csd[, u_coefficients]] from the next stage, [] on the last.

        Returns the same for the previous stage ([] on stage 0) and lets go of the micro-batch's graph.
        """
        assert mb.out is not None and mb.u_energy is not None
        u = mb.u_energy.to(mb.out.dtype) if self.stage.is_last else received[0]
        from_next = [None] * len(mb.root) if self.stage.is_last else received[1:]
        pairs: list[tuple[Any, torch.Tensor]] = [*mb.captured]
        if self.energy_in_loss or not self.stage.is_last:
            pairs.insert(0, (mb.out, u))
        if self.stage.is_first:
            pairs += [(r, x) for r, x in zip(mb.root, from_next, strict=True) if x is not None and r.requires_grad]
        parameters = self._parameters()
        inputs = [*parameters, *mb.received]
        if self.stage.trains:
            grads = self._grad(mb, pairs, inputs, retain_graph=False)
            self._accumulate(grads[: len(parameters)])
        else:  # frozen from here down: what is sent on reaches nothing
            grads, mb.second_order, from_next = [None] * len(inputs), [], [None] * len(mb.root)
        to_previous = []
        if not self.stage.is_first:
            first_order = grads[len(parameters) :]
            second_order = mb.second_order or [None] * len(mb.received)
            for leaf, *parts in zip(mb.received, first_order, second_order, [None, *from_next], strict=True):
                found = [part for part in parts if part is not None]
                to_previous.append(sum(found[1:], start=found[0]) if found else torch.zeros_like(leaf))
        mb.out, mb.root, mb.captured, mb.second_order, mb.received, mb.mole = None, [], [], [], [], None
        return to_previous

    # ---------------------------------------------------------------- helpers
    def _parameters(self) -> list[torch.nn.Parameter]:
        assert self.gradients is not None
        return self.gradients.parameters

    def _accumulate(self, grads: Sequence[torch.Tensor | None]) -> None:
        assert self.gradients is not None
        self.gradients.add(grads)

    def _grad(
        self,
        mb: MicroBatch,
        pairs: list[tuple[Any, torch.Tensor]],
        inputs: list[Any],
        *,
        retain_graph: bool,
        barrier: bool = False,
    ) -> list[torch.Tensor | None]:
        """Gradients of the pairs' outputs, weighted by their cotangents; None where nothing arrives."""
        pairs = [(o, c) for o, c in pairs if not isinstance(o, torch.Tensor) or o.requires_grad]
        if not pairs or not inputs:
            return [None] * len(inputs)
        if mb.barrier is not None:
            mb.barrier.closed = barrier
        with self.stage.mole_state(mb.mole):
            grads = torch.autograd.grad(
                [o for o, _ in pairs], inputs, [c for _, c in pairs], retain_graph=retain_graph, allow_unused=True
            )
        if mb.barrier is not None:
            mb.barrier.closed = False
        return list(grads)
