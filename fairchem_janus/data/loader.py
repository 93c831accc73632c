"""The data loader of a job, regrouped: one item is a replica's share of a global batch, a list of micro-batches."""

from __future__ import annotations

import csv
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairchem.core.components.common.dataloader_builder import get_dataloader as fairchem_get_dataloader
from hydra.utils import get_object, instantiate
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from fairchem_janus.data.sampler import MicroBatchSampler, replica_sampler_fn
from fairchem_janus.parallel.topology import Grid

Samples = list[tuple[int, str, Any]]


def graph_id(dataset: Any, index: int) -> str:
    """Name of a graph for people: data set and row in its files, as far as the data set tells."""
    name, rows, place = "", dataset, index
    if hasattr(dataset, "_get_dataset_and_sample_index"):
        which, place = dataset._get_dataset_and_sample_index(index)
        name, rows = dataset.dataset_names[which], dataset.datasets[which]
    if hasattr(rows, "indices"):
        place = rows.indices[place]
    return f"{name}[{int(place)}]"


class MicroBatchDataset(Dataset[Samples]):
    """The job's data set, asked for a whole micro-batch at a time; each sample comes with its index and name."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, indices: list[int]) -> Samples:
        return [(index, graph_id(self.dataset, index), self.dataset[index]) for index in indices]

    @property
    def dataset_names(self) -> list[str]:
        return self.dataset.dataset_names


class MicroBatchCollater:
    """Collates each micro-batch of a step with the job's own collater.

    A batch gains `graph_numbers` [num_graphs] (int64, index in the data set) and `graph_ids` (list of names).
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any]) -> None:
        self.collate_fn = collate_fn

    def __call__(self, micro_batches: list[Samples]) -> list[Any]:
        return [self._collate(samples) for samples in micro_batches]

    def _collate(self, samples: Samples) -> Any:
        batch = self.collate_fn([sample for _, _, sample in samples])
        batch["graph_numbers"] = torch.tensor([number for number, _, _ in samples], dtype=torch.int64)
        batch["graph_ids"] = [name for _, name, _ in samples]
        return batch


def build_dataloader(
    config: Mapping[str, Any], *, grid: Grid, num_micro_batches: int, oversize: str, report: Path, pin_memory: bool
) -> DataLoader[list[Any]]:
    """Instantiate a job's dataloader block for one replica of the grid.

    Args:
        config: the block, whose `_target_` must be fairchem's `get_dataloader`.
        oversize: what to do about graphs that the sampler leaves out: `warn` or `error`.
        report: CSV file for the names of such graphs; rank 0 writes it.

    Raises:
        ValueError: the block is of another kind, no graph is left, or `oversize` is `error` and graphs are left out.
    """
    if get_object(config["_target_"]) is not fairchem_get_dataloader:
        raise ValueError(
            f"a dataloader of the job is built by {config['_target_']}; janus regroups the batches of "
            "fairchem.core.components.common.dataloader_builder.get_dataloader only"
        )
    parts = {
        key: instantiate(value) if OmegaConf.is_config(value) else value
        for key, value in config.items()
        if key != "_target_"
    }
    dataset, make_sampler = parts["dataset"], replica_sampler_fn(parts["batch_sampler_fn"])
    if len(dataset) == 0:
        raise ValueError("the data set of a dataloader is empty; check its src paths and sampling ratios")
    try:
        batches = make_sampler(dataset=dataset, num_replicas=grid.D, rank=grid.d)
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"the sampler could not make batches for {grid.D} replica(s): {error or type(error).__name__}. Check "
            "max_atoms and min_atoms against the sizes of the graphs, and that there are at least as many batches as "
            "replicas"
        ) from error
    _report_left_out(dataset, batches, oversize=oversize, report=report, write=grid.rank == 0)
    sampler = MicroBatchSampler(batches, num_micro_batches)
    return DataLoader(
        MicroBatchDataset(dataset),
        batch_sampler=sampler,
        collate_fn=MicroBatchCollater(parts["collate_fn"]),
        num_workers=parts["num_workers"],
        pin_memory=pin_memory,
    )


def _report_left_out(dataset: Any, batches: Any, *, oversize: str, report: Path, write: bool) -> None:
    """Count and name the graphs that `MaxAtomDistributedBatchSampler` leaves out; fairchem drops them silently."""
    if not hasattr(batches, "all_batches"):
        return
    used = np.concatenate([np.asarray(batch, dtype=np.int64) for batch in batches.all_batches])
    left_out = np.setdiff1d(np.arange(len(dataset)), used)
    if len(left_out) == 0:
        return
    sizes = np.asarray(dataset.get_metadata("natoms", left_out.tolist())).reshape(-1)
    too_large = sizes > batches.max_atoms
    counts = f"{too_large.sum()} above max_atoms={batches.max_atoms}, {(~too_large).sum()} for min_atoms"
    text = (
        f"{len(left_out)} of {len(dataset)} graphs are never used: {counts}; the largest has {sizes.max()} atoms. "
        f"Their names are in {report}. Raise max_atoms to {sizes.max()} to use them"
    )
    if write:
        report.parent.mkdir(parents=True, exist_ok=True)
        with report.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["graph", "natoms", "reason"])
            for index, size, large in zip(left_out.tolist(), sizes.tolist(), too_large.tolist(), strict=True):
                writer.writerow([graph_id(dataset, index), size, "max_atoms" if large else "min_atoms"])
    if len(used) == 0:
        raise ValueError(f"no graph is left to train on: {text}")
    if oversize == "error" and too_large.any():
        raise ValueError(f"{text}, or set runner.janus.oversize=warn to train without them")
    if write:
        logging.warning(text)
