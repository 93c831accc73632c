"""A checkpoint that does not fit is refused with the names of what is wrong, before anything is read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fairchem_janus.checkpoint.contents import check_contents, needed_contents, read_contents


def state(**changes: Any) -> dict[str, Any]:
    """A unit's state with two parameters; a change to None takes a part's entry away."""
    shapes = {"block.weight": (2, 3), "head.bias": (4,)}
    model = {name: torch.zeros(shape) for name, shape in shapes.items()}
    moments = {name: {"step": torch.tensor(1.0), "exp_avg": torch.zeros(shape)} for name, shape in shapes.items()}
    average = {f"module.{name}": value for name, value in model.items()} | {"n_averaged": torch.tensor(3)}
    return {"model": model, "ema": average, "optim": {"state": moments, "param_groups": []}} | changes


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """The table of contents that a checkpoint of it has."""
    return {f"unit_state.{key}": shape for key, shape in needed_contents(state).items()}


def refusal(theirs: dict[str, Any], ours: dict[str, Any]) -> str:
    with pytest.raises(ValueError) as caught:
        check_contents(stored(theirs), needed_contents(ours), "runs/a/step_1")
    return str(caught.value)


def without(part: dict[str, Any], key: str) -> dict[str, Any]:
    return {name: value for name, value in part.items() if name != key}


def test_what_fits_passes_and_other_keys_do_not_matter() -> None:
    keys = stored(state()) | {"unit_state.janus.schedule": None, "config.job.seed": None}
    check_contents(keys, needed_contents(state()), "x")


def test_a_missing_parameter_is_named() -> None:
    text = refusal(state(model=without(state()["model"], "block.weight")), state())
    assert "runs/a/step_1 does not fit this job's model: it lacks block.weight." in text


def test_a_parameter_that_the_model_does_not_have_is_named() -> None:
    """DCP itself says nothing: a checkpoint of a deeper model would load."""
    text = refusal(state(model=state()["model"] | {"block.2.weight": torch.zeros(1)}), state())
    assert "that the model does not have, block.2.weight." in text


def test_another_shape_is_named_with_both() -> None:
    text = refusal(state(model=state()["model"] | {"head.bias": torch.zeros(5)}), state())
    assert "other shapes for head.bias (5,) instead of (4,)." in text


def test_missing_optimizer_state_is_named() -> None:
    moments = state()["optim"]["state"]
    text = refusal(state(optim={"state": without(moments, "head.bias"), "param_groups": []}), state())
    assert "lacks what the optimizer keeps" in text and "head.bias.exp_avg, head.bias.step" in text


def test_many_names_are_cut_short() -> None:
    names = {f"p{i}": torch.zeros(1) for i in range(9)}
    assert "p0, p1, p2, p3, p4 and 4 more" in refusal(state(), state(model=state()["model"] | names))


@pytest.mark.parametrize("here", [True, False])
def test_a_moving_average_on_one_side_only_is_told_with_the_fix(here: bool) -> None:
    bare = state(ema=None)
    text = refusal(bare, state()) if here else refusal(state(), bare)
    assert "runner.train_eval_unit.ema_decay to " + ("null" if here else "the decay") in text


def test_a_folder_without_metadata_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is no complete checkpoint \(it has no .metadata file\)"):
        read_contents(str(tmp_path))
