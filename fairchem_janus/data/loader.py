"""The data loader of a job, regrouped: one item is a replica's share of a global batch, a list of micro-batches."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from fairchem.core.components.common.dataloader_builder import get_dataloader as fairchem_get_dataloader
from hydra.utils import get_object, instantiate
from numpy.typing import NDArray
from omegaconf import OmegaConf
from torch.utils.data import DataLoader, Dataset

from fairchem_janus.data.columns import graph_id, instantiate_dataset, leaf_dataset, repair
from fairchem_janus.data.data_report import report_gars, report_left_out, shortened
from fairchem_janus.data.edges import UNKNOWN_CUTOFF, EdgeCounts
from fairchem_janus.data.gars_sampler import GARSBatchSampler
from fairchem_janus.data.sampler import MicroBatchPlan, MicroBatchSampler, replica_sampler_fn
from fairchem_janus.parallel.graph import COMM_FREE, DIST
from fairchem_janus.parallel.topology import Grid

ALONE = Grid(D=1, P=1, G=1, rank=0)


class LoadedMicroBatch(NamedTuple):
    """A micro-batch whose graphs are loaded, but not collated; of a comm-free one, the graphs of this rank alone."""

    plan: MicroBatchPlan
    names: list[str]
    samples: list[Any]


class MicroBatchDataset(Dataset[LoadedMicroBatch]):
    """The job's data set, asked for a whole micro-batch at a time.

    Args:
        sizes: atoms of every graph as the metadata have them, to compare with; None: do not.
        grid: of the graphs of a comm-free micro-batch, only those of its rank are loaded.
    """

    def __init__(self, dataset: Any, sizes: NDArray | None = None, grid: Grid = ALONE) -> None:
        self.dataset = dataset
        self.sizes = sizes
        self.grid = grid

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, micro_batch: MicroBatchPlan | list[int]) -> LoadedMicroBatch:
        """Load a micro-batch; plain indices will do where there is no more to say.

        Raises:
            ValueError: a graph is of another size than its metadata say: packing and budgets relied on that.
        """
        plan = micro_batch if isinstance(micro_batch, MicroBatchPlan) else MicroBatchPlan(tuple(micro_batch))
        if plan.tag == COMM_FREE and self.grid.G > 1:
            own = tuple(plan.graphs[position] for position in plan.local_bins[self.grid.g])
            plan = MicroBatchPlan(own, COMM_FREE)
        samples = [self.dataset[index] for index in plan.graphs]
        names = [graph_id(self.dataset, index) for index in plan.graphs]
        if self.sizes is not None:
            for index, name, sample in zip(plan.graphs, names, samples, strict=True):
                if (natoms := sample["pos"].shape[0]) != self.sizes[index]:
                    raise ValueError(
                        f"metadata.npz says {self.sizes[index]} atoms for {name}, but it has {natoms}. "
                        f"{repair(leaf_dataset(self.dataset, index))}"
                    )
        return LoadedMicroBatch(plan, names, samples)

    @property
    def dataset_names(self) -> list[str]:
        return self.dataset.dataset_names


class StepItem(list[Any]):
    """An item of the loader: this replica's micro-batches, collated. With graph parallelism, None stands for a
    comm-free micro-batch none of whose graphs is this rank's.

    Attributes:
        unlabelled: names of graphs that are not among them because they have no label at all.
    """

    unlabelled: list[str]

    def pin_memory(self) -> StepItem:
        """Called by the loader's pinning thread; `AtomicData` cannot do it itself."""
        for batch in filter(None, self):
            batch.apply(lambda tensor: tensor.pin_memory())
        return self


