"""An optimizer's state by parameter name, whatever part of the model this rank holds.

DCP joins the tensors that the stages contribute under `optim.state.<parameter>.<name>`. The hyper-parameters,
`optim.param_groups`, are one blob to it, and of several writers the last one's survives; so every rank offers the same
list, that of the unsplit model.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

Names = Mapping[nn.Parameter, str]


def optimizer_state(optimizer: torch.optim.Optimizer, names: Names) -> dict[str, Any]:
    """As torch's `get_optimizer_state_dict`: `state` by parameter name, `param_groups` with names for numbers.

    The tensors are the optimizer's own, no copies, so that reading a checkpoint into them needs no further memory.
    """
    _fill_state(optimizer)
    packed = optimizer.state_dict()
    by_number = [names[parameter] for group in optimizer.param_groups for parameter in group["params"]]
    return {
        "state": {by_number[number]: values for number, values in packed["state"].items()},
        "param_groups": [
            {**group, "params": [by_number[number] for number in group["params"]]} for group in packed["param_groups"]
        ],
    }


def restore_optimizer(optimizer: torch.optim.Optimizer, names: Names, state: Mapping[str, Any]) -> None:
    """Take back what `optimizer_state` of this or any other split of the model made.

    Raises:
        ValueError: the parameter groups were others; the text names parameters.
    """
    stored, own = state["param_groups"], optimizer.param_groups
    if len(stored) != len(own):
        raise ValueError(
            f"the checkpoint's optimizer has {len(stored)} parameter group(s), this job's has {len(own)}: the model or "
            "optimizer_fn splits them otherwise (weight decay, no_weight_decay)"
        )
    groups, numbers, number = [], {}, 0
    for index, (theirs, group) in enumerate(zip(stored, own, strict=True)):
        held = [names[parameter] for parameter in group["params"]]
        if astray := sorted(set(held) - set(theirs["params"])):
            raise ValueError(
                f"parameter group {index} of the checkpoint's optimizer lacks {_some(astray)}, which this job has in it"
            )
        numbers.update({name: number + place for place, name in enumerate(held)})
        groups.append({**theirs, "params": list(range(number, number + len(held)))})
        number += len(held)
    values = {numbers[name]: values for name, values in state["state"].items() if name in numbers}
    optimizer.load_state_dict({"state": values, "param_groups": groups})


def merge_groups(everyone: Sequence[list[dict[str, Any]]], order: Sequence[str]) -> list[dict[str, Any]]:
    """The parameter groups of all stages joined, names in the order of the unsplit model; which stage asks is all one.

    >>> merge_groups([[{"lr": 0.1, "params": ["a", "c"]}], [{"lr": 0.1, "params": ["c", "b"]}]], ["a", "b", "c"])
    [{'lr': 0.1, 'params': ['a', 'b', 'c']}]
    """
    place = {name: index for index, name in enumerate(order)}
    merged = []
    for parts in zip(*everyone, strict=True):
        held = {name for part in parts for name in part["params"]}
        merged.append({**parts[0], "params": sorted(held, key=place.__getitem__)})
    return merged


def _fill_state(optimizer: torch.optim.Optimizer) -> None:
    """Give state to trainable parameters that have none, as torch does before it saves or loads any: a step of zero
    gradients and zero learning rate on them alone. Plain fairchem asks a checkpoint for the state of all of them.

    torch counts that step, and so do we: fairchem's `TrainCheckpointCallback` saves before the first step, which puts
    Adam's bias correction one step ahead for the whole run, here as there."""
    bare = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if parameter.requires_grad and parameter not in optimizer.state
    ]
    if not bare:
        return
    gradients = [parameter.grad for group in optimizer.param_groups for parameter in group["params"]]
    rates = [group["lr"] for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], torch.Tensor) else 0.0
        for parameter in group["params"]:
            parameter.grad = None
    for parameter in bare:
        parameter.grad = torch.zeros_like(parameter)
    # the class's, not the instance's: the learning-rate scheduler counts calls of the latter
    type(optimizer).step(optimizer)
    for group, rate in zip(optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
    everything = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for parameter, gradient in zip(everything, gradients, strict=True):
        parameter.grad = gradient


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:5])
    return shown if len(names) <= 5 else f"{shown} and {len(names) - 5} more"
