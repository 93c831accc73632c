"""Random draws keyed by (seed, step, graph) instead of by position in a random stream.

fairchem draws a roll angle per edge and dropout masks per graph or atom from the global generator. What a graph draws
then depends on which graphs came before it, so splitting a batch into micro-batches, or over stages and replicas,
would change the numbers. `KeyedDraws` overrides just those draws, for a stage of the pipeline and for a plain fairchem
backbone it is compared with alike:

- **roll**: a smooth function of the edge vector plus one phase per step. Every stage finds the same roll for the
  same edge, and round-off in a position moves the roll by round-off only.
- **dropout**: uniform numbers from a counter-based hash (splitmix64) of the graph's key.

A batch carries its keys as `graph_keys` [num_graphs] (int64) and its phase as `roll_phase` (a float, radians). Without
them (inference) dropout is off and the phase is zero.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from fairchem.core.models.uma.common.quaternion.wigner_d_hybrid import axis_angle_wigner_hybrid
from fairchem.core.models.uma.common.rotation import eulers_to_wigner, init_edge_rot_euler_angles
from torch import nn

_ROLL_DIRECTION = (2.399963, 5.166214, 3.583019)
"""Radians per angstrom along x, y, z; incommensurate, so that neighbouring edges get unrelated rolls."""

_GOLDEN = 0x9E3779B97F4A7C15
_MIX = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 1))


def _signed(value: int) -> int:
    """A 64-bit pattern as the int64 that torch accepts."""
    return (value & (2**64 - 1)) - 2**64 if value & 2**63 else value & (2**64 - 1)


def _splitmix(x: torch.Tensor) -> torch.Tensor:
    """splitmix64's finaliser on int64 (multiplication wraps), any shape."""
    x = x + _signed(_GOLDEN)
    for shift, factor in _MIX:
        logical = (x >> shift) & ((1 << (64 - shift)) - 1)
        x = (x ^ logical) * _signed(factor)
    return x


def combine_keys(*parts: int) -> int:
    """One int64 key from several integers, such as (seed, step, graph index)."""
    key = torch.zeros((), dtype=torch.int64)
    for part in parts:
        key = _splitmix(key ^ _splitmix(torch.tensor(_signed(part))))
    return int(key)


def keyed_uniform(keys: torch.Tensor, counters: torch.Tensor) -> torch.Tensor:
    """Uniform numbers in [0, 1), float64, one for each (key, counter); the arguments broadcast."""
    bits = _splitmix(_splitmix(counters) ^ keys)
    return ((bits >> 11) & (2**53 - 1)).to(torch.float64) * 2.0**-53


def edge_roll(edge_vectors: torch.Tensor, phase: float) -> torch.Tensor:
    """Roll angle of each edge [num_edges], radians, detached, from its vector [num_edges, 3] in angstrom."""
    direction = edge_vectors.new_tensor(_ROLL_DIRECTION)
    return edge_vectors.detach() @ direction + phase


class KeyedDropout(nn.Module):
    """`nn.Dropout` over [num_graphs, channels] whose mask depends on each graph's key only."""

    def __init__(self, p: float, draws: Draws) -> None:
        super().__init__()
        self.p = p
        self.draws = draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        keys = self.draws.graph_keys
        if not self.training or self.p == 0.0 or keys is None:
            return x
        counters = torch.arange(x.shape[1], device=x.device) + 1
        keep = keyed_uniform(keys[:, None], counters[None, :]) >= self.p
        return x * keep.to(x.dtype) / (1.0 - self.p)


class Draws:
    """Keys of the batch that is in the forward pass now; shared by a backbone and its dropout modules."""

    def __init__(self) -> None:
        self.graph_keys: torch.Tensor | None = None
        self.roll_phase: float = 0.0


