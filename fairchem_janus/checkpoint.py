"""State of a pipeline rank for torch's distributed checkpoint (DCP), under the names of the unsplit model.

Every rank contributes the tensors it holds; DCP joins them, and stores one copy of what several ranks hold. The one
thing that is not a tensor, the optimizer's `param_groups`, is stored by whichever rank writes last, so every rank
offers the same, merged list in the order of the unsplit model.

One key is our own, `unit_state.janus`: the schedule that the run chose (`choice.py`). Plain fairchem asks for the keys
it knows and never sees it; a checkpoint of plain fairchem, which lacks it, is not asked for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict, set_state_dict

OWN_KEY = "janus"

if TYPE_CHECKING:
    from fairchem_janus.unit import JanusTrainEvalUnit


def unit_state(unit: JanusTrainEvalUnit) -> dict[str, Any]:
    """What fairchem's `MLIPTrainEvalUnit.state_dict` holds, for this rank's part of the model, and `OWN_KEY`."""
    model, optimizer = get_state_dict(unit.model, unit.optimizer)
    optimizer["param_groups"] = _merged_groups(
        optimizer["param_groups"], unit.unsplit_parameters, unit.topology.pipeline_group
    )
    return {
        "progress": unit.train_progress.state_dict(),
        "model": model,
        "ema": None if unit.ema_model is None else get_model_state_dict(unit.ema_model),
        "optim": optimizer,
        "scheduler": unit.scheduler.state_dict(),
        OWN_KEY: unit.choice.state(),
    }


def load_checkpoint(unit: JanusTrainEvalUnit, location: str) -> None:
    """Read the checkpoint at `location` into the unit; every rank must call this."""
    state = unit_state(unit)
    if f"unit_state.{OWN_KEY}" not in dcp.FileSystemReader(location).read_metadata().state_dict_metadata:
        del state[OWN_KEY]
    held = {"unit_state": state}
    dcp.load(state_dict=held, checkpoint_id=location)
    load_unit_state(unit, held["unit_state"])


def load_unit_state(unit: JanusTrainEvalUnit, state: Mapping[str, Any]) -> None:
    """Restore what `unit_state` made, at the same number of stages."""
    own = {name for name, _ in unit.model.named_parameters()}
    optimizer = dict(state["optim"])
    optimizer["param_groups"] = [
        {**group, "params": [name for name in group["params"] if name in own]} for group in optimizer["param_groups"]
    ]
    set_state_dict(unit.model, unit.optimizer, model_state_dict=state["model"], optim_state_dict=optimizer)
    unit.train_progress.load_state_dict(state["progress"])
    unit.scheduler.load_state_dict(state["scheduler"])
    if unit.ema_model is not None:
        unit.ema_model.load_state_dict(state["ema"])
    if OWN_KEY in state:
        unit.choice.load(state[OWN_KEY])


def _merged_groups(
    groups: list[dict[str, Any]], order: list[str], group: dist.ProcessGroup | None
) -> list[dict[str, Any]]:
    """Parameter groups of all stages joined, names in the order of the unsplit model."""
    everyone: list[list[dict[str, Any]]] = [groups]
    if group is not None:
        everyone = [[] for _ in range(dist.get_world_size(group))]
        dist.all_gather_object(everyone, groups, group=group)
    place = {name: index for index, name in enumerate(order)}
    merged = []
    for parts in zip(*everyone, strict=True):
        names = {name for part in parts for name in part["params"]}
        merged.append({**parts[0], "params": sorted(names, key=place.__getitem__)})
    return merged
