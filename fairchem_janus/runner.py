"""`JanusRunner`: fairchem's `TrainEvalRunner` with a pipeline under it.

In a job file only the runner's target, `_recursive_: false` and a `janus` block change::

    runner:
      _target_: fairchem_janus.JanusRunner
      _recursive_: false
      janus: {pipeline_size: 2, num_micro_batches: 4}
      train_dataloader: ...   # as before
      eval_dataloader: ...
      train_eval_unit: ...
      callbacks: ...

The runner receives its children as configuration, checks the job, builds the process groups and only then instantiates
the children, in the order of the YAML, with fairchem's dataloader builder and `MLIPTrainEvalUnit` replaced by ours.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from fairchem.core.common.distutils import get_device_for_local_rank, get_rank, get_world_size
from fairchem.core.components.callbacks import StopBeforeTimeoutCallback
from fairchem.core.components.train.train_runner import TrainEvalRunner
from hydra.utils import instantiate
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from fairchem_janus.checkpoint import save_checkpoint
from fairchem_janus.config import JanusConfig
from fairchem_janus.data.edges import EdgeCounts
from fairchem_janus.data.loader import build_dataloader
from fairchem_janus.deadline import follow_first_rank
from fairchem_janus.engine.held import stages_of_rows
from fairchem_janus.interrupt import StopOnSignal, link_last_checkpoint
from fairchem_janus.job import LOADERS, check_children, check_job, check_job_copy, is_local
from fairchem_janus.model.checks import ModelSettings, check_edges_given, read_model_settings
from fairchem_janus.model.frugal import only_blocks
from fairchem_janus.model.partition import partition_blocks
from fairchem_janus.parallel.graph import GraphParallel, fairchem_groups, read_graph_parallel, switched_off
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.parallel.watch import FailureWatch
from fairchem_janus.planning import starting_schedule
from fairchem_janus.report import run_folder, worst_peak_gib
from fairchem_janus.summary import describe_run, describe_stages
from fairchem_janus.unit import JanusTrainEvalUnit


class JanusRunner(TrainEvalRunner):
    """Trains a conservative eSEN or UMA model pipeline-parallel.

    Args:
        janus: the `janus` block, see `JanusConfig`.
        children: the arguments of `TrainEvalRunner`, as configuration (`_recursive_: false`).

    Raises:
        ValueError: anything wrong with the job, before a model is built.
    """

    def __init__(self, *, janus: Mapping[str, Any] | None = None, **children: Any) -> None:
        self.watch = FailureWatch.of_world()
        self.watch.start()
        self._groups = ExitStack()
        try:
            self._build(janus, children)
        except Exception as error:
            self._give_up(error)
            raise

    def _build(self, janus: Mapping[str, Any] | None, children: dict[str, Any]) -> None:
        config = JanusConfig.from_mapping(janus)
        check_children(children)
        unit_config = children["train_eval_unit"]
        job = unit_config["job_config"]
        settings = read_model_settings(unit_config["model"])
        grid = check_job(job, unit_config, config, settings, world_size=get_world_size(), rank=get_rank())
        for key in LOADERS:
            check_edges_given(settings, children[key].get("dataset"), name=key)
        if grid.rank and is_local(job):
            logging.getLogger().setLevel(logging.WARNING)  # the ranks share one console; rank 0 speaks for all
        device = torch.device(get_device_for_local_rank())
        topology = Topology.build(grid, device)
        graph = None
        if topology.grid_groups is not None:
            graph = GraphParallel(topology.gp_group, read_graph_parallel(job))
            self._groups.enter_context(fairchem_groups(*topology.grid_groups, graph.config))
        num_micro_batches = config.num_micro_batches
        assert num_micro_batches is not None

        def build(key: str, value: Any) -> Any:
            if key in LOADERS:
                return build_dataloader(
                    value,
                    name=key.removesuffix("_dataloader"),
                    grid=grid,
                    num_micro_batches=num_micro_batches,
                    oversize=config.oversize,
                    run_folder=Path(run_folder(job)),
                    pin_memory=device.type == "cuda",
                    prefetch_steps=config.prefetch_steps,
                    gars=asdict(config.gars) if config.gars and key == "train_dataloader" else None,
                    edge_counts=EdgeCounts.of_backbone(settings.backbone),
                )
            if key == "train_eval_unit":
                with only_blocks(settings.num_blocks, _own_blocks(config, settings, grid)):
                    make_unit = instantiate(OmegaConf.merge(value, _OWN_UNIT))
                self.prepare_model(make_unit.keywords["model"])
                return make_unit(topology=topology, janus=config, graph=graph)
            if key == "callbacks":
                return [instantiate(callback) for callback in value or []]
            return value

        with switched_off():
            super().__init__(**{key: build(key, value) for key, value in children.items()})
        self.train_eval_unit.reporter.take_data_wait = self.train_dataloader.take_wait
        if grid.rank == 0:
            logging.info("\n%s", describe_run(config, grid, settings, self.train_dataloader, self.eval_dataloader))
            logging.info("\n%s", describe_stages(self.train_eval_unit.stage_parameters))

    def prepare_model(self, model: torch.nn.Module) -> None:
        """Called with the built, unsplit model before it is cut; for subclasses.

        Parameters of blocks that this rank does not own are on the meta device: names and shapes without numbers.
        """

    def run(self) -> None:
        """Train; if anything fails on this rank, all ranks end within seconds with the first error on the console.

        SIGTERM and Ctrl-C in LOCAL mode end the run with a saved state, see `StopOnSignal`. In SLURM mode submitit
        handles signals, and `save_state` is told so.
        """
        try:
            self._add_callbacks()
            if is_local(self.job_config):
                stop = StopOnSignal(self._save_interrupted, self._preemption_folder, self.watch.shared_store)
                self.callbacks = [*self.callbacks, stop]
                with stop.installed():
                    super().run()
            else:
                super().run()
            self._report_end()
        except Exception as error:
            self.watch.report(error)
            raise
        except SystemExit:  # a signal's
            self.watch.stop()
            raise
        finally:
            self._groups.close()
        self.watch.stop()

    def _add_callbacks(self) -> None:
        """fairchem's runner adds the callback of `stop_before_timeout_min` later; here it shares a clock first."""
        if self.stop_before_timeout_min is not None:
            timeout = StopBeforeTimeoutCallback(
                timeout_hr=self._get_slurm_timeout_hr(), stop_before_timeout_min=self.stop_before_timeout_min
            )
            self.callbacks, self.stop_before_timeout_min = [*self.callbacks, timeout], None
        for callback in self.callbacks:
            if isinstance(callback, StopBeforeTimeoutCallback):
                follow_first_rank(callback, self.train_eval_unit.topology.device)

    def close(self) -> None:
        """End a run that was not started with `run`: nothing of it stays in this process."""
        self._groups.close()
        self.watch.stop()

    def _give_up(self, error: Exception) -> None:
        """What went wrong before `run`, for all ranks to see."""
        self._groups.close()
        self.watch.report(error)

    def _report_end(self) -> None:
        unit = self.train_eval_unit
        progress = unit.train_progress
        done = ((progress.num_steps_completed, self.max_steps), (progress.num_epochs_completed, self.max_epochs))
        unit.reporter.end(
            step=progress.num_steps_completed,
            completed=any(limit is not None and count >= limit for count, limit in done),
            peak_memory_gib=worst_peak_gib(unit.topology.device),
        )

    @property
    def _preemption_folder(self) -> str:
        return self.job_config.metadata.preemption_checkpoint_dir

    def load_state(self, checkpoint_location: str | None) -> None:
        """As in fairchem; its launcher calls this once it has set `job_config`, which is checked here."""
        try:
            check_job_copy(self.train_eval_unit.job_config, self.job_config)
        except ValueError as error:
            self._give_up(error)
            raise
        super().load_state(checkpoint_location)

    def save_state(self, checkpoint_location: str, is_preemption: bool = False) -> bool:
        """As in fairchem: in the case of preemption, only a link to the last complete checkpoint is made."""
        if is_preemption:
            return link_last_checkpoint(self.job_config.metadata.checkpoint_dir, checkpoint_location)
        return super().save_state(checkpoint_location)

    def _save_interrupted(self, location: str) -> bool:
        """Save where fairchem would put its link; if the disk is full, make the link."""
        first = get_rank() == 0
        if first and os.path.islink(location):
            os.unlink(location)
        return save_checkpoint(self.train_eval_unit, location) or (
            first and self.save_state(location, is_preemption=True)
        )

    callbacks: list[Any]
    stop_before_timeout_min: float | None
    train_dataloader: DataLoader[list[Any]]
    eval_dataloader: DataLoader[list[Any]]
    train_eval_unit: JanusTrainEvalUnit


_OWN_UNIT = {"_target_": f"{JanusTrainEvalUnit.__module__}.{JanusTrainEvalUnit.__qualname__}", "_partial_": True}


def _own_blocks(config: JanusConfig, settings: ModelSettings, grid: Grid) -> set[int]:
    """The blocks of the stages that this rank holds: one, or several under an unfolded schedule."""
    planned = starting_schedule(config)
    stages = {grid.p} if planned.is_folded else stages_of_rows(planned)[grid.p]
    ranges = partition_blocks(settings.num_blocks, grid.P, config.partition)
    return {block for stage in stages for block in ranges[stage]}
