"""What a sampler hands to the loader, and stock fairchem samplers brought to it.

A sampler of this package yields one `MicroBatches` per optimizer step, a replica's share of the global batch.
`GARSBatchSampler` (`gars_sampler.py`) makes them itself; here a stock sampler's batches are grouped: what it calls a
batch is one *micro-batch*, and N consecutive ones make a step. Every rank of a replica sees the same indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Literal

import numpy as np
from fairchem.core.common.data_parallel import BalancedBatchSampler, _balanced_partition
from torch.utils.data import BatchSampler, Sampler


@dataclass(frozen=True, slots=True)
class MicroBatchPlan:
    """A micro-batch that is yet to be loaded."""

    graphs: tuple[int, ...]
    """Indices into the data set, in the order in which they are to be collated."""
    tag: Literal["comm-free", "dist"] | None = None
    """GARS's tag for the graph-parallel ranks, see `gars.MicroBatch`; None: not packed by GARS."""
    local_bins: tuple[tuple[int, ...], ...] = ()
    """comm-free: for each of the G ranks, which of `graphs` are its own, as positions in `graphs`."""
    num_edges: int | None = None
    """From the metadata, None if they do not tell."""


MicroBatches = list[MicroBatchPlan]
"""What a replica loads for one optimizer step."""


class MicroBatchSampler(Sampler[MicroBatches]):
    """Yields `num_micro_batches` batches of a stock sampler at a time; the last step of an epoch may have fewer.

    Args:
        batches: a batch sampler with `set_epoch_and_start_iteration`, as fairchem's are.
    """

    def __init__(self, batches: Any, num_micro_batches: int) -> None:
        self.batches = batches
        self.num_micro_batches = num_micro_batches

    def __len__(self) -> int:
        """Optimizer steps in an epoch."""
        return math.ceil(len(self.batches) / self.num_micro_batches)

    def __iter__(self) -> Iterator[MicroBatches]:
        batches = iter(self.batches)
        while group := [MicroBatchPlan(tuple(map(int, batch))) for batch in islice(batches, self.num_micro_batches)]:
            yield group

    def set_epoch_and_start_iteration(self, epoch: int, start_iteration: int) -> None:
        """Start at optimizer step `start_iteration` of `epoch`."""
        self.batches.set_epoch_and_start_iteration(epoch, start_iteration * self.num_micro_batches)


class ReplicaBalancedBatchSampler(Sampler[list[int]]):
    """fairchem's `BalancedBatchSampler` over replicas instead of ranks, without its all-gathers.

    fairchem gathers every rank's indices over the world in each iteration; with several ranks a replica the gathered
    list would hold repeats. Each rank here simply enumerates all replicas' index lists, which are deterministic.
    """

    def __init__(self, *, dataset: Any, num_replicas: int, rank: int, **kwargs: Any) -> None:
        self.rank = rank
        self.replicas = [
            BalancedBatchSampler(dataset=dataset, num_replicas=num_replicas, rank=replica, **kwargs)
            for replica in range(num_replicas)
        ]

    def __len__(self) -> int:
        return len(self.replicas[self.rank])

    def __iter__(self) -> Iterator[list[int]]:
        own = self.replicas[self.rank]
        if own.disabled:
            yield from BatchSampler.__iter__(own)
            return
        for batches in zip(*(BatchSampler.__iter__(replica) for replica in self.replicas), strict=True):
            sizes = [own._get_natoms(batch) for batch in batches]
            if any(size is None for size in sizes):
                yield batches[self.rank]
                continue
            indices = np.concatenate(batches)
            parts = _balanced_partition(np.concatenate(sizes), num_parts=len(batches))
            yield indices[parts[self.rank]].tolist()

    def set_epoch_and_start_iteration(self, epoch: int, start_iteration: int) -> None:
        for replica in self.replicas:
            replica.set_epoch_and_start_iteration(epoch, start_iteration)


def replica_sampler_fn(batch_sampler_fn: Callable[..., Any]) -> Callable[..., Any]:
    """The job's batch sampler, with fairchem's `BalancedBatchSampler` replaced by ours."""
    if isinstance(batch_sampler_fn, functools.partial) and batch_sampler_fn.func is BalancedBatchSampler:
        return functools.partial(ReplicaBalancedBatchSampler, **batch_sampler_fn.keywords)
    return batch_sampler_fn
