"""Where a rank sits in the D x P x G grid, and the process groups that follow from it.

`rank = (d * P + p) * G + g`: graph-parallel ranks are neighbours, then pipeline stages, then replicas, so that
fairchem's own graph-parallel groups (contiguous ranks) stay right. P = 2, D = 2, G = 1::

            p = 0    p = 1
    d = 0   rank 0   rank 1      one replica: a pipeline of two stages
    d = 1   rank 2   rank 3      the other replica
            |________________    a column holds the same parameters: their gradients are summed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@dataclass(frozen=True, slots=True)
class Grid:
    """Coordinates of one rank; pure arithmetic, no communication.

    Attributes:
        D, P, G: data-parallel, pipeline and graph-parallel sizes.
        rank: global rank, in `range(D * P * G)`.
    """

    D: int
    P: int
    G: int
    rank: int

    @classmethod
    def of(cls, *, world_size: int, pipeline_size: int, gp_size: int = 1, rank: int = 0) -> Grid:
        """The grid of `world_size` ranks.

        Raises:
            ValueError: the world is not a multiple of P * G; the text shows the grid and the nearest world sizes.
        """
        replica = pipeline_size * gp_size
        if world_size % replica:
            below, above = world_size // replica * replica, (world_size // replica + 1) * replica
            sizes = " or ".join(str(size) for size in (below, above) if size)
            raise ValueError(
                f"the world has {world_size} ranks, which is not D x P x G with P = janus.pipeline_size = "
                f"{pipeline_size} and G = job.graph_parallel.group_size = {gp_size}: it must be a multiple of "
                f"{replica}. Set job.scheduler.ranks_per_node (times job.scheduler.num_nodes) to {sizes}, or change "
                f"runner.janus.pipeline_size. A replica is\n{cls(1, pipeline_size, gp_size, 0).picture()}"
            )
        return cls(D=world_size // replica, P=pipeline_size, G=gp_size, rank=rank)

    @property
    def d(self) -> int:
        return self.rank // (self.P * self.G)

    @property
    def p(self) -> int:
        return self.rank // self.G % self.P

    @property
    def g(self) -> int:
        return self.rank % self.G

    def rank_at(self, *, d: int | None = None, p: int | None = None, g: int | None = None) -> int:
        """Global rank at the given coordinates; those not given are this rank's own."""
        d, p, g = (own if given is None else given for given, own in ((d, self.d), (p, self.p), (g, self.g)))
        return (d * self.P + p) * self.G + g

    def speaks_for(self, batch: Any) -> bool:
        """Whether this rank counts a micro-batch: of the ranks that share a dist one, only the first does."""
        return self.g == 0 or batch.get("halo", None) is None

    def picture(self) -> str:
        """The ranks of this rank's replica, a line for every stage."""
        ranks = [[self.rank_at(p=p, g=g) for g in range(self.G)] for p in range(self.P)]
        width = len(str(ranks[-1][-1]))
        head = " ".join(f"g={g}".rjust(width + 5) for g in range(self.G))
        rows = [f"  p={p} " + " ".join(f"rank {rank:>{width}}" for rank in row) for p, row in enumerate(ranks)]
        return "\n".join([f"      {head}", *rows])

    def __str__(self) -> str:
        return f"D={self.D} x P={self.P} x G={self.G}"

    def describe_rank(self) -> str:
        return f"rank {self.rank} (d={self.d} p={self.p} g={self.g})"


@dataclass(slots=True)
class Topology:
    """A grid with its process groups. `None` stands for a group of one rank, where nothing need be sent.

    Attributes:
        pipeline_group: the P stages of this rank's replica (fixed g).
        down_group, up_group: the same ranks, for messages to the next and to the previous stage. One direction a
            group keeps every NCCL communicator first-in first-out, so opposite messages can never wait for each other.
        gradient_group: ranks that hold this stage's parameters (all d and g): gradients are summed over it.
        dp_group: the same stage of every replica (fixed p and g).
        replica_group: all P * G ranks that load the same global batch.
        gp_group: the G ranks of this stage and replica, which share the graphs of dist micro-batches.
        grid_groups: (graph-parallel, data-parallel) groups as fairchem knows them, one-rank groups included.
    """

    grid: Grid
    device: torch.device
    pipeline_group: dist.ProcessGroup | None = None
    down_group: dist.ProcessGroup | None = None
    up_group: dist.ProcessGroup | None = None
    gradient_group: dist.ProcessGroup | None = None
    dp_group: dist.ProcessGroup | None = None
    replica_group: dist.ProcessGroup | None = None
    gp_group: dist.ProcessGroup | None = None
    grid_groups: tuple[dist.ProcessGroup, dist.ProcessGroup] | None = None
    _own_groups: list[dist.ProcessGroup] = field(default_factory=list)

    @classmethod
    def build(cls, grid: Grid, device: torch.device) -> Topology:
        """Make the groups; every rank of the world must call this at the same point."""
        topology = cls(grid=grid, device=device)
        if grid.D * grid.P * grid.G == 1:
            return topology
        mesh = init_device_mesh(device.type, (grid.D, grid.P, grid.G), mesh_dim_names=("dp", "pp", "gp"))
        if grid.P > 1:
            topology.pipeline_group = mesh.get_group("pp")
            topology.down_group = topology.new_groups(range(grid.P))
            topology.up_group = topology.new_groups(range(grid.P))
        if grid.D > 1:
            topology.dp_group = mesh.get_group("dp")
        if grid.G > 1:
            topology.gp_group = mesh.get_group("gp")
            topology.grid_groups = topology.gp_group, mesh.get_group("dp")
        if grid.D * grid.G > 1:
            topology.gradient_group = mesh["dp", "gp"]._flatten("gradients").get_group()
        if grid.P * grid.G > 1:
            topology.replica_group = mesh["pp", "gp"]._flatten("replica").get_group()
        return topology

    def new_groups(self, rows: Sequence[int]) -> dist.ProcessGroup | None:
        """One more group over the given ranks of each pipeline; returns this rank's, None if it is in none.

        Every rank of the world must call this at the same point.
        """
        grid, own = self.grid, None
        for d in range(grid.D):
            for g in range(grid.G):
                group = dist.new_group([grid.rank_at(d=d, p=p, g=g) for p in rows])
                if (d, g) == (grid.d, grid.g) and grid.p in rows:
                    own = group
        if own is not None:
            self._own_groups.append(own)
        return own

    def gather_from_replicas(self, items: list[Any]) -> list[Any]:
        """The lists of every replica's stage 0 joined; every rank of the world must call this."""
        grid = self.grid
        everyone: list[list[Any]] = [items]
        if grid.D * grid.P * grid.G > 1:
            everyone = [[] for _ in range(grid.D * grid.P * grid.G)]
            dist.all_gather_object(everyone, items)
        first = [Grid(grid.D, grid.P, grid.G, rank).p == 0 for rank in range(len(everyone))]
        return [item for own, counts in zip(everyone, first, strict=True) if counts for item in own]

    @property
    def is_first_stage(self) -> bool:
        return self.grid.p == 0

    @property
    def is_last_stage(self) -> bool:
        return self.grid.p == self.grid.P - 1
