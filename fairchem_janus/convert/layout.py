"""How a job's ranks are dealt out when it moves to a pipeline, and what that does to its global batch."""

from __future__ import annotations

from dataclasses import dataclass

MICRO_BATCHES_PER_STAGE = 2
"""At the least: with fewer, stages idle for a large part of every step."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Sizes of a converted job.

    Attributes:
        P, G, D, N: pipeline, graph-parallel and data-parallel size, micro-batches per replica and step.
        num_nodes, ranks_per_node: of `job.scheduler`.
        stock_batches: batches of the sampler that made one step of the stock job: one on each data-parallel rank.
    """

    P: int
    G: int
    D: int
    N: int
    num_nodes: int
    ranks_per_node: int
    stock_batches: int

    @property
    def world_size(self) -> int:
        return self.D * self.P * self.G

    @property
    def batch_factor(self) -> float:
        """How many times larger a global batch is than the stock job's."""
        return self.N * self.D / self.stock_batches


def lay_out(
    *,
    P: int,
    G: int,
    D: int | None,
    N: int | None,
    num_nodes: int,
    ranks_per_node: int,
    stock_gp_size: int,
    on_slurm: bool,
) -> Layout:
    """Sizes for a job that ran on `num_nodes` x `ranks_per_node` ranks.

    Args:
        D: None: as many replicas as the stock job's ranks give, at least one.
        N: None: the global batch stays as it was, unless that leaves fewer than two micro-batches a stage.

    Raises:
        ValueError: a size below 1.
    """
    for name, size in (("--pipeline", P), ("--graph", G), ("--data", D), ("--micro-batches", N)):
        if size is not None and size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    nodes = num_nodes if on_slurm else 1  # fairchem ignores num_nodes in LOCAL mode
    stock_ranks = nodes * ranks_per_node
    stock_batches = max(1, stock_ranks // stock_gp_size)
    if D is None:
        D = max(1, stock_ranks // (P * G))
    if N is None:
        least = 1 if P == 1 else MICRO_BATCHES_PER_STAGE * P
        N = max(least, -(-stock_batches // D))
    world = D * P * G
    per_node = world
    if on_slurm:
        per_node = max(size for size in range(1, min(world, ranks_per_node) + 1) if world % size == 0)
    return Layout(P=P, G=G, D=D, N=N, num_nodes=world // per_node, ranks_per_node=per_node, stock_batches=stock_batches)
