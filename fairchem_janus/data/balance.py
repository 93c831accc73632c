"""How well a packing balances atoms and edges, as numbers and as a text histogram.

Three numbers per packing: max / mean (the largest micro-batch sets the pace), the floor under which no packing can push
it, max(largest graph, mean) / mean, and the coefficient of variation. `compare` has them for a whole data set, packed
in the ways that `fairchem-janus data pack` shows side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fairchem_janus.data.gars import MicroBatch, Packing, pack

PACKINGS: dict[str, dict[str, Any]] = {
    "sequential": {"method": "sequential"},
    "gars": {},
    "gars_no_shuffle": {"shuffle": False},
    "gars_edges": {"cost": "edges"},
}
"""Name -> arguments of `pack`; sequential is fairchem's greedy with the smallest cap that suffices."""


def balance(loads: ArrayLike, largest: float, num_bins: int) -> tuple[float, float, float]:
    """(max / mean, its floor, coefficient of variation) of the loads of micro-batches.

    No packing goes below the floor max(largest graph, mean) / mean. The mean is over `num_bins`, empty bins included;
    without any load the answer is (1, 1, 0).
    """
    filled = np.zeros(max(num_bins, 1))
    filled[: len(np.atleast_1d(loads))] = loads
    mean = filled.mean()
    if mean == 0:
        return 1.0, 1.0, 0.0
    return float(filled.max() / mean), float(max(largest, mean) / mean), float(filled.std() / mean)


def packing_stats(packing: Packing, sizes: ArrayLike, edges: ArrayLike) -> dict[str, float]:
    """What `fairchem-janus data pack` reports about one packing of the graphs with these sizes and edges.

    Bins that must stay empty because there are fewer graphs than bins do not count.
    """
    micro_batches = packing.micro_batches
    graphs = [graph for micro_batch in micro_batches for graph in micro_batch.graphs]
    num_bins = min(packing.num_bins, len(graphs))
    stats: dict[str, float] = {}
    for name, values in (("atoms", np.asarray(sizes)), ("edges", np.asarray(edges))):
        loads = [values[list(micro_batch.graphs)].sum() for micro_batch in micro_batches]
        ratio, floor, variation = balance(loads, values[graphs].max(initial=0), num_bins)
        stats |= {f"max_over_mean_{name}": ratio, f"floor_{name}": floor, f"cv_{name}": variation}
    comm_free = sum(micro_batch.tag == "comm-free" for micro_batch in micro_batches)
    return stats | {"comm_free_share": comm_free / max(len(micro_batches), 1)}


def edges_over_ranks(micro_batch: MicroBatch, sizes: NDArray, edges: NDArray, gp_size: int) -> float:
    """max / mean of the edges of the G ranks of a micro-batch, each edge going with its atom.

    A comm-free micro-batch has its local bins. A dist one is split by atom index into ranges of equal length, so the
    order of its graphs matters: this is what the shuffle is for. The edges of a graph are taken as even over its atoms.
    """
    if micro_batch.tag == "comm-free":
        ranks = np.array([edges[list(graphs)].sum() for graphs in micro_batch.local_bins])
    else:
        order = list(micro_batch.graphs)
        borders = np.linspace(0, sizes[order].sum(), gp_size + 1)
        ends = np.concatenate([[0], np.cumsum(sizes[order])])
        ranks = np.diff(np.interp(borders, ends, np.concatenate([[0], np.cumsum(edges[order])])))
    return float(ranks.max() / ranks.mean()) if ranks.sum() else 1.0


@dataclass(slots=True)
class Comparison:
    """One way of packing, over all optimizer steps of an epoch."""

    per_step: list[dict[str, float]] = field(default_factory=list)
    """`packing_stats` of each step."""
    atoms: list[int] = field(default_factory=list)
    """Of every micro-batch."""
    edges: list[int] = field(default_factory=list)
    over_ranks: list[float] = field(default_factory=list)
    """`edges_over_ranks` of every micro-batch."""

    @property
    def mean(self) -> dict[str, float]:
        """`packing_stats` averaged over the steps."""
        return {key: float(np.mean([stats[key] for stats in self.per_step])) for key in self.per_step[0]}


def compare(
    sizes: ArrayLike,
    edges: ArrayLike,
    *,
    num_micro_batches: int,
    graphs_per_step: int,
    num_replicas: int = 1,
    gp_size: int = 1,
    seed: int | Sequence[int] = 0,
) -> dict[str, Comparison]:
    """Pack a shuffled data set step by step in each of PACKINGS.

    Args:
        sizes, edges: of every graph [M].
        num_micro_batches: N, per replica.
        graphs_per_step: graphs of a global batch, over all replicas. An incomplete last one is left out, unless it is
            the only one.
    """
    sizes, edges = np.asarray(sizes), np.asarray(edges)
    if graphs_per_step < 1:
        raise ValueError(f"graphs_per_step must be at least 1, not {graphs_per_step}")
    order = np.random.default_rng(seed).permutation(len(sizes))
    num_steps = max(len(order) // graphs_per_step, 1)
    result = {name: Comparison() for name in PACKINGS}
    for step in range(num_steps):
        chosen = order[step * graphs_per_step : (step + 1) * graphs_per_step]
        own_sizes, own_edges = sizes[chosen], edges[chosen]
        for name, arguments in PACKINGS.items():
            packing = pack(own_sizes, num_micro_batches, num_replicas, gp_size, seed=step, edges=own_edges, **arguments)
            comparison = result[name]
            comparison.per_step.append(packing_stats(packing, own_sizes, own_edges))
            for micro_batch in packing.micro_batches:
                comparison.atoms.append(micro_batch.num_atoms)
                comparison.edges.append(micro_batch.num_edges or 0)
                comparison.over_ranks.append(edges_over_ranks(micro_batch, own_sizes, own_edges, gp_size))
    return result


def histogram(
    values: ArrayLike, *, num_bins: int = 12, width: int = 50, limits: tuple[float, float] | None = None
) -> str:
    """A histogram as text, one line per bin: `  lower -  upper  count  bar`; `limits` to compare two on one scale."""
    values = np.asarray(values, dtype=float)
    if values.size == 0:
        return "(nothing to show)"
    counts, borders = np.histogram(values, bins=num_bins, range=limits)
    longest, step = max(counts.max(), 1), borders[1] - borders[0]
    return "\n".join(
        f"{_border(low, step):>10} - {_border(high, step):<10} {count:7d}  "
        + "#" * int(np.ceil(width * count / longest))
        for low, high, count in zip(borders[:-1], borders[1:], counts, strict=True)
    )


def _border(value: float, step: float) -> str:
    """Whole numbers, where bins are wide enough for them."""
    return f"{value:,.0f}" if step >= 2 else f"{value:.4g}"
