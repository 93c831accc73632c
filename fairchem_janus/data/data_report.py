"""What a job's data are and which graphs are left out, in the run folder.

For a stock sampler the graphs that it leaves out without a word (`left_out_train.csv`). For `GARSBatchSampler` a
summary of everything, `data_report.json`, one object per loader: counts by data set, size histograms, steps, and the
names of all graphs that are not used, with the reason.
"""

from __future__ import annotations

import csv
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fairchem_janus.data.columns import graph_id
from fairchem_janus.data.gars_sampler import GARSBatchSampler

NUM_SHOWN = 8
"""Names of graphs in a line of the log; the report has all."""


def report_left_out(dataset: Any, batches: Any, *, oversize: str, report: Path, write: bool) -> None:
    """Count and name the graphs that `MaxAtomDistributedBatchSampler` leaves out; fairchem drops them silently.

    Raises:
        ValueError: no graph is left, or `oversize` is `error` and graphs are left out.
    """
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


class DataReport:
    """The object of one loader in `data_report.json`, with one line in the log for what is left out.

    Args:
        name: of the loader, `train` or `eval`.
        sampler: its sampler; the report follows the graphs that it drops in each epoch.
    """

    def __init__(self, path: Path, name: str, dataset: Any, sampler: GARSBatchSampler) -> None:
        self.path = path
        self.name = name
        self.dataset = dataset
        self.content = _content(dataset, sampler)
        self._write()
        num_bins = sampler.num_micro_batches * sampler.num_replicas
        per_step = self.content["used_per_epoch"] / len(sampler)
        if per_step < num_bins:
            logging.warning(
                f"a step of the {name} loader has {per_step:.3g} graphs for {num_bins} micro-batches: some stay empty. "
                "Use a larger global batch or fewer micro-batches"
            )
        sampler.on_drop = self.dropped

    def dropped(self, epoch: int, graphs: NDArray) -> None:
        """Note the graphs that make no full step in `epoch`."""
        names = [graph_id(self.dataset, index) for index in graphs.tolist()]
        self.content["left_out"]["incomplete_step"][str(epoch)] = names
        self._write()
        logging.info(f"epoch {epoch}: {len(names)} graphs make no full step and are left out: {shortened(names)}")

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        everything = json.loads(self.path.read_text()) if self.path.exists() else {}
        everything[self.name] = self.content
        self.path.write_text(json.dumps(everything, indent=1) + "\n")


def _content(dataset: Any, sampler: GARSBatchSampler) -> dict[str, Any]:
    over_budget = [
        {"graph": graph_id(dataset, index), "natoms": int(sampler.sizes[index])}
        | ({} if sampler.edges is None else {"nedges": int(sampler.edges[index])})
        for index in sampler.over_budget.tolist()
    ]
    batches, dropped = sampler.global_batches(0)
    return {
        "graphs": len(dataset),
        "datasets": _datasets(dataset),
        "used_per_epoch": sum(map(len, batches)),
        "steps_per_epoch": len(sampler),
        "micro_batches_per_step": sampler.num_micro_batches * sampler.num_replicas,
        "budget_of_a_micro_batch": sampler.budget,
        "atoms": _distribution(sampler.sizes),
        "edges": None if sampler.edges is None else _distribution(sampler.edges),
        "left_out": {
            "over_budget": over_budget,
            "incomplete_step": {},
            "incomplete_step_per_epoch": len(dropped),
            "unlabelled": "known when a graph is loaded: see the log",
        },
    }


def _datasets(dataset: Any) -> dict[str, dict[str, int]]:
    """Name -> graphs in an epoch, and frames behind them (fewer or more, by the sampling ratio)."""
    if not hasattr(dataset, "cumulative_sizes"):
        return {}
    counts = np.diff([0, *dataset.cumulative_sizes]).tolist()
    parts = zip(dataset.dataset_names, counts, dataset.datasets, strict=True)
    return {name: {"graphs": count, "frames": len(part)} for name, count, part in parts}


def _distribution(values: NDArray) -> dict[str, Any]:
    counts, borders = np.histogram(values, bins=min(12, max(1, len(np.unique(values)))))
    return {
        "total": int(values.sum()),
        "min": int(values.min()),
        "median": float(np.median(values)),
        "max": int(values.max()),
        "histogram": {"borders": [round(border, 3) for border in borders.tolist()], "counts": counts.tolist()},
    }


def report_gars(dataset: Any, sampler: GARSBatchSampler, *, name: str, oversize: str, path: Path, write: bool) -> None:
    """Write the report (rank 0) and say which graphs the budget keeps out.

    Raises:
        ValueError: `oversize` is `error` and graphs are left out.
    """
    if write:
        DataReport(path, name, dataset, sampler)
    if len(sampler.over_budget) == 0:
        return
    names = [graph_id(dataset, index) for index in sampler.over_budget.tolist()]
    text = (
        f"{len(names)} of {len(dataset)} graphs are never used: they exceed the budget of a micro-batch "
        f"({sampler.budget}), the largest has {sampler.sizes[sampler.over_budget].max()} atoms: {shortened(names)}. "
        f"All are in {path}"
    )
    if oversize == "error":
        raise ValueError(f"{text}. Raise the budget, or set runner.janus.oversize=warn to train without them")
    if write:
        logging.warning(text)


def shortened(names: Sequence[str]) -> str:
    """The first few names."""
    more = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more
