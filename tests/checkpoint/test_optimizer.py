"""Optimizer state by parameter name: cut into stages, joined, and handed to another cut."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from fairchem_janus.checkpoint.optimizer import merge_groups, optimizer_state, restore_optimizer

NAMES = ("a", "b", "c", "d")


def parameters(names: tuple[str, ...] = NAMES) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.full((3,), float(ord(name)))) for name in names}


def make(held: dict[str, nn.Parameter], kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    """Two groups: `a` and `b` without weight decay; either may be empty."""
    groups = [[p for n, p in held.items() if n in "ab"], [p for n, p in held.items() if n not in "ab"]]
    return kind([{"params": groups[0], "weight_decay": 0.0}, {"params": groups[1], "lr": 0.5}], lr=0.1, **options)


def names_of(held: dict[str, nn.Parameter]) -> dict[nn.Parameter, str]:
    return {p: name for name, p in held.items()}


def train(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter], steps: int = 3) -> None:
    for step in range(steps):
        for name, parameter in held.items():
            parameter.grad = torch.arange(3.0) + step + ord(name)
        optimizer.step()
        optimizer.zero_grad()


def saved(optimizer: torch.optim.Optimizer, held: dict[str, nn.Parameter]) -> dict[str, Any]:
    return optimizer_state(optimizer, names_of(held))


def joined(*parts: dict[str, Any]) -> dict[str, Any]:
    """What a checkpoint makes of the parts of several stages."""
    values = {name: value for part in parts for name, value in part["state"].items()}
    return {"state": values, "param_groups": merge_groups([part["param_groups"] for part in parts], NAMES)}


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.SGD])
def test_saving_before_the_first_step_does_to_training_what_torch_does(kind: Any) -> None:
    """Adam counts one step more from then on; fairchem's callback saves at step 0, and losses must be fairchem's."""
    trained = []
    for ours in (True, False):
        held = parameters()
        optimizer = make(held, kind)
        if ours:
            saved(optimizer, held)
        else:
            get_optimizer_state_dict(nn.ParameterDict(held), optimizer)
        train(optimizer, held)
        trained.append(held)
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in NAMES)


@pytest.mark.parametrize(
    ("kind", "options"),
    [(torch.optim.AdamW, {}), (torch.optim.SGD, {"momentum": 0.9}), (torch.optim.SGD, {}), (torch.optim.NAdam, {})],
)
def test_stages_save_what_one_process_saves_and_train_on_like_it(kind: Any, options: dict[str, Any]) -> None:
    """The first stage holds one group only: its other one is empty."""
    whole, first, second = parameters(), parameters(("a", "b")), parameters(("c", "d"))
    optimizers = [make(held, kind, **options) for held in (whole, first, second)]
    for optimizer, held in zip(optimizers, (whole, first, second), strict=True):
        train(optimizer, held)
    from_one = saved(optimizers[0], whole)
    from_two = joined(saved(optimizers[1], first), saved(optimizers[2], second))
    assert from_two["param_groups"] == from_one["param_groups"]
    assert from_one["param_groups"][1]["lr"] == 0.5
    assert from_two["state"].keys() == from_one["state"].keys()

    again = {name: nn.Parameter(whole[name].detach().clone()) for name in ("b", "c")}  # another cut
    resumed = make(again, kind, **options)
    restore_optimizer(resumed, names_of(again), from_two)
    train(resumed, again)
    train(optimizers[0], whole)
    for name, parameter in again.items():
        assert torch.equal(parameter, whole[name])


def test_hyper_parameters_come_from_the_checkpoint() -> None:
    held = parameters()
    optimizer = make(held)
    train(optimizer, held)
    optimizer.param_groups[1]["lr"] = 0.07
    state = saved(optimizer, held)
    other = make(held)
    restore_optimizer(other, names_of(held), state)
    assert [group["lr"] for group in other.param_groups] == [0.1, 0.07]


def test_saving_before_the_first_step_and_for_parameters_without_gradients_changes_no_parameter() -> None:
    """As torch's own `get_state_dict`: state for all trainable parameters, from a step of size zero."""
    held = parameters()
    held["d"].requires_grad_(False)
    optimizer = make(held)
    before = {name: p.detach().clone() for name, p in held.items()}
    assert saved(optimizer, held)["state"].keys() == {"a", "b", "c"}
    train(optimizer, {name: held[name] for name in ("a", "b")})
    held["d"].requires_grad_(True)
    kept = held["a"].grad = torch.ones(3)
    moment = optimizer.state[held["a"]]["exp_avg"].clone()
    state = saved(optimizer, held)["state"]
    assert state.keys() == set(NAMES)
    assert float(state["d"]["exp_avg"].abs().sum()) == 0
    assert torch.equal(state["a"]["exp_avg"], moment) and held["a"].grad is kept
    assert torch.equal(held["c"], before["c"]) and torch.equal(held["d"], before["d"])
    assert [group["lr"] for group in optimizer.param_groups] == [0.1, 0.5]


def test_the_tensors_are_the_optimizers_own() -> None:
    """So a checkpoint is read straight into them, and nothing is held twice."""
    held = parameters()
    optimizer = make(held)
    train(optimizer, held)
    state = saved(optimizer, held)
    assert state["state"]["a"]["exp_avg"] is optimizer.state[held["a"]]["exp_avg"]
    own = optimizer.state[held["a"]]["exp_avg"].data_ptr()
    restore_optimizer(optimizer, names_of(held), state)
    assert optimizer.state[held["a"]]["exp_avg"].data_ptr() == own


def test_another_number_of_groups_is_refused() -> None:
    held = parameters()
    state = saved(make(held), held)
    with pytest.raises(ValueError, match=r"has 2 parameter group\(s\), this job's has 1"):
        restore_optimizer(torch.optim.AdamW(list(held.values())), names_of(held), state)


def test_a_parameter_in_another_group_is_named() -> None:
    held = parameters()
    state = saved(make(held), held)
    state["param_groups"][0]["params"].remove("b")
    with pytest.raises(ValueError, match="parameter group 0 of the checkpoint's optimizer lacks b"):
        restore_optimizer(make(held), names_of(held), state)
