"""A checkpoint folder is complete or not there.

fairchem resumes from the youngest folder in `checkpoints/` that has a `.metadata` file. Written in place, a checkpoint
that replaces another (a run that has just resumed from `step_100` saves `step_100` again) is for a while a mixture of
both, and one whose inference file is missing looks complete. So::

    checkpoints/.incomplete/step_100/   all ranks write here; nothing looks for checkpoints in it
    checkpoints/step_100/               renamed by rank 0 when everything is there

A crash leaves `.incomplete` behind, which the next save clears away. A full disk is the one failure that training
survives: the checkpoint is given up, on all ranks alike, and the next one is tried.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fairchem.core.units.mlip_unit.mlip_unit import UNIT_INFERENCE_CHECKPOINT, UNIT_RESUME_CONFIG
from omegaconf import DictConfig, OmegaConf
from torch.distributed.checkpoint.api import CheckpointException

from fairchem_janus.checkpoint.contents import METADATA
from fairchem_janus.checkpoint.disk import CheckpointWriter, disk_is_full
from fairchem_janus.checkpoint.export import write_inference_checkpoint

if TYPE_CHECKING:
    from fairchem_janus.unit import JanusTrainEvalUnit

INCOMPLETE = ".incomplete"
REPLACED = ".replaced"


def save_checkpoint(unit: JanusTrainEvalUnit, location: str) -> bool:
    """Write a checkpoint folder; every rank must call this.

    Returns:
        Whether it is there; False, with an error in the log, if a disk or quota is full.

    Raises:
        RuntimeError: anything else went wrong, on whichever rank.
    """
    first = not dist.is_initialized() or dist.get_rank() == 0
    partial = os.path.join(os.path.dirname(location), INCOMPLETE, os.path.basename(location))
    config = resume_config(unit, location)
    try:
        _on_first_rank(lambda: _begin(partial, config))
        dcp.save({"unit_state": unit.state_dict(), "config": config}, storage_writer=CheckpointWriter(partial))
        _on_first_rank(lambda: _finish(partial, location, export=unit.save_inference_ckpt))
    except (OSError, CheckpointException) as error:  # the latter is a BaseException, which no handler would see
        failures = _failures(error)
        if not all(map(disk_is_full, failures.values())):
            text = "; ".join(f"rank {rank}: {cause!r}" for rank, cause in failures.items())
            raise RuntimeError(f"saving {location} failed on {text}") from error
        if first:
            shutil.rmtree(os.path.dirname(partial), ignore_errors=True)
            ranks = ", ".join(map(str, failures))
            logging.error(
                f"checkpoint {location} was NOT saved: the disk is full (rank(s) {ranks}). Training goes on and will "
                "try the next one; make room, or lower max_saved_checkpoints"
            )
        return False
    if first:
        logging.info(f"Saved dcp checkpoint to {location}")
    return True


def resume_config(unit: JanusTrainEvalUnit, location: str) -> DictConfig:
    """The job that goes on from `location`, as in fairchem's `MLIPTrainEvalUnit.save_state`.

    Copies of the job are named as `${job}` again, so that overrides of `job.timestamp_id` and the like hold everywhere.
    """
    config = OmegaConf.load(unit.job_config.metadata.config_path)
    assert isinstance(config, DictConfig)
    config.runner = _name_job(OmegaConf.to_container(config.runner, resolve=False))
    config.job.runner_state_path = location
    model = unit.get_finetune_model_config()
    if model is not None:
        config.runner.train_eval_unit.model = model
    return config


def _name_job(node: Any) -> Any:
    if isinstance(node, list):
        return [_name_job(child) for child in node]
    if isinstance(node, dict):
        return {key: "${job}" if key == "job_config" else _name_job(child) for key, child in node.items()}
    return node


def _begin(partial: str, config: DictConfig) -> None:
    shutil.rmtree(os.path.dirname(partial), ignore_errors=True)
    os.makedirs(partial)
    OmegaConf.save(config, os.path.join(partial, UNIT_RESUME_CONFIG))


def _finish(partial: str, location: str, *, export: bool) -> None:
    if export:
        _try_to_export(partial)
    _publish(partial, location)


def _try_to_export(partial: str) -> None:
    """Add the inference checkpoint; the training checkpoint is good without it."""
    path = os.path.join(partial, UNIT_INFERENCE_CHECKPOINT)
    try:
        write_inference_checkpoint(partial, path)
    except OSError as error:
        if not disk_is_full(error):
            raise
        os.remove(path)
        logging.error(
            f"the disk is full: {UNIT_INFERENCE_CHECKPOINT} was NOT written, the rest of the checkpoint was. Make it "
            "later with fairchem.core.units.mlip_unit.mlip_unit.convert_train_checkpoint_to_inference_checkpoint"
        )


def _publish(partial: str, location: str) -> None:
    """Rename into place. At no time is there less than one complete checkpoint of this name, or of the old one's.

    A folder that holds folders of others (`checkpoints` itself, say) is not replaced but added to, `.metadata` last,
    without which nothing takes it for a checkpoint.
    """
    replaced = location + REPLACED
    if os.path.isdir(location) and any(entry.is_dir() for entry in os.scandir(location)):
        for name in sorted(os.listdir(partial), key=lambda name: name == METADATA):
            os.replace(os.path.join(partial, name), os.path.join(location, name))
        shutil.rmtree(os.path.dirname(partial), ignore_errors=True)
        return
    if os.path.isdir(location):
        shutil.rmtree(replaced, ignore_errors=True)
        os.rename(location, replaced)
    os.rename(partial, location)
    shutil.rmtree(replaced, ignore_errors=True)
    os.rmdir(os.path.dirname(partial))


def _on_first_rank(act: Callable[[], None]) -> None:
    """Run something on rank 0; what it raises, all ranks raise."""
    outcome: list[OSError | None] = [None]
    if not dist.is_initialized() or dist.get_rank() == 0:
        try:
            act()
        except OSError as error:
            outcome = [error]
    if dist.is_initialized() and dist.get_world_size() > 1:
        dist.broadcast_object_list(outcome, src=0)
    if outcome[0] is not None:
        raise outcome[0]


def _failures(error: OSError | CheckpointException) -> dict[int, BaseException]:
    if isinstance(error, CheckpointException):
        return {rank: cause for rank, (cause, _) in error.failures.items()}
    return {0: error}
