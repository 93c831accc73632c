"""A job's data set seen from outside: a graph's name, and columns of `metadata.npz` for every graph in its order.

fairchem's own `get_metadata` knows `natoms` alone in a combined data set, and opens every frame where metadata are
missing. `graph_column` follows the combination (sampling ratios included), the subsets and the files itself, and says
which file lacks what and how to write it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fairchem.core.datasets.base_dataset import create_dataset
from hydra.utils import instantiate
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch.utils.data import Subset


def graph_id(dataset: Any, index: int) -> str:
    """Name of a graph for people: data set and row in its files, as far as the data set tells."""
    name, rows, place = "", dataset, index
    if hasattr(dataset, "_get_dataset_and_sample_index"):
        which, place = dataset._get_dataset_and_sample_index(index)
        name, rows = dataset.dataset_names[which], dataset.datasets[which]
    if hasattr(rows, "indices"):
        place = rows.indices[place]
    return f"{name}[{int(place)}]"


def graph_column(dataset: Any, names: Sequence[str], *, what: str, options: str = "") -> NDArray:
    """One integer per graph [M].

    Args:
        dataset: fairchem's `ConcatDataset`, `Subset` or `BaseDataset`.
        names: columns to look for; each data set gives the first that it has.
        what: what they mean, for the error.
        options: of `fairchem-janus data stats` that make it write the column.

    Raises:
        ValueError: a data set has none of them, or metadata that do not fit its frames.
    """
    if hasattr(dataset, "cumulative_sizes"):  # combined; a sampling ratio above 1 repeats the data set
        starts = [0, *dataset.cumulative_sizes]
        parts = []
        for part, start, stop in zip(dataset.datasets, starts[:-1], starts[1:], strict=True):
            values = graph_column(part, names, what=what, options=options)
            parts.append(values[np.arange(stop - start) % len(values)] if stop > start else values[:0])
        return np.concatenate(parts)
    if isinstance(dataset, Subset):
        return graph_column(dataset.dataset, names, what=what, options=options)[np.asarray(dataset.indices)]
    columns = _metadata(dataset)
    for name in names:
        if name in columns:
            return np.asarray(columns[name])
    raise ValueError(
        f"GARS needs {what} before a graph is loaded, but the metadata.npz of {sources(dataset)} "
        f"{'do not exist' if not columns else 'have no column ' + ' or '.join(names)}. {repair(dataset, options)}"
    )


def _metadata(dataset: Any) -> dict[str, Any]:
    try:
        return dataset._metadata
    except (AssertionError, KeyError) as error:  # fairchem: another number of frames; files with different columns
        raise ValueError(f"the metadata.npz of {sources(dataset)} do not fit: {error}. {repair(dataset)}") from error


def sources(dataset: Any) -> str:
    """Where a data set without subsets lies, for people."""
    return ", ".join(map(str, getattr(dataset, "paths", ()))) or type(dataset).__name__


def repair(dataset: Any, options: str = "") -> str:
    """The commands that (re)write a data set's metadata."""
    commands = [
        f"fairchem-janus data stats {path}{options and ' '}{options} --write-metadata"
        for path in getattr(dataset, "paths", ()) or ("SRC",)
    ]
    return f"To write the metadata: {'; '.join(commands)}"


def instantiate_dataset(config: Any) -> Any:
    """A job's data set; fairchem's error about metadata of another length gets the name of the data set.

    Raises:
        ValueError: the metadata do not have one entry per frame.
    """
    try:
        return instantiate(config)
    except Exception as error:  # Hydra's, around fairchem's AssertionError
        if "metadata size" not in str(error):
            raise
        blocks: Any = OmegaConf.to_object(config.get("dataset_configs", {}))
        for name, block in blocks.items():
            for split, files in block["splits"].items():
                try:
                    create_dataset(block, split)
                except AssertionError as mismatch:
                    paths = [files["src"]] if isinstance(files["src"], str) else files["src"]
                    commands = "; ".join(f"fairchem-janus data stats {path} --write-metadata" for path in paths)
                    raise ValueError(
                        f"metadata.npz of data set {name}.{split} ({', '.join(paths)}) does not fit its frames: "
                        f"{mismatch} Rewrite it: {commands}"
                    ) from error
        raise


def leaf_dataset(dataset: Any, index: int) -> Any:
    """The data set without subsets that holds graph `index`."""
    if hasattr(dataset, "_get_dataset_and_sample_index"):
        return leaf_dataset(dataset.datasets[dataset._get_dataset_and_sample_index(index)[0]], 0)
    return dataset.dataset if isinstance(dataset, Subset) else dataset
