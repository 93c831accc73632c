"""Makes the micro-batches of a step ready for the engine: on the device, with keys for their random draws."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fairchem_janus.model.randomness import combine_keys, graph_keys, step_roll_phase
from fairchem_janus.parallel.topology import Topology


class BatchPreparation:
    """Called with a replica's micro-batches before every step.

    Args:
        seed: the job's seed.
        check: compare a checksum of the batches over the ranks of the replica.
    """

    def __init__(self, topology: Topology, *, seed: int, check: bool = False) -> None:
        self.topology = topology
        self.seed = seed
        self.check = check

    def __call__(self, data: list[Any], *, step: int | None) -> list[Any]:
        """The batches on the device, keyed for optimizer step `step`; None (evaluation) draws nothing.

        Raises:
            RuntimeError: with `check`, the ranks of the replica loaded different batches.
        """
        # pinned batches copy while the host goes on; a copy on the same stream is done before anything reads it
        batches = [batch.to(self.topology.device, non_blocking=True) for batch in data]
        if self.check:
            self._compare_checksums(batches)
        if step is not None:
            key_batches(batches, seed=self.seed, step=step)
        return batches

    def _compare_checksums(self, batches: list[Any]) -> None:
        group = self.topology.replica_group
        if group is None:
            return
        own = [batch["pos"].double().sum() + 7.0 * batch["atomic_numbers"].sum() for batch in batches]
        own = torch.stack([torch.tensor(float(len(batches)), dtype=torch.float64, device=self.topology.device), *own])
        sums = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(sums, own, group=group)
        for rank, other in enumerate(sums):
            if not torch.equal(other, own):
                raise RuntimeError(
                    f"{self.topology.grid.describe_rank()} loaded another batch than rank {rank} of its replica: the "
                    "data loader or sampler is not deterministic over ranks"
                )


def key_batches(batches: list[Any], *, seed: int, step: int) -> None:
    """Give every graph its key and every batch the step's roll phase (see `model/randomness.py`), in place."""
    step_key, phase = combine_keys(seed, step), step_roll_phase(seed, step)
    for batch in batches:
        batch["graph_keys"] = graph_keys(batch["graph_numbers"], step_key)
        batch["roll_phase"] = phase
