"""Which blocks of the backbone each pipeline stage owns.

Blocks stay contiguous and in order. Without measured costs the split is even, and stages that get one block more are
taken from the second one on: stage 0 has the embeddings to compute as well.
"""

from __future__ import annotations


def partition_blocks(num_blocks: int, num_stages: int) -> list[range]:
    """Contiguous ranges of block indices, one a stage.

    >>> partition_blocks(6, 4)
    [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]

    Raises:
        ValueError: more stages than blocks.
    """
    if num_stages > num_blocks:
        raise ValueError(
            f"janus.pipeline_size={num_stages} is larger than the number of backbone blocks ({num_blocks}): every "
            f"stage needs at least one. Set runner.janus.pipeline_size to at most {num_blocks}, or use a model with "
            "more blocks (backbone.num_layers)."
        )
    base, extra = divmod(num_blocks, num_stages)
    order = [*range(1, num_stages), 0]
    counts = [base + (stage in order[:extra]) for stage in range(num_stages)]
    ranges, start = [], 0
    for count in counts:
        ranges.append(range(start, start + count))
        start += count
    return ranges
