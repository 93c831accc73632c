"""What a job must be for janus to train it; everything else is refused with the key and the fix."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from fairchem.core.components.train.train_runner import TrainEvalRunner
from fairchem.core.units.mlip_unit.mlip_unit import MLIPTrainEvalUnit
from hydra.utils import get_object
from omegaconf import OmegaConf

from fairchem_janus.config import JanusConfig
from fairchem_janus.model.checks import ModelSettings, check_model
from fairchem_janus.parallel.graph import read_graph_parallel
from fairchem_janus.parallel.topology import Grid
from fairchem_janus.planning import starting_schedule
from fairchem_janus.unit import JanusTrainEvalUnit

LOADERS = ("train_dataloader", "eval_dataloader")
_RUNNER_KEYS = tuple(name for name in inspect.signature(TrainEvalRunner.__init__).parameters if name != "self")


def is_local(job: Mapping[str, Any]) -> bool:
    """Whether the ranks of a job were started on this machine, by fairchem's command line."""
    return str(job["scheduler"]["mode"]).lower().endswith("local")


def check_job_copy(copy: Mapping[str, Any], job: Mapping[str, Any]) -> None:
    """Refuse a unit that would write into another run's folder, or draw with its seed.

    A `resume.yaml` of plain fairchem holds a copy of the job that saved it, which overrides of `job.*` do not reach.

    Raises:
        ValueError: with the override that helps.
    """
    for key in ("run_dir", "timestamp_id", "seed"):
        if copy[key] != job[key]:
            raise ValueError(
                f"job.{key}={job[key]}, but the copy of the job in runner.train_eval_unit.job_config has {copy[key]}, "
                "as in a resume.yaml of plain fairchem. Add this override: 'runner.train_eval_unit.job_config=${job}'"
            )


def check_children(children: Mapping[str, Any]) -> None:
    """Refuse arguments of the runner that are unknown, or that are not configuration.

    Raises:
        ValueError: see the texts.
    """
    for key in children:
        if key not in _RUNNER_KEYS:
            raise ValueError(f"unknown key runner.{key}; known keys: janus, {', '.join(_RUNNER_KEYS)}")
    for key in (*LOADERS, "train_eval_unit"):
        if not OmegaConf.is_config(children.get(key)):
            raise ValueError(
                f"runner.{key} must reach JanusRunner as configuration, not as an object: add _recursive_: false to "
                "the runner (on the command line: +runner._recursive_=false)"
            )
    target = children["train_eval_unit"]["_target_"]
    if get_object(target) not in (MLIPTrainEvalUnit, JanusTrainEvalUnit):
        raise ValueError(
            f"runner.train_eval_unit._target_ is {target}; janus replaces fairchem's MLIPTrainEvalUnit and knows no "
            "other"
        )


def check_job(
    job: Mapping[str, Any],
    unit_config: Mapping[str, Any],
    config: JanusConfig,
    settings: ModelSettings | None,
    *,
    world_size: int,
    rank: int,
) -> Grid:
    """Refuse jobs that cannot run, naming the key and the fix; returns the grid of ranks.

    Args:
        settings: None for a model that is not known yet, where its checkpoint is elsewhere; then it is not checked.

    Raises:
        ValueError: see the texts.
    """
    gp_size = read_graph_parallel(job).group_size
    if str(unit_config.get("train_strategy", "ddp")).lower() == "fsdp":
        raise ValueError(
            "train_eval_unit.train_strategy=fsdp cannot be combined with a pipeline, which already divides the "
            "parameters over ranks; remove it (or set it to ddp)"
        )
    grid = Grid.of(world_size=world_size, pipeline_size=config.pipeline_size, gp_size=gp_size, rank=rank)
    assert config.num_micro_batches is not None
    num_micro_batches = config.num_micro_batches * grid.D * grid.G  # comm-free ones fall into G parts
    if config.gars is not None and (config.gars.max_atoms or config.gars.max_edges):
        num_micro_batches = max(2, num_micro_batches)  # more than asked for, where the budget demands it
    if settings is not None:
        check_model(
            settings,
            pipeline_size=config.pipeline_size,
            num_micro_batches_in_step=num_micro_batches,
            partition=config.partition,
        )
    starting_schedule(config)
    return grid
