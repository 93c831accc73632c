"""What one rank contributes to a checkpoint, under the names of the unsplit model, and how it takes it back.

Every rank offers the tensors it holds; DCP joins them, and stores one copy of what several ranks hold. Nothing is
gathered, and reading goes straight into the tensors of model, moving average and optimizer.

Keys of our own are below `unit_state.janus`. Plain fairchem asks for the keys it knows and never sees them; a
checkpoint that lacks some is not asked for them:

- `schedule`: what the run chose (`choice.py`);
- `step_size`: what a step takes from an epoch (`progress.py`), and `steps_per_epoch`;
- `unfinished_epoch`: steps of an epoch that `max_steps` broke off, which torchtnt counts as completed;
- `random.rank<r>`: random generators of global rank r (`random_state.py`).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from fairchem_janus.checkpoint import random_state
from fairchem_janus.checkpoint.contents import Shapes, check_contents, needed_contents, read_contents
from fairchem_janus.checkpoint.optimizer import merge_groups, optimizer_state, restore_optimizer
from fairchem_janus.checkpoint.progress import StepSize, converted_steps, warn_of_other_epochs

OWN_KEY = "janus"
_OWN_TEXTS = ("schedule", "step_size", "steps_per_epoch", "unfinished_epoch")

if TYPE_CHECKING:
    from fairchem_janus.unit import JanusTrainEvalUnit


def unit_state(unit: JanusTrainEvalUnit) -> dict[str, Any]:
    """What fairchem's `MLIPTrainEvalUnit.state_dict` holds, for this rank's part of the model, and `OWN_KEY`.

    Every rank must call this.
    """
    optimizer = optimizer_state(unit.optimizer, _names(unit))
    optimizer["param_groups"] = merge_groups(_of_all_stages(unit, optimizer["param_groups"]), unit.unsplit_parameters)
    return {
        "progress": unit.train_progress.state_dict(),
        "model": get_model_state_dict(unit.model),
        "ema": None if unit.ema_model is None else get_model_state_dict(unit.ema_model),
        "optim": optimizer,
        "scheduler": unit.scheduler.state_dict(),
        OWN_KEY: {
            "schedule": unit.choice.state(),
            "step_size": unit.step_size.to_json(),
            "steps_per_epoch": str(unit.steps_per_epoch),
            "unfinished_epoch": str(unit.unfinished_epoch()),
            "random": {random_state.key_of(unit.topology.grid.rank): unit.random_state.state()},
        },
    }


def load_checkpoint(unit: JanusTrainEvalUnit, location: str) -> None:
    """Read the checkpoint at `location` into the unit; every rank must call this.

    Raises:
        ValueError: there is none, or it does not fit the job; on all ranks alike, and before anything is changed.
    """
    stored = read_contents(location)
    state = unit_state(unit)
    needed: Shapes = {}
    for stage in _of_all_stages(unit, needed_contents(state)):
        needed |= stage
    check_contents(stored, needed, location)
    state[OWN_KEY] = _own_part(stored, unit.topology.grid.rank)
    held = {"unit_state": state}
    try:
        dcp.load(state_dict=held, checkpoint_id=location)
    except CheckpointException as error:  # a BaseException, which no handler would see
        rank, (cause, _) = next(iter(error.failures.items()))
        raise RuntimeError(
            f"the checkpoint {location} is damaged; resume from an earlier one, with job.runner_state_path. Reading it "
            f"failed on rank {rank}: {cause!r}"
        ) from error
    before = held["unit_state"][OWN_KEY].get("step_size")
    step_size = StepSize.of_plain_fairchem(location) if before is None else StepSize.from_json(before)
    load_unit_state(unit, held["unit_state"], step_size)


def load_unit_state(unit: JanusTrainEvalUnit, state: Mapping[str, Any], step_size: StepSize | None = None) -> None:
    """Restore what `unit_state` made.

    Args:
        step_size: of the run that made it; None: this run's.
    """
    unit.model.load_state_dict(state["model"])
    restore_optimizer(unit.optimizer, _names(unit), state["optim"])
    unit.scheduler.load_state_dict(state["scheduler"])
    if unit.ema_model is not None:
        unit.ema_model.load_state_dict(state["ema"])
    progress, own = dict(state["progress"]), state.get(OWN_KEY, {})
    if unfinished := int(own.get("unfinished_epoch", "0")):
        progress["num_epochs_completed"] -= 1
        progress["num_steps_completed_in_epoch"] = unfinished
    steps = progress["num_steps_completed_in_epoch"]
    progress["num_steps_completed_in_epoch"] = converted_steps(steps, step_size, unit.step_size, unit.steps_per_epoch)
    unit.train_progress.load_state_dict(progress)
    if step_size in (None, unit.step_size):
        warn_of_other_epochs(int(own.get("steps_per_epoch", unit.steps_per_epoch)), unit.steps_per_epoch)
    if "schedule" in own:
        unit.choice.load(own["schedule"])
    for saved in own.get("random", {}).values():
        unit.random_state.load(saved)


def _own_part(stored: Shapes, rank: int) -> dict[str, Any]:
    """Room for those of our own keys that a checkpoint has."""
    prefix = f"unit_state.{OWN_KEY}."
    keys = {key.removeprefix(prefix) for key in stored if key.startswith(prefix)}
    own: dict[str, Any] = {key: "" for key in _OWN_TEXTS if key in keys}
    num_saved = sum(key.startswith("random.") for key in keys)
    if num_saved:
        own["random"] = {random_state.key_of(rank % num_saved): b""}
        random_state.log_moved_states(num_saved, dist.get_world_size() if dist.is_initialized() else 1)
    else:
        logging.info("the checkpoint has no random states (plain fairchem saves none); generators stay as seeded")
    return own


def _names(unit: JanusTrainEvalUnit) -> dict[nn.Parameter, str]:
    return {parameter: name for name, parameter in unit.model.named_parameters()}


def _of_all_stages(unit: JanusTrainEvalUnit, value: Any) -> list[Any]:
    """The values of all ranks of this pipeline, in the order of the stages."""
    group = unit.topology.pipeline_group
    if group is None:
        return [value]
    everyone: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(everyone, value, group=group)
    return everyone
