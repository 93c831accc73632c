"""Columns of metadata.npz over combined data sets, and errors that name the command that mends them."""

from __future__ import annotations

import numpy as np
import pytest
from fairchem.core.datasets.base_dataset import Subset
from fairchem.core.datasets.mt_concat_dataset import ConcatDataset

from fairchem_janus.data.edges import EdgeCounts
from fairchem_janus.data.gars_sampler import GARSBatchSampler
from tests.data.rows import Rows, sampler


def test_a_combined_data_set_with_ratios_and_subsets():
    """Each of the data set's own indices once: with ratio 2 a frame comes twice, with 0.5 half of the frames do."""
    parts = {}
    for name, natoms in (("a.train", np.arange(10, 20)), ("b.train", np.arange(100, 106)), ("c.train", [50] * 4)):
        rows = Rows(natoms, 3 * np.asarray(natoms))
        parts[name] = Subset(rows, np.arange(len(rows))[::-1], metadata=rows._metadata)
    dataset = ConcatDataset(parts, {"type": "explicit", "ratios": {"a.train": 0.5, "b.train": 2.0, "c.train": 0.0}})
    made = GARSBatchSampler(dataset, 1, 0, num_micro_batches=2, graphs_per_step=6, cost="edges")
    expected = [19, 18, 17, 16, 15, *[105, 104, 103, 102, 101, 100] * 2]
    assert made.sizes.tolist() == expected == dataset.get_metadata("natoms", list(range(17))).tolist()
    assert made.edges.tolist() == [3 * size for size in expected]
    assert sorted(graph for step in made for plan in step for graph in plan.graphs) == list(range(17))


def test_missing_sizes_name_the_command_that_writes_them():
    rows = Rows([1, 2])
    rows.columns = {}
    with pytest.raises(ValueError, match="the number of atoms of every graph before a graph is loaded") as caught:
        GARSBatchSampler(rows, 1, 0, num_micro_batches=1, graphs_per_step=2)
    assert "metadata.npz of /data/rows do not exist" in str(caught.value)
    assert "fairchem-janus data stats /data/rows --write-metadata" in str(caught.value)


@pytest.mark.parametrize("arguments", [{"cost": "edges"}, {"max_edges": 5}, {"cost": {"per_atom": 0, "per_edge": 1}}])
def test_missing_edges_name_the_command_that_writes_them(arguments):
    counts = EdgeCounts.of_backbone({"cutoff": 6.0, "max_neighbors": 30})
    with pytest.raises(ValueError, match="have no column nedges_6_max30 or nedges_6") as caught:
        sampler([1, 2], graphs_per_step=2, edge_counts=counts, **arguments)
    assert "fairchem-janus data stats /data/rows --cutoff 6 --max-neighbors 30 --write-metadata" in str(caught.value)


def test_edge_counts_without_the_limit_serve_too_and_a_column_can_be_named():
    rows = Rows([1, 2])
    rows.columns |= {"nedges_6": np.array([3, 4]), "mine": np.array([5, 6])}
    counts = EdgeCounts.of_backbone({"cutoff": 6.0, "max_neighbors": 30})
    common = {"num_micro_batches": 1, "graphs_per_step": 2, "cost": "edges", "edge_counts": counts}
    assert GARSBatchSampler(rows, 1, 0, **common).edges.tolist() == [3, 4]
    assert GARSBatchSampler(rows, 1, 0, edges_column="mine", **common).edges.tolist() == [5, 6]
    assert EdgeCounts.of_backbone({"cutoff": 5.5}) == EdgeCounts(("nedges_5.5",), "--cutoff 5.5")


def test_sizes_and_edges_that_cannot_be_are_named():
    with pytest.raises(ValueError, match=r"the metadata say 0 atoms for \[1\].*data stats /data/rows --write-metadata"):
        sampler([3, 0], graphs_per_step=2)
    with pytest.raises(ValueError, match=r"the metadata say -1 edges for \[0\]"):
        sampler([3, 4], edges=[-1, 5], graphs_per_step=2, cost="edges")
