"""A data set of numbers: graphs that are sizes in metadata and nothing else."""

from __future__ import annotations

import numpy as np
from fairchem.core.datasets.base_dataset import BaseDataset

from fairchem_janus.data.gars_sampler import GARSBatchSampler


class Rows(BaseDataset):
    """Graphs that are numbers of atoms (and edges) in metadata, and nothing else."""

    def __init__(self, natoms, nedges=None) -> None:
        super().__init__({"src": "/data/rows"})
        self.num_samples = len(natoms)
        self.columns = {"natoms": np.asarray(natoms, dtype=np.int64)}
        if nedges is not None:
            self.columns["nedges"] = np.asarray(nedges, dtype=np.int64)

    @property
    def _metadata(self):
        return self.columns


def sampler(sizes, D=1, d=0, N=2, edges=None, **arguments) -> GARSBatchSampler:
    """For replica d of D."""
    return GARSBatchSampler(Rows(sizes, edges), D, d, num_micro_batches=N, **arguments)