class MicroBatchCollater:
    """Collates each micro-batch of a step with the job's own collater.

    A batch gains `graph_numbers` [num_graphs] (int64, index in the data set) and `graph_ids` (list of names). One that
    GARS packed also gains `gars_num_edges`, where the loader builds the graphs or the metadata tell, and `gars_tag`
    (`comm-free` or `dist`).

    With graph parallelism every micro-batch has a tag: one of a stock sampler is dist, as in fairchem, unless it has
    fewer atoms than there are ranks; its graphs are then dealt out whole.

    A graph without any label of its data set's tasks can teach nothing and is left out; fairchem's collater fails on
    it without naming it. One with only some of them is an error.
    """

    def __init__(self, collate_fn: Callable[[list[Any]], Any], grid: Grid = ALONE) -> None:
        self.collate_fn = collate_fn
        self.grid = grid
        self.tasks: Mapping[str, Any] | None = getattr(collate_fn, "dataset_task_map", None)

    def __call__(self, micro_batches: list[LoadedMicroBatch]) -> StepItem:
        item = StepItem()
        item.unlabelled = []
        for loaded in micro_batches:
            labelled = [self._has_labels(*named) for named in zip(loaded.names, loaded.samples, strict=True)]
            item.unlabelled += [name for name, known in zip(loaded.names, labelled, strict=True) if not known]
            kept = [position for position, known in enumerate(labelled) if known]
            if self.grid.G == 1:
                if kept:
                    item.append(self._collate(loaded, kept))
            else:
                self._add_part(item, loaded, kept)
        return item

    def _add_part(self, item: StepItem, loaded: LoadedMicroBatch, kept: list[int]) -> None:
        """This rank's part of a micro-batch: all of it (dist), some of its graphs, or None for none of them."""
        if loaded.plan.tag == COMM_FREE:
            item.append(self._collate(loaded, kept, COMM_FREE) if kept else None)
        elif kept:
            if sum(loaded.samples[position]["pos"].shape[0] for position in kept) >= self.grid.G:
                item.append(self._collate(loaded, kept, DIST))
            else:
                kept = kept[self.grid.g :: self.grid.G]
                item.append(self._collate(loaded, kept, COMM_FREE) if kept else None)

    def _has_labels(self, name: str, sample: Any) -> bool:
        if self.tasks is None:
            return True
        dataset = sample["dataset"]
        wanted = self.tasks.get(dataset if isinstance(dataset, str) else dataset[0], {})
        missing = [task for task in wanted if task not in sample]
        if len(missing) == len(wanted):
            return False
        if missing:
            raise ValueError(
                f"{name} has a label for some tasks of its data set, but none for {', '.join(missing)}. Remove it "
                "(fairchem-janus data import --skip-bad leaves such frames out)"
            )
        return True

    def _collate(self, loaded: LoadedMicroBatch, kept: list[int], tag: str | None = None) -> Any:
        plan = loaded.plan
        batch = self.collate_fn([loaded.samples[position] for position in kept])
        batch["graph_numbers"] = torch.tensor([plan.graphs[position] for position in kept], dtype=torch.int64)
        batch["graph_ids"] = [loaded.names[position] for position in kept]
        if tag or plan.tag:
            batch["gars_tag"] = tag or plan.tag
        if plan.tag and batch["edge_index"].shape[1]:
            batch["gars_num_edges"] = int(batch["edge_index"].shape[1])
        elif plan.num_edges is not None and len(kept) == len(plan.graphs):
            batch["gars_num_edges"] = plan.num_edges
        return batch


