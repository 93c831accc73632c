"""Which blocks each stage owns."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fairchem_janus.model.partition import balanced_partition, partition_blocks


@given(st.integers(1, 64).flatmap(lambda blocks: st.tuples(st.just(blocks), st.integers(1, blocks))))
def test_stages_own_every_block_once_in_order_and_evenly(sizes: tuple[int, int]) -> None:
    num_blocks, num_stages = sizes
    ranges = partition_blocks(num_blocks, num_stages)
    assert len(ranges) == num_stages
    assert [block for blocks in ranges for block in blocks] == list(range(num_blocks))
    counts = [len(blocks) for blocks in ranges]
    assert max(counts) - min(counts) <= 1
    assert counts[0] == min(counts)  # stage 0 has the embeddings to compute as well


@pytest.mark.parametrize(
    ("num_blocks", "num_stages", "expected"),
    [(4, 1, [4]), (4, 2, [2, 2]), (4, 3, [1, 2, 1]), (6, 4, [1, 2, 2, 1]), (5, 4, [1, 2, 1, 1]), (3, 3, [1, 1, 1])],
)
def test_what_is_left_over_goes_to_the_stages_after_the_first(
    num_blocks: int, num_stages: int, expected: list[int]
) -> None:
    assert [len(blocks) for blocks in partition_blocks(num_blocks, num_stages)] == expected


def test_more_stages_than_blocks_are_refused_with_the_fix() -> None:
    with pytest.raises(ValueError) as caught:
        partition_blocks(4, 5)
    text = str(caught.value)
    assert "janus.pipeline_size=5 is larger than the number of backbone blocks (4)" in text
    assert "Set runner.janus.pipeline_size to at most 4" in text
    assert "backbone.num_layers" in text


def test_a_partition_by_hand_is_taken_as_it_is() -> None:
    assert partition_blocks(6, 3, [1, 4, 1]) == [range(1), range(1, 5), range(5, 6)]


@pytest.mark.parametrize("partition", [[3, 3], [2, 2, 3], [0, 3, 3], [7, -1, 0], []])
def test_a_partition_that_does_not_fit_is_refused_with_one_that_does(partition: list[int]) -> None:
    with pytest.raises(ValueError) as caught:
        partition_blocks(6, 3, partition)
    text = str(caught.value)
    assert text.startswith(f"janus.partition={partition} must be 3 number(s) of at least 1 (janus.pipeline_size=3)")
    assert text.endswith("with the sum 6 (backbone.num_layers), for example [2, 2, 2]")


@pytest.mark.parametrize(
    ("block_costs", "stage_costs", "expected"),
    [
        ([1.0] * 8, [0.0] * 4, [2, 2, 2, 2]),
        ([1.0] * 22, [0.9, 0.1, 0.1, 0.5], [5, 6, 6, 5]),  # the first embeds, the last has the head
        ([1.0] * 6, [9.0, 0.0], [1, 5]),  # a stage keeps at least one block
        ([4.0, 1.0, 1.0, 1.0, 1.0], [0.0, 0.0], [1, 4]),
        ([1.0] * 5, [0.0, 0.0, 0.0], [1, 2, 2]),
        ([2.0], [1.0], [1]),
    ],
)
def test_a_balanced_partition_makes_the_slowest_stage_fast(
    block_costs: list[float], stage_costs: list[float], expected: list[int]
) -> None:
    assert balanced_partition(block_costs, stage_costs) == expected


@given(
    st.lists(st.floats(0.1, 10), min_size=1, max_size=8).flatmap(
        lambda blocks: st.tuples(st.just(blocks), st.lists(st.floats(0, 10), min_size=1, max_size=len(blocks)))
    )
)
def test_no_partition_is_better_than_a_balanced_one(costs: tuple[list[float], list[float]]) -> None:
    block_costs, stage_costs = costs

    def slowest(counts: Sequence[int]) -> float:
        ranges = partition_blocks(len(block_costs), len(stage_costs), counts)
        return max(own + sum(block_costs[i] for i in r) for own, r in zip(stage_costs, ranges, strict=True))

    cuts = combinations(range(1, len(block_costs)), len(stage_costs) - 1)
    others = [[b - a for a, b in pairwise((0, *cut, len(block_costs)))] for cut in cuts]
    assert slowest(balanced_partition(block_costs, stage_costs)) <= min(map(slowest, others)) * (1 + 1e-8)


def test_a_balanced_partition_needs_a_block_for_every_stage() -> None:
    with pytest.raises(ValueError, match="3 stages for 2 blocks"):
        balanced_partition([1.0, 1.0], [0.0, 0.0, 0.0])
