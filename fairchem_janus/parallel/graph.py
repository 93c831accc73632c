"""Graph parallelism of a micro-batch: fairchem's forward, its collectives replaced and switched per micro-batch.

A *dist* micro-batch is on all G ranks of a group: each owns some of its atoms, and every layer of the backbone fetches
the embeddings of the others' (halo exchange). fairchem's forward does all of that where its module-level state says so
(`gp_utils`); `GraphParallel.exchanging` sets that state, and puts this package's collectives in place of fairchem's,
while the backbone runs. A *comm-free* micro-batch is one whose graphs stay whole: each rank runs its own with the state
switched off, and nothing is exchanged.

Positions and cells are whole on every rank. A rank's energies and their derivatives are its atoms' share; the sum over
the group is taken once, at the gate, and the loss is then the same on all ranks, so that differentiating each rank's
share with the full cotangent gives each rank's part of the gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.common import gp_utils
from fairchem.core.common.gp_utils import GPMode, GPPartition, GraphParallelConfig
from fairchem.core.common.parallelism import graph_parallel_a2a
from fairchem.core.models.uma import escn_md_block

from fairchem_janus.parallel.collectives import GraphGroup, HaloMeter, exchange_rows, gather_rows, sum_over_ranks

DIST, COMM_FREE = "dist", "comm-free"
"""Tags of a micro-batch (`gars_tag`): graphs split over the graph-parallel ranks, or kept whole."""


class GraphParallel:
    """What the G ranks that share a stage of a replica need to run dist micro-batches.

    Args:
        group: the ranks; None if there is one.
        config: the job's mode and partition.
    """

    def __init__(self, group: dist.ProcessGroup | None, config: GraphParallelConfig) -> None:
        self.config = config
        rank, size = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
        self.ranks = GraphGroup(group, rank, size)

    @property
    def meter(self) -> HaloMeter:
        return self.ranks.meter

    def own_atoms(self, num_atoms: int) -> int:
        """How many atoms of a dist micro-batch this rank owns."""
        return self._sizes(num_atoms)[self.ranks.rank]

    def _sizes(self, num_atoms: int) -> list[int]:
        size = self.ranks.size
        if self.config.partition == GPPartition.SPATIAL:
            # place i along fairchem's curve belongs to rank i * G // num_atoms
            return [b - a for a, b in pairwise(-(-rank * num_atoms // size) for rank in range(size + 1))]
        return gp_utils.size_list_fn(num_atoms, size)

    def sum(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Every rank's tensors summed, not differentiated."""
        return [sum_over_ranks(tensor.detach(), self.ranks) for tensor in tensors]

    @contextmanager
    def exchanging(self) -> Iterator[None]:
        """Around a backbone's forward of a dist micro-batch."""
        ranks = self.ranks

        def gather(x: torch.Tensor, natoms: int) -> torch.Tensor:
            return gather_rows(x, gp_utils.size_list_fn(natoms, ranks.size), ranks)

        def collect(x: torch.Tensor, context: Any) -> torch.Tensor:
            return exchange_rows(x[context.send_indices], context.send_splits, context.recv_splits, ranks)

        def exchange_indices(received: list[torch.Tensor], sent: list[torch.Tensor], group: Any) -> None:
            rows = exchange_rows(torch.cat(sent), [len(s) for s in sent], [len(r) for r in received], ranks)
            for place, part in zip(received, rows.split([len(r) for r in received]), strict=True):
                place.copy_(part)

        replaced = [
            (gp_utils, "gather_from_model_parallel_region_sum_grad", gather),
            (gp_utils, "all_reduce_sum_with_grad", lambda x: sum_over_ranks(x, ranks)),
            (escn_md_block, "all_to_all_collect", collect),
            # fairchem's takes ranks of the group for global ones, and fails on Gloo in every group but the first
            (graph_parallel_a2a, "_safe_all_to_all", exchange_indices),
            (gp_utils, "_GRAPH_PARALLEL_GROUP", ranks.group),
            (gp_utils, "_GP_CONFIG", self.config),
        ]
        with _attributes(replaced):
            yield

    def keep_own_edges(self, data: Any) -> None:
        """Drop, in place, edges that end at other ranks' atoms, from edges that came with the batch.

        fairchem filters edges that it makes itself, but takes given ones (`otf_graph: False`) as they are: each rank
        then adds messages of the other ranks' atoms to its own ones.
        """
        edge_index, owner = data["edge_index"], self._owners(data)
        own = owner[edge_index[1]] == self.ranks.rank
        data["edge_index"] = edge_index[:, own]
        data["cell_offsets"] = data["cell_offsets"][own]
        graphs = data["batch_full"][data["edge_index"][1]]
        data["nedges"] = torch.bincount(graphs, minlength=len(data["natoms"])).to(data["nedges"].dtype)

    def _owners(self, data: Any) -> torch.Tensor:
        """The rank of every atom [num_atoms], as fairchem's forward deals them."""
        owners, _ = graph_parallel_a2a.compute_a2a_partition(
            pos=data["pos"].detach(),
            total_atoms=data["pos"].shape[0],
            device=data["pos"].device,
            world_size=self.ranks.size,
            rank=self.ranks.rank,
            strategy=self.config.partition,
        )
        return owners


@contextmanager
def switched_off() -> Iterator[None]:
    """fairchem's code inside behaves as without graph parallelism."""
    with _attributes([(gp_utils, "_GRAPH_PARALLEL_GROUP", None)]):
        yield


@contextmanager
def _attributes(values: list[tuple[Any, str, Any]]) -> Iterator[None]:
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    for owner, name, value in values:
        setattr(owner, name, value)
    try:
        yield
    finally:
        for owner, name, value in before:
            setattr(owner, name, value)


@contextmanager
def fairchem_groups(gp_group: Any, dp_group: Any, config: GraphParallelConfig) -> Iterator[None]:
    """fairchem's module-level groups, made right for three dimensions during a run.

    fairchem's launcher makes them as (data, graph) over the whole world, so that the stages of a pipeline would count
    as replicas. What asks `gp_utils` during a run (callbacks, losses of others) gets this run's groups; afterwards what
    was there is put back, so that the launcher can clean up what it made.
    """
    values = {"_GRAPH_PARALLEL_GROUP": gp_group, "_DATA_PARALLEL_GROUP": dp_group, "_GP_CONFIG": config}
    with _attributes([(gp_utils, name, value) for name, value in values.items()]):
        yield


def read_graph_parallel(job: Mapping[str, Any]) -> GraphParallelConfig:
    """The `graph_parallel` block of a job; in a `resume.yaml` its modes are the names of fairchem's, not their values.

    Raises:
        ValueError: the size is no size, or mode and partition do not go together in fairchem's forward.
    """
    block = job["graph_parallel"]
    if int(block["group_size"]) < 1:
        raise ValueError(
            f"job.graph_parallel.group_size must be at least 1 (no graph parallelism), got {block['group_size']}"
        )
    config = GraphParallelConfig(
        group_size=int(block["group_size"]),
        mode=GPMode(str(block.get("mode", GPMode.ALLGATHER)).lower()),
        partition=GPPartition(str(block.get("partition", GPPartition.INDEX_SPLIT)).lower()),
    )
    if config.group_size > 1 and config.mode == GPMode.ALLGATHER and config.partition == GPPartition.SPATIAL:
        raise ValueError(
            "job.graph_parallel.partition=SPATIAL needs job.graph_parallel.mode=ALL_TO_ALL (ALLGATHER knows "
            "INDEX_SPLIT only); set the mode, or partition=INDEX_SPLIT"
        )
    return config
