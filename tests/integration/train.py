"""Runs a job on forked ranks the way fairchem's launcher does, in seconds instead of a launch through the CLI."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from fairchem.core.launchers.slurm_launch import _set_seeds
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.verify.trace import snapshot_parameters


def train(config: DictConfig, *, world_size: int, timeout_seconds: float = 120.0) -> list[dict[str, Any]]:
    """Run a job; returns for each rank its parameters after training."""
    os.makedirs(config.job.metadata.log_dir, exist_ok=True)
    OmegaConf.save(config, config.job.metadata.config_path)
    return run_on_ranks(_train_rank, config, world_size=world_size, timeout_seconds=timeout_seconds)


def _train_rank(config: DictConfig) -> dict[str, Any]:
    _set_seeds(config.job.seed)
    runner = instantiate(config.runner)
    runner.job_config = config.job
    runner.load_state(config.job.runner_state_path)
    runner.run()
    return snapshot_parameters(runner.train_eval_unit.model)


def start(config: DictConfig, *, seed: int) -> Any:
    """A job's runner on one rank, made as fairchem's launcher makes it."""
    os.makedirs(config.job.metadata.log_dir, exist_ok=True)
    OmegaConf.save(config, config.job.metadata.config_path)
    _set_seeds(seed)
    runner = instantiate(config.runner)
    runner.job_config = config.job
    return runner


def metrics(config: DictConfig) -> list[dict[str, Any]]:
    """What the run wrote to its `metrics.jsonl`."""
    path = Path(config.job.run_dir) / config.job.timestamp_id / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Fit:
    """What a job left on one rank.

    Attributes:
        parameters, ema: by name, after training; `ema` is empty for a job without one.
        metrics: one dictionary for every evaluation, times left out.
        error: why it ended early, None if it did not.
    """

    parameters: dict[str, Any] = field(default_factory=dict)
    ema: dict[str, Any] = field(default_factory=dict)
    metrics: list[dict[str, float]] = field(default_factory=list)
    error: str | None = None


def fit_all(jobs: Mapping[str, DictConfig], *, world_size: int, timeout_seconds: float = 300.0) -> dict[str, list[Fit]]:
    """Run jobs, plain fairchem's or ours, one after another on the same ranks; name -> what each rank got.

    A job that fails must be the last one, unless the world has one rank: other ranks may be left waiting.
    """
    work = list(jobs.values())
    ranks = run_on_ranks(_fit_all, work, world_size=world_size, timeout_seconds=timeout_seconds)
    return {name: [rank[index] for rank in ranks] for index, name in enumerate(jobs)}


def _fit_all(configs: list[DictConfig]) -> list[Fit]:
    return [_fit(config) for config in configs]


def _fit(config: DictConfig) -> Fit:
    result = Fit()
    _set_seeds(config.job.seed)
    try:
        runner = instantiate(config.runner)
        runner.job_config = config.job
        unit = runner.train_eval_unit
        _record_metrics(unit.eval_unit, result.metrics)
        runner.run()
    except Exception as error:
        if dist.get_world_size() > 1:
            raise
        result.error = f"{type(error).__name__}: {error}"
        return result
    result.parameters = snapshot_parameters(unit.model)
    if unit.ema_model is not None:
        result.ema = snapshot_parameters(unit.ema_model.module)
    return result


def _record_metrics(eval_unit: Any, into: list[dict[str, float]]) -> None:
    finish = eval_unit.on_eval_epoch_end

    def on_eval_epoch_end(state: Any) -> dict[str, float]:
        metrics = finish(state)
        into.append({name: float(value) for name, value in metrics.items() if not name.endswith("per_second")})
        return metrics

    eval_unit.on_eval_epoch_end = on_eval_epoch_end
