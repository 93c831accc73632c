"""Which blocks of the backbone each pipeline stage owns.

Blocks stay contiguous and in order. Without measured costs the split is even, and stages that get one block more are
taken from the second one on: stage 0 has the embeddings to compute as well. `janus.partition` gives it by hand, and
`balanced_partition` finds the one whose slowest stage is fastest for measured costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

ROUND_OFF = 1e-9
"""Relative difference up to which two costs count as equal."""


def partition_blocks(num_blocks: int, num_stages: int, partition: Sequence[int] | None = None) -> list[range]:
    """Contiguous ranges of block indices, one a stage.

    >>> partition_blocks(6, 4)
    [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]
    >>> partition_blocks(6, 2, [4, 2])
    [range(0, 4), range(4, 6)]

    Args:
        partition: how many blocks each stage gets (`janus.partition`); None: evenly.

    Raises:
        ValueError: more stages than blocks, or a partition that is not one of these blocks over these stages.
    """
    if num_stages > num_blocks:
        raise ValueError(
            f"janus.pipeline_size={num_stages} is larger than the number of backbone blocks ({num_blocks}): every "
            f"stage needs at least one. Set runner.janus.pipeline_size to at most {num_blocks}, or use a model with "
            "more blocks (backbone.num_layers)."
        )
    counts = _even_counts(num_blocks, num_stages) if partition is None else list(partition)
    if len(counts) != num_stages or sum(counts) != num_blocks or min(counts) < 1:
        raise ValueError(
            f"janus.partition={counts} must be {num_stages} number(s) of at least 1 (janus.pipeline_size={num_stages}) "
            f"with the sum {num_blocks} (backbone.num_layers), for example {_even_counts(num_blocks, num_stages)}"
        )
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def balanced_partition(block_costs: Sequence[float], stage_costs: Sequence[float]) -> list[int]:
    """How many blocks each stage should get, so that the most expensive stage is as cheap as it can be.

    >>> balanced_partition([1.0] * 8, [1.0, 0.0, 0.0, 0.5])  # the first embeds, the last has the head
    [1, 2, 3, 2]

    Args:
        block_costs: of each block, in order.
        stage_costs: what each stage costs besides its blocks.

    Of several such partitions, the one whose costs have the smallest sum of squares, then the first in order.

    Raises:
        ValueError: more stages than blocks.
    """
    num_blocks, num_stages = len(block_costs), len(stage_costs)
    if num_stages > num_blocks:
        raise ValueError(f"{num_stages} stages for {num_blocks} blocks: every stage needs at least one")
    until = [0.0, *accumulate(block_costs)]

    def search(limit: float, weigh: Callable[[float, float], float]) -> tuple[float, list[int]]:
        """Over stages of at most `limit` each: the smallest fold of their costs by `weigh`, and its counts."""
        best: dict[int, tuple[float, list[int]]] = {0: (0.0, [])}  # by how many blocks the stages so far own
        for stage, own in enumerate(stage_costs):
            options: dict[int, tuple[float, list[int]]] = {}
            for end in range(stage + 1, num_blocks - (num_stages - stage - 1) + 1):
                for start, (total, counts) in best.items():
                    cost = own + until[end] - until[start]
                    if start < end and cost <= limit:
                        option = (weigh(total, cost), [*counts, end - start])
                        options[end] = min(options.get(end, option), option)
            best = options
        return best[num_blocks]

    largest, _ = search(math.inf, max)
    return search(largest * (1 + ROUND_OFF), lambda total, cost: total + cost * cost)[1]


def _even_counts(num_blocks: int, num_stages: int) -> list[int]:
    base, extra = divmod(num_blocks, num_stages)
    order = [*range(1, num_stages), 0]
    return [base + (stage in order[:extra]) for stage in range(num_stages)]
