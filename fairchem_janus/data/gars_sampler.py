"""`GARSBatchSampler`: global batches of a wanted size, packed into micro-batches by GARS, every graph once an epoch.

A job asks for it with a `janus.gars` block, or, for any of its dataloaders, in place of a stock sampler::

    batch_sampler_fn:
      _target_: fairchem_janus.data.gars_sampler.GARSBatchSampler
      _partial_: true
      graphs_per_step: 64

An epoch is one seeded order of all graphs, cut into global batches; both depend on the data, the settings and the
number of the epoch alone. So the graphs of a step are the same at any P, D and number of loader workers, and a run
resumed at another D goes on with the same global batches. Only the last stage of the way, dealing a global batch to
N * D micro-batches, knows D.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Sampler

from fairchem_janus.data.columns import graph_column, graph_id, leaf_dataset, repair
from fairchem_janus.data.edges import UNKNOWN_CUTOFF, EdgeCounts
from fairchem_janus.data.gars import MicroBatch, pack
from fairchem_janus.data.gars_config import GarsConfig
from fairchem_janus.data.sampler import MicroBatches, MicroBatchPlan


class GARSBatchSampler(Sampler[MicroBatches]):
    """Yields, for each optimizer step, this replica's micro-batches.

    Args:
        dataset: fairchem's data set, with `natoms` (and, for anything that needs them, edge counts) in its metadata.
        num_replicas, rank: D and d.
        num_micro_batches: N, per replica and step. A step has fewer where it has too few graphs, and more where
            `max_atoms` or `max_edges` demand it; a replica without a graph gets an empty list.
        gp_size: G.
        edge_counts: where the metadata keep them, unless `edges_column` says so.
        settings: see `GarsConfig`.

    Attributes:
        sizes, edges: atoms and edges of every graph [M]; edges is None where nothing needs them.
        over_budget: indices of graphs that exceed `max_atoms` or `max_edges` on their own, and are never used.
        on_drop: called in each epoch with its number and the graphs that `incomplete: drop` leaves out of it.

    Raises:
        ValueError: bad settings, metadata that are missing or do not fit, or no graph that could be used.
    """

    def __init__(
        self,
        dataset: Any,
        num_replicas: int,
        rank: int,
        *,
        num_micro_batches: int,
        gp_size: int = 1,
        edge_counts: EdgeCounts = UNKNOWN_CUTOFF,
        **settings: Any,
    ) -> None:
        if not 0 <= rank < num_replicas:
            raise ValueError(f"rank must be 0 to {num_replicas - 1} for {num_replicas} replicas, got {rank}")
        if len(dataset) == 0:
            raise ValueError("the data set is empty; check its src paths and sampling ratios")
        self.config = config = GarsConfig.from_mapping(settings)
        self.num_replicas = num_replicas
        self.rank = rank
        self.num_micro_batches = num_micro_batches
        self.gp_size = gp_size
        self.sizes = graph_column(dataset, ["natoms"], what="the number of atoms of every graph")
        self.edges: NDArray | None = None
        if config.needs_edges:
            columns = [config.edges_column] if config.edges_column else edge_counts.columns
            what = "the number of edges of every graph"
            self.edges = graph_column(dataset, columns, what=what, options=edge_counts.options)
        for values, least, what in ((self.sizes, 1, "atoms"), (self.edges, 0, "edges")):
            if values is not None and (values < least).any():
                wrong = int(np.argmax(values < least))
                raise ValueError(
                    f"the metadata say {values[wrong]} {what} for {graph_id(dataset, wrong)}. "
                    f"{repair(leaf_dataset(dataset, wrong), edge_counts.options if what == 'edges' else '')}"
                )
        too_large = np.zeros(len(dataset), dtype=bool)
        for values, limit in ((self.sizes, config.max_atoms), (self.edges, config.max_edges)):
            if values is not None and limit is not None:
                too_large |= values > limit
        self.over_budget = np.flatnonzero(too_large)
        self.usable = np.flatnonzero(~too_large)
        if len(self.usable) == 0:
            raise ValueError(
                f"no graph is left: all {len(dataset)} exceed the budget of a micro-batch ({self.budget}); the "
                f"smallest has {self.sizes.min()} atoms"
            )
        self._num_steps = _num_steps(self._measure(self.usable), config)
        self.on_drop: Callable[[int, NDArray], None] | None = None
        self.epoch = 0
        self.start_iteration = 0

    @property
    def budget(self) -> str:
        """Of a micro-batch, for people."""
        limits = {"atoms": self.config.max_atoms, "edges": self.config.max_edges}
        return " and ".join(f"{limit} {name}" for name, limit in limits.items() if limit is not None) or "none"

    def __len__(self) -> int:
        """Optimizer steps in an epoch, the same in every epoch."""
        return self._num_steps

    def set_epoch_and_start_iteration(self, epoch: int, start_iteration: int) -> None:
        """Start at optimizer step `start_iteration` of `epoch`."""
        self.epoch = epoch
        self.start_iteration = start_iteration

    def __iter__(self) -> Iterator[MicroBatches]:
        epoch = self.epoch
        batches, dropped = self.global_batches(epoch)
        if len(dropped) and self.on_drop is not None:
            self.on_drop(epoch, dropped)
        for step in range(self.start_iteration, len(batches)):
            yield self._pack(batches[step], epoch, step)

    def global_batches(self, epoch: int) -> tuple[list[NDArray], NDArray]:
        """The graphs of each step of an epoch, and those that `incomplete: drop` leaves out; not a matter of D."""
        order = self.usable
        if self.config.shuffle:
            order = np.random.default_rng([self.config.seed, epoch]).permutation(order)
        borders = _borders(self._measure(order), self._num_steps, self.config)
        return np.split(order[: borders[-1]], borders[1:-1]), order[borders[-1] :]

    def _measure(self, graphs: NDArray) -> NDArray:
        """What the size of a global batch is counted in, for these graphs."""
        if self.config.edges_per_step is not None:
            assert self.edges is not None
            return self.edges[graphs]
        return np.ones(len(graphs), dtype=np.int64) if self.config.graphs_per_step else self.sizes[graphs]

    def _pack(self, graphs: NDArray, epoch: int, step: int) -> MicroBatches:
        config = self.config
        sizes, edges = self.sizes[graphs], None if self.edges is None else self.edges[graphs]
        least = [self.num_micro_batches]
        for values, limit in ((sizes, config.max_atoms), (edges, config.max_edges)):
            if values is not None and limit is not None:
                least.append(math.ceil(int(values.sum()) / (limit * self.num_replicas)))
        for num_micro_batches in itertools.count(max(least)):
            packing = pack(
                sizes,
                num_micro_batches,
                self.num_replicas,
                self.gp_size,
                config.rank_budget,
                seed=[config.seed, epoch, step],
                edges=edges,
                cost=config.cost_function,
                max_atoms=config.max_atoms,
                max_edges=config.max_edges,
                return_leftover=True,
                method=config.method,
            )
            if not packing.leftover:
                break  # at the latest with a bin for every graph
        return [_plan(micro_batch, graphs) for micro_batch in packing.replicas[self.rank]]


def _plan(micro_batch: MicroBatch, graphs: NDArray) -> MicroBatchPlan:
    place = {graph: position for position, graph in enumerate(micro_batch.graphs)}
    return MicroBatchPlan(
        graphs=tuple(graphs[list(micro_batch.graphs)].tolist()),
        tag=micro_batch.tag,
        local_bins=tuple(tuple(place[graph] for graph in members) for members in micro_batch.local_bins),
        num_edges=micro_batch.num_edges,
    )


def _num_steps(measure: NDArray, config: GarsConfig) -> int:
    """Steps of an epoch, from what all usable graphs measure; their order does not matter."""
    if config.graphs_per_step is not None:
        full, rest = divmod(len(measure), config.graphs_per_step)
        if config.incomplete == "drop" and not full:
            raise ValueError(
                f"the {len(measure)} graphs make no global batch of graphs_per_step={config.graphs_per_step}, and "
                "incomplete=drop leaves them all out; lower graphs_per_step or set incomplete to short"
            )
        return full + (rest > 0 and config.incomplete == "short")
    total = int(measure.sum())
    if total == 0:
        raise ValueError("no graph has an edge, so janus.gars.edges_per_step cannot divide them; use graphs_per_step")
    per_step = config.atoms_per_step or config.edges_per_step
    assert per_step is not None
    return min(max(1, round(total / per_step)), len(measure))


def _borders(measure: NDArray, num_steps: int, config: GarsConfig) -> NDArray:
    """Positions in an epoch's order at which steps begin, and the end of the last [num_steps + 1].

    By atoms or edges, a graph belongs to the step in whose equal share of the total its middle lies; a step that would
    get no graph (its neighbour has a giant one) takes the nearest.
    """
    if config.graphs_per_step is not None:
        return np.minimum(np.arange(num_steps + 1) * config.graphs_per_step, len(measure))
    ends = np.cumsum(measure, dtype=np.int64)
    steps = np.arange(1, num_steps)
    inner = np.searchsorted(2 * ends - measure, 2 * (ends[-1] * steps // num_steps))
    inner = np.maximum.accumulate(np.maximum(inner - steps, 0)) + steps
    inner = np.minimum(inner, len(measure) - num_steps + steps)
    return np.concatenate([[0], inner, [len(measure)]])