class KeyedDraws:
    """Mixin over `eSCNMDBackbone`; use `install_keyed_draws` to put it on a built backbone."""

    draws: Draws
    keyed_composition_dropout: float

    def forward(self, data_dict: Any) -> dict[str, torch.Tensor]:
        self.draws.graph_keys = data_dict.get("graph_keys", None)
        self.draws.roll_phase = data_dict.get("roll_phase", 0.0)
        try:
            return super().forward(data_dict)  # type: ignore[misc]
        finally:
            self.draws.graph_keys = None

    def _get_rotmat_and_wigner(self, edge_distance_vecs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """fairchem's Wigner matrices (escn_md.py) with the roll given instead of drawn."""
        roll = edge_roll(edge_distance_vecs, self.draws.roll_phase)
        if self.use_quaternion_wigner:  # type: ignore[attr-defined]
            return axis_angle_wigner_hybrid(
                edge_distance_vecs,
                self.lmax,  # type: ignore[attr-defined]
                gamma=roll,
                coeffs=self.wigner_data.coeffs,  # type: ignore[attr-defined]
                U_blocks=self.wigner_data.U_blocks,  # type: ignore[attr-defined]
                custom_kernels=self.wigner_data.custom_kernels,  # type: ignore[attr-defined]
            )
        _, beta, alpha = init_edge_rot_euler_angles(edge_distance_vecs)
        jd = [getattr(self, f"Jd_{degree}").type(edge_distance_vecs.dtype) for degree in range(self.lmax + 1)]  # type: ignore[attr-defined]
        wigner = eulers_to_wigner((-roll, beta, alpha), 0, self.lmax, jd)  # type: ignore[attr-defined]
        return wigner, wigner.transpose(1, 2).contiguous()

    def set_MOLE_coefficients(
        self, atomic_numbers_full: torch.Tensor, batch_full: torch.Tensor, csd_mixed_emb: torch.Tensor
    ) -> None:
        """fairchem's routing, with the atoms that composition dropout removes chosen by key."""
        keys = self.draws.graph_keys
        if self.training and self.keyed_composition_dropout > 0.0 and keys is not None:  # type: ignore[attr-defined]
            counts = torch.bincount(batch_full, minlength=csd_mixed_emb.shape[0])
            starts = torch.cumsum(counts, 0) - counts
            place = torch.arange(len(batch_full), device=batch_full.device) - starts[batch_full]
            keep = keyed_uniform(keys[batch_full], -1 - place) > self.keyed_composition_dropout
            atomic_numbers_full, batch_full = atomic_numbers_full[keep], batch_full[keep]
        super().set_MOLE_coefficients(atomic_numbers_full, batch_full, csd_mixed_emb)  # type: ignore[misc]


def install_keyed_draws(backbone: nn.Module, *mixins: type) -> None:
    """Give a built eSCN-MD backbone keyed draws, by replacing its class with a subclass of it.

    Args:
        backbone: an `eSCNMDBackbone` or `eSCNMDMoeBackbone`; parameters and their names are untouched.
        mixins: further mixins to put in front (the pipeline's own).

    A subclass rather than patched methods: `AveragedModel` deep-copies models, and a bound method in the copy would
    still call the original.
    """
    draws = Draws()
    bases = (*mixins, KeyedDraws, type(backbone))
    backbone.__class__ = type("".join(base.__name__ for base in bases), bases, {})
    backbone.draws = draws
    backbone.keyed_composition_dropout = getattr(backbone, "composition_dropout", 0.0)
    backbone.composition_dropout = 0.0
    if isinstance(getattr(backbone, "mole_dropout", None), nn.Dropout):
        backbone.mole_dropout = KeyedDropout(backbone.mole_dropout.p, draws)


def step_roll_phase(seed: int, step: int) -> float:
    """Phase of all rolls of one optimizer step, radians."""
    return float(keyed_uniform(torch.tensor(combine_keys(seed, step)), torch.tensor(0))) * 2 * math.pi


def graph_keys(graph_numbers: torch.Tensor, step_key: int) -> torch.Tensor:
    """Keys [num_graphs] of one step's graphs, from their numbers in the data set."""
    return _splitmix(_splitmix(graph_numbers) ^ step_key)
