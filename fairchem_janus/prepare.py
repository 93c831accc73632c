"""Makes the micro-batches of a step ready for the engine: on the device, with keys for their random draws."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from fairchem_janus.model.randomness import combine_keys, graph_keys, step_roll_phase
from fairchem_janus.parallel.graph import DIST, GraphParallel
from fairchem_janus.parallel.topology import Topology


class BatchPreparation:
    """Called with a replica's micro-batches before every step.

    Args:
        seed: the job's seed.
        check: compare a checksum of the batches over the ranks of the replica.
        graph: given to dist micro-batches as `halo`, by which everything downstream knows them; None if G = 1.
    """

    def __init__(
        self, topology: Topology, *, seed: int, check: bool = False, graph: GraphParallel | None = None
    ) -> None:
        self.topology = topology
        self.seed = seed
        self.check = check
        self.graph = graph

    def __call__(self, data: list[Any], *, step: int | None) -> list[Any]:
        """The batches on the device, keyed for optimizer step `step`; None (evaluation) draws nothing.

        Raises:
            RuntimeError: with `check`, the ranks of the replica loaded different batches.
        """
        # pinned batches copy while the host goes on; a copy on the same stream is done before anything reads it
        device = self.topology.device
        batches = [None if batch is None else batch.to(device, non_blocking=True) for batch in data]
        if self.check:
            self._compare_checksums(batches)
        present = [batch for batch in batches if batch is not None]
        if self.graph is not None:
            self.graph.meter.reset()
            for batch in present:
                if batch["gars_tag"] == DIST:
                    batch["halo"] = self.graph
        if step is not None:
            key_batches(present, seed=self.seed, step=step)
        return batches

    def _compare_checksums(self, batches: list[Any]) -> None:
        """Ranks of one pipeline hold the same; those of a graph-parallel group the same dist micro-batches."""
        zero = torch.zeros((), dtype=torch.float64, device=self.topology.device)
        sums = [zero if b is None else b["pos"].double().sum() + 7.0 * b["atomic_numbers"].sum() for b in batches]
        shared = [
            zero if b is None or b.get("gars_tag", DIST) != DIST else s for b, s in zip(batches, sums, strict=True)
        ]
        for group, values in ((self.topology.pipeline_group, sums), (self.topology.gp_group, shared)):
            if group is not None:
                self._compare(torch.stack([zero + len(batches), *values]), group)

    def _compare(self, own: torch.Tensor, group: dist.ProcessGroup) -> None:
        found = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(found, own, group=group)
        for place, other in enumerate(found):
            if not torch.equal(other, own):
                raise RuntimeError(
                    f"{self.topology.grid.describe_rank()} loaded another batch than rank "
                    f"{dist.get_global_rank(group, place)}: the data loader or sampler is not deterministic over ranks"
                )


def key_batches(batches: list[Any], *, seed: int, step: int) -> None:
    """Give every graph its key and every batch the step's roll phase (see `model/randomness.py`), in place."""
    step_key, phase = combine_keys(seed, step), step_roll_phase(seed, step)
    for batch in batches:
        batch["graph_keys"] = graph_keys(batch["graph_numbers"], step_key)
        batch["roll_phase"] = phase
