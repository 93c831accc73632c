"""One global batch through the engine in many packings, in one process."""

from __future__ import annotations

import torch
from fairchem.core.launchers.slurm_launch import _set_seeds
from omegaconf import DictConfig

from fairchem_janus.data.sampler import MicroBatchPlan
from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.runner import JanusRunner
from fairchem_janus.verify.trace import Named, cast_batch

Packing = list[list[int]]
"""Micro-batches of graphs, as indices into the job's training data set."""


def gradients_of(config: DictConfig, packings: list[Packing], *, timeout_seconds: float = 300.0) -> list[Named]:
    """Unclipped float64 gradients of step 0 for each packing, all from the job's initial weights."""
    (gradients,) = run_on_ranks(_gradients, config, packings, world_size=1, timeout_seconds=timeout_seconds)
    return gradients


def _gradients(config: DictConfig, packings: list[Packing]) -> list[Named]:
    class CastingRunner(JanusRunner):
        def prepare_model(self, model: torch.nn.Module) -> None:
            model.to(torch.float64)

    _set_seeds(config.job.seed)
    runner = CastingRunner(
        **{key: config.runner[key] for key in config.runner if key not in ("_target_", "_recursive_")}
    )
    unit, loader = runner.train_eval_unit, runner.train_dataloader
    unit.model.train()
    torch.set_default_dtype(torch.float64)
    result = []
    try:
        for packing in packings:
            loaded = [loader.dataset[MicroBatchPlan(tuple(graphs))] for graphs in packing]
            unit.compute_gradients([cast_batch(batch, torch.float64) for batch in loader.collate_fn(loaded)], 0)
            named = unit.model.named_parameters()
            result.append({name: p.grad.detach().clone() for name, p in named if p.grad is not None})
            unit.gradients.zero()
    finally:
        runner.close()
    return result
