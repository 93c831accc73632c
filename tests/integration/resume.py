"""Runs jobs that save and resume, ours and plain fairchem's, many in one group of ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from fairchem.core.components.train.train_runner import get_most_recent_viable_checkpoint_path
from fairchem.core.launchers.slurm_launch import _set_deterministic_mode
from omegaconf import DictConfig
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict
from torchtnt.framework.callback import Callback

from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.verify.trace import snapshot_parameters
from tests.integration.train import start
from tests.integration.variants import make_variant


@dataclass
class Resumed(Callback):
    """What a job did on one rank.

    Attributes:
        losses: by step. Plain fairchem's are this rank's alone.
        parameters, ema: by name, after the last step.
        resumed_from: the checkpoint that fairchem's runner picked.
    """

    losses: dict[int, float] = field(default_factory=dict)
    parameters: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, Any] = field(default_factory=dict)
    resumed_from: str | None = None

    def on_train_step_end(self, state: object, unit: Any) -> None:
        self.losses[unit.train_progress.num_steps_completed - 1] = float(unit.last_loss)


def job(name: str, data: Sequence[str], *overrides: str, start: Path | None = None) -> DictConfig:
    """The stock job with experts as a run of that name, resumed from a checkpoint's folder, in deterministic mode."""
    extra = [f"+job.timestamp_id={name}", "+job.deterministic=true", *overrides]
    if start is not None:
        extra.append(f"+job.runner_state_path='{start}'")
    return make_variant("mole-efs", data, *extra)


def checkpoint(config: DictConfig, name: str) -> Path:
    return Path(config.job.metadata.checkpoint_dir) / name


def run_all(
    configs: Mapping[str, DictConfig], *, world_size: int, timeout_seconds: float = 300.0
) -> dict[str, list[Resumed]]:
    """Run jobs one after another on the same ranks; name -> what each rank did."""
    work = list(configs.values())
    ranks = run_on_ranks(_run_all, work, world_size=world_size, timeout_seconds=timeout_seconds)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(configs)}


def _run_all(configs: list[DictConfig]) -> list[Resumed]:
    return [run_job(config) for config in configs]


def run_job(config: DictConfig) -> Resumed:
    """On one rank, as fairchem's launcher does it."""
    _set_deterministic_mode()
    result = Resumed()
    result.resumed_from = config.job.runner_state_path or get_most_recent_viable_checkpoint_path(
        config.job.metadata.checkpoint_dir
    )
    runner = start(config, seed=config.job.seed)
    runner.load_state(config.job.runner_state_path)
    runner.callbacks = [*runner.callbacks, result]  # appending to a ListConfig would copy it
    runner.run()
    unit = runner.train_eval_unit
    result.parameters = snapshot_parameters(unit.model)
    result.ema = snapshot_parameters(unit.ema_model.module)
    return result


def stored(location: Path) -> dict[str, Any]:
    """Everything that a training checkpoint holds of its unit, but for what is our own."""
    held: dict[str, Any] = {}
    planner = _EmptyStateDictLoadPlanner()
    _load_state_dict(held, storage_reader=FileSystemReader(location), planner=planner, no_dist=True)
    unit = held["unit_state"]
    unit.pop("janus", None)
    return unit


def differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Where two nested states differ, to the bit."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        odd = [f"{path}.{key}: in one only" for key in a.keys() ^ b.keys()]
        return odd + [line for key in a.keys() & b.keys() for line in differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [line for i, (x, y) in enumerate(zip(a, b, strict=True)) for line in differences(x, y, f"{path}[{i}]")]
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return [] if torch.equal(a, b) and a.dtype == b.dtype else [f"{path}: other values"]
    return [] if type(a) is type(b) and a == b else [f"{path}: {a!r} and {b!r}"]
