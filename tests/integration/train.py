"""Runs a job on forked ranks the way fairchem's launcher does, in seconds instead of a launch through the CLI."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

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


def metrics(config: DictConfig) -> list[dict[str, Any]]:
    """What the run wrote to its `metrics.jsonl`."""
    path = Path(config.job.run_dir) / config.job.timestamp_id / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()]
