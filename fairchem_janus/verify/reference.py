"""The reference: fairchem's own `MLIPTrainEvalUnit` in one process, on the union of the micro-batches."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import torch
from fairchem.core.launchers.slurm_launch import _set_seeds
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from fairchem_janus.data.loader import MicroBatchCollater, MicroBatchDataset
from fairchem_janus.model.randomness import install_keyed_draws
from fairchem_janus.prepare import key_batches
from fairchem_janus.verify.maes import absolute_errors
from fairchem_janus.verify.trace import Trace, cast_batch, record_gradients, snapshot_parameters


def run_reference(config: DictConfig, ours: Trace, *, dtype: torch.dtype, keep_gradients: bool = True) -> Trace:
    """Train on the given graphs, all of a step's in one batch, with fairchem's code throughout.

    The one thing replaced is where random numbers come from: a graph draws the same dropout masks and edge rolls as
    on the pipeline's side (`model/randomness.py`). Call in a world of one rank.

    Args:
        config: the canonical job configuration; its runner's target and `janus` block are not used.
        ours: the pipeline's trace, for the graphs of each step and the number of steps in an epoch.
    """
    _set_seeds(config.job.seed)
    loader = config.runner.train_dataloader
    dataset = MicroBatchDataset(instantiate(loader.dataset))
    collate = MicroBatchCollater(instantiate(loader.collate_fn))
    make_unit = instantiate(OmegaConf.merge(config.runner.train_eval_unit, {"_partial_": True}))
    model = make_unit.keywords["model"].to(dtype)
    install_keyed_draws(model.backbone)
    unit = make_unit()
    unit.load_scheduler(ours.steps_per_epoch)
    unit.model.train()
    unit.previous_wall_time = 0.0
    state: Any = SimpleNamespace(train_state=SimpleNamespace(dataloader=range(ours.steps_per_epoch)))
    trace = Trace(batches=ours.batches, steps_per_epoch=ours.steps_per_epoch)
    if keep_gradients:
        record_gradients(unit.optimizer, unit.model, trace.gradients)
    predicted: list[dict[str, Any]] = []
    model.register_forward_hook(lambda _module, _args, output: predicted.append(output))
    torch.set_default_dtype(dtype)
    try:
        for step, replicas in enumerate(ours.batches):
            indices = [index for replica in replicas for micro_batch in replica for index in micro_batch]
            (union,) = collate([dataset[indices]])
            key_batches([union], seed=int(config.job.seed), step=step)
            unit.train_progress._num_steps_completed = step
            predicted.clear()
            unit.train_step(state, cast_batch(union, dtype))
            trace.maes.append(absolute_errors(unit.tasks, [(predicted[0], union)]))
            trace.losses.append(float(unit.last_loss))
            trace.grad_norms.append(_norm_before_clipping(unit, trace))
    finally:
        torch.set_default_dtype(torch.float32)
    trace.parameters = snapshot_parameters(unit.model)
    if unit.ema_model is not None:
        trace.ema = snapshot_parameters(unit.ema_model.module)
    return trace


def _norm_before_clipping(unit: Any, trace: Trace) -> float:
    if unit.last_grad_norm is not None:
        return float(unit.last_grad_norm)
    if not trace.gradients:
        return math.nan
    norms = torch.stack([g.double().norm() for g in trace.gradients[-1].values()])
    return float(norms.norm())
