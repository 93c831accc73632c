"""Batches of a stock fairchem sampler, grouped into optimizer steps.

What a stock sampler calls a batch is one *micro-batch* here; N consecutive ones make the share of one replica in a
global batch, and so one optimizer step. Every rank of a replica sees the same indices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from itertools import islice
from typing import Any

import numpy as np
from fairchem.core.common.data_parallel import BalancedBatchSampler, _balanced_partition
from torch.utils.data import BatchSampler, Sampler

MicroBatches = list[list[int]]


class MicroBatchSampler(Sampler[MicroBatches]):
    """Yields lists of `num_micro_batches` index lists; the last step of an epoch may have fewer.

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
        while group := [[int(i) for i in batch] for batch in islice(batches, self.num_micro_batches)]:
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
