"""Graphs into bins: the least loaded first (`min_load`), swaps afterwards (`refine`), and fairchem's greedy (`greedy`).

All take a cost or a measure per graph [M] and return bins as lists of graph indices. A budget is a pair (measure per
graph [M], limit per bin) and is never exceeded.
"""

from __future__ import annotations

import functools
import heapq
from collections.abc import Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

Budgets = Sequence[tuple[NDArray, float]]

TOLERANCE = 0.002
"""Of the mean load; `refine` leaves two bins alone whose loads are closer than this."""

MAX_WORK = 2_000_000
"""Pairs of graphs that one `refine` looks at before it stops, about 0.1 s. 32 bins of 16 graphs take a tenth of it;
with thousands of bins only the heaviest get their turn."""


FEW = 12
"""Graphs up to which a bin may exchange two at once: with more of them, one at a time comes as near."""


def min_load(
    costs: NDArray, order: list[int], num_bins: int, budgets: Budgets = ()
) -> tuple[list[list[int]], list[int]]:
    """Give each graph, in this order, to the least loaded bin with room; ties go to the bin with fewer graphs.

    Returns the bins and the graphs that found no room. O(M log bins); only a graph that does not fit into the least
    loaded bin costs a look at all of them (the bin it takes then leaves an outdated entry in the heap).
    """
    cost_of = costs.tolist()
    needs = np.array([measure for measure, _ in budgets])  # [budgets, M]
    room = np.array([[limit] * num_bins for _, limit in budgets], dtype=float)  # [budgets, bins]
    loads, counts = np.zeros(num_bins), [0] * num_bins
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    heap = [(0.0, 0, index) for index in range(num_bins)]
    leftover = []
    for graph in order:
        while heap[0][1] != counts[heap[0][2]]:
            heapq.heappop(heap)
        index = heap[0][2]
        if budgets and (needs[:, graph] > room[:, index]).any():
            has_room = (needs[:, graph, None] <= room).all(axis=0)
            if not has_room.any():
                leftover.append(graph)
                continue
            index = int(np.argmin(np.where(has_room, loads, np.inf)))
        bins[index].append(graph)
        loads[index] += cost_of[graph]
        counts[index] += 1
        if budgets:
            room[:, index] -= needs[:, graph]
        heapq.heappush(heap, (float(loads[index]), counts[index], index))
    return bins, leftover


def refine(costs: NDArray, bins: list[list[int]], budgets: Budgets = ()) -> list[list[int]]:
    """Even the loads out by exchanging graphs between a heavier and a lighter bin: one or two for none, one or two.

    `min_load` ends well if small graphs come last; with few graphs per bin and no small ones (crystals of 54 and 64
    atoms), it leaves gaps that an exchange closes. Every exchange lowers the sum of squared loads, so this ends, and no
    load rises above the largest. No bin is emptied.
    """
    sets = [np.array(graphs, dtype=np.int64) for graphs in bins]
    loads = np.array([costs[graphs].sum() for graphs in sets], dtype=float)
    measures = [measure for measure, _ in budgets]
    used = np.array([[measure[graphs].sum() for graphs in sets] for measure in measures])
    limits = [limit for _, limit in budgets]
    smallest_gap = TOLERANCE * loads.mean()
    work, improved = MAX_WORK, True
    while improved:
        improved = False
        for high in np.argsort(-loads, kind="stable"):
            work -= len(sets)
            for low in np.argsort(loads, kind="stable"):
                gap = loads[high] - loads[low]
                if gap <= smallest_gap:
                    break
                for most in (1, 2) if max(len(sets[high]), len(sets[low])) <= FEW else (1,):
                    leaving, coming = (_choices(len(sets[index]), most) for index in (high, low))
                    if (work := work - len(leaving) * len(coming) - 500) < 0:
                        return [graphs.tolist() for graphs in sets]
                    # what moves from high to low for each choice of graphs of either
                    moved = _net(costs, sets[high], leaving, sets[low], coming)
                    off = np.abs(moved - gap / 2)
                    kept = len(sets[high]) - leaving.sum(1)[:, None] + coming.sum(1)[None, :]
                    off[kept < 1] = np.inf
                    for measure, limit, use in zip(measures, limits, used, strict=True):
                        change = _net(measure, sets[high], leaving, sets[low], coming)
                        off[(use[low] + change > limit) | (use[high] - change > limit)] = np.inf
                    i, j = divmod(int(np.argmin(off)), off.shape[1])
                    if not off[i, j] < gap / 2 - smallest_gap / 4:
                        continue
                    gone, come = sets[high][leaving[i]], sets[low][coming[j]]
                    sets[high] = np.append(sets[high][~leaving[i]], come)
                    sets[low] = np.append(sets[low][~coming[j]], gone)
                    for index in (high, low):
                        loads[index] = costs[sets[index]].sum()
                        for row, measure in enumerate(measures):
                            used[row, index] = measure[sets[index]].sum()
                    improved = True
                    break
    return [graphs.tolist() for graphs in sets]


@functools.cache
def _choices(size: int, most: int) -> NDArray:
    """All ways to take up to `most` of `size` graphs, as masks [choices, size]; taking none comes first."""
    taken = [chosen for count in range(most + 1) for chosen in combinations(range(size), count)]
    masks = np.zeros((len(taken), size), dtype=bool)
    for mask, chosen in zip(masks, taken, strict=True):
        mask[list(chosen)] = True
    return masks


def _net(values: NDArray, high: NDArray, leaving: NDArray, low: NDArray, coming: NDArray) -> NDArray:
    """Sum of `values` of what leaves `high` less that of what comes from `low`, for each pair of choices."""
    return (leaving @ values[high])[:, None] - (coming @ values[low])[None, :]


def greedy(order: list[int], budgets: Budgets) -> list[list[int]]:
    """fairchem's `get_batches`: close the batch when the next graph would exceed a budget."""
    needs_of = list(zip(*(measure.tolist() for measure, _ in budgets), strict=True))
    limits = tuple(limit for _, limit in budgets)
    bins: list[list[int]] = []
    room: tuple = ()
    for graph in order:
        if not bins or any(need > free for need, free in zip(needs_of[graph], room, strict=True)):
            bins.append([])
            room = limits
        bins[-1].append(graph)
        room = tuple(free - need for need, free in zip(needs_of[graph], room, strict=True))
    return bins


def smallest_cap(atoms: NDArray, num_bins: int) -> int:
    """The smallest limit with which `greedy`, in the given order, needs no more than `num_bins`, by bisection."""
    total = np.cumsum(atoms)

    def enough(cap: int) -> bool:
        end = 0
        for _ in range(num_bins):
            end = int(np.searchsorted(total, cap + (total[end - 1] if end else 0), side="right"))
            if end == len(total):
                return True
        return False

    low, high = int(atoms.max()), int(total[-1])
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle + 1, high)
    return high
