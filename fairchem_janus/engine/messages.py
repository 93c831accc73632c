"""What travels between neighbouring stages, and the shapes of it.

=======  =========  ====================================================================
phase    direction  tensors
=======  =========  ====================================================================
FE       down       h, csd embedding[, expert mixing coefficients]
FF       up         energies[, g = dE/dh, running sum of dE/dpos[, of dE/dcell]]
BF       down       uE = dL/dE[, v, w_pos[, w_cell]]
BE       up         u = gradient for h, for the csd embedding[, for the coefficients]
=======  =========  ====================================================================

Every rank of a replica loads the same batch, so both ends of a message know its shapes: nothing is negotiated. A
message is sent as one buffer of bytes, tensors in the order above with float64 first where types mix, so that every
slice is aligned.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch

from fairchem_janus.model.stage import ModelShape
from fairchem_janus.schedule import Phase


class TensorSpec(NamedTuple):
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def message_specs(phase: Phase, data: Any, shape: ModelShape) -> list[TensorSpec]:
    """Tensors that `phase` sends for a batch, in order.

    Args:
        data: the micro-batch; only the numbers of atoms and graphs and the type of `pos` are read, and `halo`, which
            tells how many of the atoms of a dist micro-batch are this rank's.
    """
    dtype = data["pos"].dtype
    num_atoms, num_graphs = data["pos"].shape[0], data["natoms"].shape[0]
    halo = data.get("halo", None)
    own_atoms = num_atoms if halo is None else halo.own_atoms(num_atoms)
    h = TensorSpec((own_atoms, shape.sph, shape.channels), dtype)
    root = [TensorSpec((num_graphs, shape.channels), dtype)]
    if shape.num_experts:
        root.append(TensorSpec((num_graphs, shape.num_experts), dtype))
    if phase in (Phase.FE, Phase.BE):
        return [h, *root]
    specs = [TensorSpec((num_graphs,), torch.float64)]
    if shape.forces:
        specs += [h, TensorSpec((num_atoms, 3), dtype)]
    if shape.stress:
        specs.append(TensorSpec((num_graphs, 3, 3), dtype))
    return specs


def pack(tensors: list[torch.Tensor], specs: list[TensorSpec]) -> torch.Tensor:
    """The tensors as one flat byte buffer, each cast to its spec's type."""
    pieces = []
    for tensor, spec in zip(tensors, specs, strict=True):
        assert tuple(tensor.shape) == spec.shape, f"message tensor of shape {tuple(tensor.shape)}, not {spec.shape}"
        pieces.append(tensor.detach().to(spec.dtype).contiguous().view(-1).view(torch.uint8))
    return torch.cat(pieces)


def empty_buffer(specs: list[TensorSpec], device: torch.device) -> torch.Tensor:
    return torch.empty(sum(spec.num_bytes for spec in specs), dtype=torch.uint8, device=device)


def unpack(buffer: torch.Tensor, specs: list[TensorSpec]) -> list[torch.Tensor]:
    """Views into a received buffer, one a tensor."""
    tensors, offset = [], 0
    for spec in specs:
        piece = buffer[offset : offset + spec.num_bytes]
        tensors.append(piece.view(spec.dtype).view(spec.shape))
        offset += spec.num_bytes
    return tensors
