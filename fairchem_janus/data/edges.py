"""Edges of a structure at a cutoff, counted as fairchem counts them, without building the graph.

An edge is an ordered pair of atoms, periodic images included, no farther apart than the cutoff; an atom has no edge to
itself but has edges to its own images. A k-d tree over the cell and the images within reach counts a 100-atom crystal
at 6 A in a few milliseconds.

`column_name(6.0)` is the `metadata.npz` column that keeps such counts, so that packing by edges need not open a frame.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from ase import Atoms

MAX_IMAGES = 20_000
"""More copies of a cell than this within the cutoff (vectors of 0.4 A) mean that the cell is broken."""

COINCIDENT = 0.01
"""A; fairchem (`radius_graph_pbc`) takes a pair nearer than this for an atom and itself and makes no edge of it."""


def column_name(cutoff: float, max_neighbors: int | None = None) -> str:
    """Name of the metadata column for edge counts at this cutoff (A), such as `nedges_6` or `nedges_6_max30`."""
    return f"nedges_{cutoff:g}" + (f"_max{max_neighbors}" if max_neighbors else "")


@dataclass(frozen=True, slots=True)
class EdgeCounts:
    """Where the metadata keep the edge counts that a job is about."""

    columns: tuple[str, ...] = ("nedges",)
    """Names under which they may be found, the best first."""
    options: str = ""
    """Of `fairchem-janus data stats`, to write the first."""

    @classmethod
    def of_backbone(cls, backbone: Mapping[str, Any]) -> EdgeCounts:
        """For a backbone's `cutoff` (A) and `max_neighbors`; counts without that limit serve as well, from above."""
        cutoff, max_neighbors = float(backbone["cutoff"]), backbone.get("max_neighbors")
        columns = (column_name(cutoff, max_neighbors), column_name(cutoff))
        options = f"--cutoff {cutoff:g}" + (f" --max-neighbors {max_neighbors}" if max_neighbors else "")
        return cls(tuple(dict.fromkeys(columns)), options)


UNKNOWN_CUTOFF = EdgeCounts()


def count_edges(atoms: Atoms, cutoff: float, *, max_neighbors: int | None = None) -> int:
    """Number of edges at `cutoff` (A), each atom keeping at most `max_neighbors` of its own."""
    from scipy.spatial import cKDTree

    positions, images, _ = _with_images(atoms, cutoff)
    tree = cKDTree(images)
    neighbors = tree.query_ball_point(positions, cutoff, return_length=True)
    neighbors = neighbors - tree.query_ball_point(positions, COINCIDENT, return_length=True)
    return int(neighbors.clip(max=max_neighbors).sum())


def min_distance(atoms: Atoms, cutoff: float) -> tuple[float, int, int]:
    """Shortest distance (A) between two atoms or images of atoms, and the two; (inf, -1, -1) if none is within cutoff.

    Coinciding atoms have distance 0.
    """
    from scipy.spatial import cKDTree

    positions, images, owner = _with_images(atoms, cutoff)
    if len(images) < 2:
        return np.inf, -1, -1
    distances, neighbors = cKDTree(images).query(positions, k=2, distance_upper_bound=cutoff)
    first = int(np.argmin(distances[:, 1]))
    if not np.isfinite(distances[first, 1]):
        return np.inf, -1, -1
    other = next(n for n in neighbors[first] if n != first)
    return float(distances[first, 1]), first, int(owner[other])


def _with_images(atoms: Atoms, cutoff: float) -> tuple[NDArray, NDArray, NDArray]:
    """Wrapped positions [n, 3]; the same followed by all images within `cutoff` of the cell [m, 3]; their atoms [m]."""
    positions = np.asarray(atoms.get_positions(), dtype=float)
    pbc = np.asarray(atoms.pbc)
    if not pbc.any():
        return positions, positions, np.arange(len(atoms))
    cell = atoms.cell.complete()
    if not atoms.cell.any(1)[pbc].all() or not abs(np.linalg.det(cell.array)) > 1e-6:
        raise ValueError(f"periodic (pbc {pbc.tolist()}) but the cell {atoms.cell.array.tolist()} has no volume")
    fractional = positions @ np.linalg.inv(cell.array)
    fractional[:, pbc] %= 1.0
    reach = cutoff * np.linalg.norm(np.linalg.inv(cell.array), axis=0)  # of the cutoff, in fractions of the cell
    shells = [range(-int(r) - 1, int(r) + 2) if p else range(1) for r, p in zip(reach, pbc, strict=True)]
    if (copies := int(np.prod([len(s) for s in shells]))) > MAX_IMAGES:
        raise ValueError(f"{copies} copies of the cell within {cutoff} A: is {atoms.cell.array.tolist()} right?")
    shifts = np.array(sorted(product(*shells), key=lambda shift: any(shift)), dtype=float)  # the cell itself first
    images = (fractional + shifts[:, None, :]).reshape(-1, 3)
    near = np.ones(len(images), dtype=bool)
    for axis in np.flatnonzero(pbc):
        near &= (images[:, axis] >= -reach[axis]) & (images[:, axis] < 1 + reach[axis])
    near[: len(atoms)] = True
    owner = np.tile(np.arange(len(atoms)), len(shifts))
    return fractional @ cell.array, images[near] @ cell.array, owner[near]
