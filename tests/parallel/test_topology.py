"""Where a rank sits in the D x P x G grid."""

from __future__ import annotations

import itertools

import pytest
import torch

from fairchem_janus.parallel.topology import Grid, Topology

SIZES = list(itertools.product((1, 2, 3), (1, 2, 4), (1, 2)))


def test_the_picture_in_the_docstring() -> None:
    ranks = [Grid.of(world_size=4, pipeline_size=2, rank=rank) for rank in range(4)]
    assert [(grid.d, grid.p) for grid in ranks] == [(0, 0), (0, 1), (1, 0), (1, 1)]


@pytest.mark.parametrize(("D", "P", "G"), SIZES)
def test_coordinates_and_ranks_are_one_to_one(D: int, P: int, G: int) -> None:
    seen = set()
    for rank in range(D * P * G):
        grid = Grid.of(world_size=D * P * G, pipeline_size=P, gp_size=G, rank=rank)
        assert (grid.D, grid.P, grid.G) == (D, P, G)
        assert grid.rank_at(d=grid.d, p=grid.p, g=grid.g) == grid.rank_at() == rank
        seen.add((grid.d, grid.p, grid.g))
    assert seen == set(itertools.product(range(D), range(P), range(G)))


@pytest.mark.parametrize(("D", "P", "G"), SIZES)
def test_graph_parallel_ranks_are_neighbours_then_stages_then_replicas(D: int, P: int, G: int) -> None:
    """fairchem makes its graph-parallel groups of contiguous ranks."""
    grids = [Grid(D, P, G, rank) for rank in range(D * P * G)]
    assert [(grid.d, grid.p, grid.g) for grid in grids] == list(itertools.product(range(D), range(P), range(G)))


def test_rank_at_keeps_the_coordinates_that_are_not_given() -> None:
    grid = Grid(D=2, P=3, G=2, rank=9)  # d=1 p=1 g=1
    assert (grid.d, grid.p, grid.g) == (1, 1, 1)
    assert grid.rank_at(p=2) == 11
    assert grid.rank_at(p=0) == 7
    assert grid.rank_at(d=0) == 3
    assert grid.rank_at(g=0) == 8


def test_a_rank_describes_itself() -> None:
    grid = Grid(D=2, P=3, G=1, rank=4)
    assert str(grid) == "D=2 x P=3 x G=1"
    assert grid.describe_rank() == "rank 4 (d=1 p=1 g=0)"


@pytest.mark.parametrize(
    ("world_size", "pipeline_size", "gp_size", "replica", "fix"),
    [(1, 2, 1, 2, "to 2,"), (5, 2, 1, 2, "to 4 or 6,"), (3, 4, 1, 4, "to 4,"), (6, 2, 2, 4, "to 4 or 8,")],
)
def test_a_world_that_is_no_grid_is_refused_with_the_nearest_sizes(
    world_size: int, pipeline_size: int, gp_size: int, replica: int, fix: str
) -> None:
    with pytest.raises(ValueError) as caught:
        Grid.of(world_size=world_size, pipeline_size=pipeline_size, gp_size=gp_size)
    text = str(caught.value)
    assert f"the world has {world_size} ranks" in text
    assert f"P = janus.pipeline_size = {pipeline_size} and G = job.graph_parallel.group_size = {gp_size}" in text
    assert f"it must be a multiple of {replica}" in text
    assert f"Set job.scheduler.ranks_per_node (times job.scheduler.num_nodes) {fix}" in text
    assert "runner.janus.pipeline_size" in text


def test_a_picture_of_a_replica() -> None:
    assert (
        Grid(D=3, P=2, G=2, rank=9).picture() == "          g=0     g=1\n  p=0 rank  8 rank  9\n  p=1 rank 10 rank 11"
    )


def test_one_rank_needs_no_process_group() -> None:
    topology = Topology.build(Grid(1, 1, 1, 0), torch.device("cpu"))
    groups = ("pipeline_group", "down_group", "up_group", "gradient_group", "dp_group", "replica_group", "gp_group")
    assert [getattr(topology, name) for name in groups] == [None] * 7
    assert topology.is_first_stage
    assert topology.is_last_stage


def test_first_and_last_stage() -> None:
    stages = [Topology(Grid(1, 3, 1, rank), torch.device("cpu")) for rank in range(3)]
    assert [stage.is_first_stage for stage in stages] == [True, False, False]
    assert [stage.is_last_stage for stage in stages] == [False, False, True]
