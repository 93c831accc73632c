"""Ranks, replicas and micro-batches of a converted job."""

from __future__ import annotations

import pytest

from fairchem_janus.convert.layout import lay_out

LOCAL = {"num_nodes": 1, "ranks_per_node": 1, "stock_gp_size": 1, "on_slurm": False, "D": None, "N": None, "G": 1}


@pytest.mark.parametrize(
    ("changes", "sizes", "nodes", "factor"),
    [
        ({"P": 2}, (1, 2, 1, 4), (1, 2), 4),  # at least two micro-batches a stage
        ({"P": 1}, (1, 1, 1, 1), (1, 1), 1),
        ({"P": 2, "N": 1}, (1, 2, 1, 1), (1, 2), 1),
        ({"P": 2, "D": 2}, (2, 2, 1, 4), (1, 4), 8),
        ({"P": 2, "ranks_per_node": 8}, (4, 2, 1, 4), (1, 8), 2),
        ({"P": 4, "ranks_per_node": 32}, (8, 4, 1, 8), (1, 32), 2),
        ({"P": 2, "ranks_per_node": 8, "D": 1}, (1, 2, 1, 8), (1, 2), 1),  # the global batch of eight ranks
        ({"P": 2, "ranks_per_node": 7}, (3, 2, 1, 4), (1, 6), 12 / 7),
        ({"P": 2, "G": 2, "ranks_per_node": 8, "stock_gp_size": 2}, (2, 2, 2, 4), (1, 8), 2),
        ({"P": 2, "num_nodes": 4}, (1, 2, 1, 4), (1, 2), 4),  # LOCAL: fairchem ignores num_nodes
        ({"P": 2, "num_nodes": 4, "ranks_per_node": 8, "on_slurm": True}, (16, 2, 1, 4), (4, 8), 2),
        ({"P": 4, "D": 3, "ranks_per_node": 8, "on_slurm": True}, (3, 4, 1, 8), (2, 6), 3),
    ],
)
def test_sizes(changes: dict, sizes: tuple, nodes: tuple, factor: float) -> None:
    layout = lay_out(**LOCAL | changes)
    assert sizes == (layout.D, layout.P, layout.G, layout.N)
    assert (layout.num_nodes, layout.ranks_per_node) == nodes
    assert layout.num_nodes * layout.ranks_per_node == layout.world_size
    assert layout.batch_factor == pytest.approx(factor)


@pytest.mark.parametrize(("size", "name"), [("P", "pipeline"), ("G", "graph"), ("D", "data"), ("N", "micro-batches")])
def test_sizes_below_one_are_refused(size: str, name: str) -> None:
    with pytest.raises(ValueError, match=f"--{name} must be at least 1, got 0"):
        lay_out(**LOCAL | {"P": 1, size: 0})
