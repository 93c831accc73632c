"""Whether a checkpoint has what a job needs, found out from its table of contents before anything is read.

DCP's own loading stops at the first missing key, says nothing of what the model does not ask for, and on some ranks
only, while the others wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

METADATA = ".metadata"
"""The file that makes a folder a checkpoint: DCP writes it last, and fairchem looks for it."""

Shapes = dict[str, tuple[int, ...] | None]
"""Key -> shape of a tensor, None for anything else."""


def read_contents(location: str) -> Shapes:
    """What the checkpoint at `location` stores.

    Raises:
        ValueError: there is no complete checkpoint.
    """
    if not (Path(location) / METADATA).is_file():
        raise ValueError(
            f"job.runner_state_path: {location} is no complete checkpoint (it has no .metadata file). Give a folder "
            "such as RUN/checkpoints/step_100, or null for the latest one of the run"
        )
    stored = dcp.FileSystemReader(location).read_metadata().state_dict_metadata
    return {key: tuple(entry.size) if hasattr(entry, "size") else None for key, entry in stored.items()}


def needed_contents(state: Mapping[str, Any]) -> Shapes:
    """The keys of a unit's model, moving average and optimizer state."""
    needed: Shapes = {}
    for part in ("model", "ema"):
        for name, value in (state[part] or {}).items():
            needed[f"{part}.{name}"] = tuple(value.shape)
    for name, values in state["optim"]["state"].items():
        for key, value in values.items():
            needed[f"optim.state.{name}.{key}"] = tuple(value.shape) if isinstance(value, torch.Tensor) else None
    return needed


def check_contents(stored: Shapes, needed: Shapes, location: str) -> None:
    """Compare a checkpoint with what all stages of a job need together.

    Raises:
        ValueError: anything is missing, superfluous in the model, or of another shape; the text names parameters.
    """
    here = {key.removeprefix("unit_state."): shape for key, shape in stored.items() if key.startswith("unit_state.")}
    _check_average(here, needed, location)
    model = {key for key in needed if key.startswith("model.")}
    found = {key for key in here if key.startswith("model.")}
    odd = [key for key in needed if key in here and None not in (here[key], needed[key]) and here[key] != needed[key]]
    faults = [
        ("it lacks", sorted(model - found)),
        ("it has parameters or buffers that the model does not have,", sorted(found - model)),
        ("it has other shapes for", [f"{key} {here[key]} instead of {needed[key]}" for key in odd]),
    ]
    if not any(keys for _, keys in faults):
        others = sorted(key for key in needed if key not in here)
        faults = [
            ("it lacks the moving average of", [key.removeprefix("ema.") for key in others if key.startswith("ema.")]),
            (
                "it lacks what the optimizer keeps (another optimizer, or a parameter that was not trained then) of",
                [key.removeprefix("optim.state.") for key in others if key.startswith("optim.")],
            ),
        ]
    texts = [f"{what} {_some(keys)}" for what, keys in faults if keys]
    if texts:
        raise ValueError(
            f"the checkpoint {location} does not fit this job's model: {'; '.join(texts)}. A run is resumed with the "
            "model it was saved with; to start another model from its weights, fine-tune from its inference_ckpt.pt"
        )


def _check_average(here: Shapes, needed: Shapes, location: str) -> None:
    wanted = any(key.startswith("ema.") for key in needed)
    if wanted == any(key.startswith("ema.") for key in here):
        return
    has, fix = ("no", "null") if wanted else ("a", "the decay it was saved with")
    raise ValueError(
        f"the checkpoint {location} has {has} moving average of the weights, unlike this job: set "
        f"runner.train_eval_unit.ema_decay to {fix}"
    )


def _some(keys: list[str]) -> str:
    shown = ", ".join(key.removeprefix("model.") for key in keys[:5])
    return shown if len(keys) <= 5 else f"{shown} and {len(keys) - 5} more"