class StepLoader(DataLoader[Any]):
    """A `DataLoader` that measures how long its consumer waits, and names graphs that turned out to have no labels.

    Args:
        speaks: whether this rank logs for its replica.
    """

    def __init__(self, *args: Any, speaks: bool, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.speaks = speaks
        self._waited = 0.0
        self._unlabelled: set[str] = set()
        self._any_labelled = False

    def take_wait(self) -> float:
        """Seconds waited for items since the last call."""
        waited, self._waited = self._waited, 0.0
        return waited

    def __iter__(self) -> Iterator[Any]:
        started = time.perf_counter()
        items = super().__iter__()
        self._waited += time.perf_counter() - started
        return self._measured(items)

    def _measured(self, items: Iterator[Any]) -> Iterator[Any]:
        while True:
            started = time.perf_counter()
            item = next(items, None)
            self._waited += time.perf_counter() - started
            if item is None:
                return
            self._any_labelled = self._any_labelled or bool(item)
            if item.unlabelled and not self._any_labelled:
                raise ValueError(
                    f"none of the first {len(item.unlabelled)} graphs has a label of any task, such as "
                    f"{item.unlabelled[0]}: the names of the tasks and those that key_mapping gives the labels differ"
                )
            if new := [name for name in item.unlabelled if name not in self._unlabelled]:
                self._unlabelled.update(new)
                if self.speaks:
                    logging.warning(f"{len(new)} graphs have no label of any task and are left out: {shortened(new)}")
            yield item


def build_dataloader(
    config: Mapping[str, Any],
    *,
    name: str,
    grid: Grid,
    num_micro_batches: int,
    oversize: str,
    run_folder: Path,
    pin_memory: bool,
    prefetch_steps: int | None = None,
    gars: Mapping[str, Any] | None = None,
    edge_counts: EdgeCounts = UNKNOWN_CUTOFF,
) -> StepLoader:
    """Instantiate a job's dataloader block for one replica of the grid.

    Args:
        config: the block, whose `_target_` must be fairchem's `get_dataloader`.
        name: `train` or `eval`.
        oversize: what to do about graphs that the sampler leaves out: `warn` or `error`.
        run_folder: gets the names of such graphs; rank 0 writes.
        prefetch_steps: steps that each loader worker loads ahead; None: torch's default.
        gars: settings of a `GARSBatchSampler` that takes the place of the block's own sampler.
        edge_counts: see `GARSBatchSampler`.

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
        if key not in ("_target_", "dataset")
    }
    dataset, make_sampler = instantiate_dataset(config["dataset"]), replica_sampler_fn(parts["batch_sampler_fn"])
    if len(dataset) == 0:
        raise ValueError("the data set of a dataloader is empty; check its src paths and sampling ratios")
    if gars is not None:
        make_sampler = functools.partial(GARSBatchSampler, **gars)
    if isinstance(make_sampler, functools.partial) and make_sampler.func is GARSBatchSampler:
        known: dict[str, Any] = {"num_micro_batches": num_micro_batches, "gp_size": grid.G, "edge_counts": edge_counts}
        sampler: Any = GARSBatchSampler(dataset, grid.D, grid.d, **known | make_sampler.keywords)
        report = run_folder / "data_report.json"
        report_gars(dataset, sampler, name=name, oversize=oversize, path=report, write=grid.rank == 0)
        sizes = sampler.sizes
    else:
        batches = _stock_batches(make_sampler, dataset, grid)
        if len(batches) < num_micro_batches and grid.rank == 0 and name == "train":
            logging.warning(
                f"an epoch of the {name} loader has {len(batches)} batches a replica, fewer than num_micro_batches="
                f"{num_micro_batches}: a step is a whole epoch, and evaluations by epoch follow every step"
            )
        report = run_folder / f"left_out_{name}.csv"
        report_left_out(dataset, batches, oversize=oversize, report=report, write=grid.rank == 0)
        sampler, sizes = MicroBatchSampler(batches, num_micro_batches), None
    num_workers = parts["num_workers"]
    return StepLoader(
        MicroBatchDataset(dataset, sizes, grid),
        batch_sampler=sampler,
        collate_fn=MicroBatchCollater(parts["collate_fn"], grid),
        num_workers=num_workers,
        prefetch_factor=prefetch_steps if num_workers else None,
        persistent_workers=num_workers > 0,
        # not the default, which is spawn where fairchem's launcher spawned the ranks: an open LMDB cannot be pickled
        multiprocessing_context="fork" if num_workers else None,
        pin_memory=pin_memory,
        speaks=grid.p == 0,
    )


def _stock_batches(make_sampler: Callable[..., Any], dataset: Any, grid: Grid) -> Any:
    try:
        return make_sampler(dataset=dataset, num_replicas=grid.D, rank=grid.d)
    except (AssertionError, ValueError) as error:
        raise ValueError(
            f"the sampler could not make batches for {grid.D} replica(s): {error or type(error).__name__}. Check "
            "max_atoms and min_atoms against the sizes of the graphs, and that there are at least as many batches as "
            "replicas"
        ) from error
