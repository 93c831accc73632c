"""Cost of a graph as a straight line in its atoms and edges, fitted from the phase times of a run.

GARS balances atoms as in the paper, but the time of a message-passing step follows edges, and edges per atom differ
between materials: on a mix of crystals and molecules, atoms balanced to 1 % left edges 23 % unbalanced. Per graph::

    cost = per_atom * atoms + per_edge * edges
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray


@dataclass(frozen=True, kw_only=True, slots=True)
class LinearCost:
    """A cost function for `gars.pack`; seconds if it was fitted to seconds."""

    per_atom: float
    per_edge: float
    overhead: float = 0.0
    """Time of a micro-batch without graphs. It does not depend on the packing, so it is not part of a graph's cost."""

    def __post_init__(self) -> None:
        if not (self.per_atom >= 0 and self.per_edge >= 0 and self.per_atom + self.per_edge < np.inf):
            raise ValueError(f"costs must be finite and not negative: {self}")

    def __call__(self, atoms: NDArray, edges: NDArray | None) -> NDArray:
        """Cost per graph [M] from atoms [M] and edges [M]."""
        if edges is None:
            raise ValueError("a linear cost needs the number of edges of each graph: give `edges` to pack")
        return self.per_atom * np.asarray(atoms) + self.per_edge * np.asarray(edges)


def fit_cost(atoms: ArrayLike, edges: ArrayLike, times: ArrayLike) -> LinearCost:
    """Least squares of `times = overhead + per_atom * atoms + per_edge * edges` with no negative coefficient.

    Args:
        atoms, edges, times: totals of each measured micro-batch [K] and the time that its four phases took.

    Raises ValueError for fewer than three micro-batches, for values that are not finite, and for times that do not
    grow with atoms or edges (nothing could be balanced by such a cost).
    """
    from scipy.optimize import nnls

    columns = [np.ones(np.shape(times)), *(np.asarray(values, dtype=float) for values in (atoms, edges))]
    target = np.asarray(times, dtype=float)
    if target.ndim != 1 or any(column.shape != target.shape for column in columns):
        raise ValueError(f"atoms, edges and times must be of one length, not {[np.shape(c) for c in columns[1:]]}")
    if len(target) < 3:
        raise ValueError(f"a fit needs at least 3 measured micro-batches, not {len(target)}")
    if not (np.isfinite(target).all() and all(np.isfinite(column).all() for column in columns)):
        raise ValueError("atoms, edges and times must be finite")
    scale = np.array([max(column.max(), 1e-300) for column in columns])
    overhead, per_atom, per_edge = nnls(np.stack(columns, axis=1) / scale, target)[0] / scale
    if per_atom == 0 and per_edge == 0:
        raise ValueError("the times do not grow with atoms or edges; measure micro-batches of different sizes")
    return LinearCost(per_atom=float(per_atom), per_edge=float(per_edge), overhead=float(overhead))
