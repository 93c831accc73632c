"""fairchem's `MLIPTrainEvalUnit` on the pipeline engine: one item of the loader is one optimizer step.

Arguments, progress counters, callbacks and checkpoints are fairchem's. What differs: the model is one pipeline stage,
an item of the loader is a list of micro-batches, gradients are exact sums over the whole global batch, and losses and
norms that are reported are those of the whole global batch on every rank.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from fairchem.core.common.distutils import get_device_for_local_rank, is_master
from fairchem.core.common.logger import WandBSingletonLogger
from fairchem.core.units.mlip_unit.mlip_unit import (
    MLIPTrainEvalUnit,
    Task,
    _get_optimizer_wd,
    filter_inference_only_tasks,
    set_sampler_state,
)
from fairchem.core.units.mlip_unit.utils import tf32_context_manager
from omegaconf import DictConfig
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torchtnt.framework import State, TrainUnit

from fairchem_janus import checkpoint
from fairchem_janus.checkpoint.progress import StepSize
from fairchem_janus.choice import ScheduleChoice
from fairchem_janus.config import JanusConfig
from fairchem_janus.engine.finite import BadSample, NonFiniteError, bad_labels
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.held import evaluation_stages, held_by, hold_stages
from fairchem_janus.engine.memory import tensor_bytes
from fairchem_janus.engine.profile import StepProfiler
from fairchem_janus.engine.runtime import Runtime, StepResult
from fairchem_janus.engine.step import StepReport, reduce_report
from fairchem_janus.engine.unfolded import UnfoldedRuntime
from fairchem_janus.evaluation import JanusEvalUnit
from fairchem_janus.model.build import build_stage, stage_parameters
from fairchem_janus.model.stage import Stage
from fairchem_janus.parallel.graph import GraphParallel
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.planning import starting_schedule
from fairchem_janus.prepare import BatchPreparation
from fairchem_janus.report import StepReporter, run_folder


class JanusTrainEvalUnit(MLIPTrainEvalUnit):
    """One pipeline rank's share of training and evaluation.

    Args:
        topology, janus, graph: given by `JanusRunner`; `graph` is None if G = 1.
        Others: as in `MLIPTrainEvalUnit`; the DDP options have no effect.
    """

    def __init__(
        self,
        job_config: DictConfig,
        model: torch.nn.Module,
        optimizer_fn: Callable[..., torch.optim.Optimizer],
        cosine_lr_scheduler_fn: Callable[..., Any],
        tasks: list[Task],
        bf16: bool = False,
        print_every: int = 10,
        clip_grad_norm: float | None = None,
        ema_decay: float | None = 0.999,
        train_strategy: str = "ddp",
        debug_checksums_save_path: str | None = None,
        profile_flops: bool = False,
        save_inference_ckpt: bool = True,
        tf32: bool = False,
        ddp_broadcast_buffers: bool = False,
        ddp_gradient_as_bucket_view: bool = True,
        *,
        topology: Topology,
        janus: JanusConfig,
        graph: GraphParallel | None = None,
    ) -> None:
        # not MLIPTrainEvalUnit.__init__, which wraps the model in DDP over the whole world
        TrainUnit.__init__(self)
        self.job_config = job_config
        self.topology = topology
        self.janus = janus
        device = torch.device(get_device_for_local_rank())
        self.tasks = with_global_losses(filter_inference_only_tasks(tasks))
        for task in self.tasks:
            if task.element_references is not None:
                task.element_references.to(device)
        self.bf16, self.tf32 = bf16, tf32
        self.print_every, self.clip_grad_norm = print_every, clip_grad_norm
        self.train_strategy = train_strategy
        self.save_inference_ckpt = save_inference_ckpt
        self.finetune_model_full_config = getattr(model, "finetune_model_full_config", None)
        self.debug_checksums_save_path = debug_checksums_save_path
        if debug_checksums_save_path:
            os.makedirs(debug_checksums_save_path, exist_ok=True)
        if profile_flops:
            logging.warning("profile_flops runs the whole model on one rank and is ignored by janus")

        self.stage_parameters = stage_parameters(model, topology.grid.P, janus.partition)
        self.num_params = sum(p.numel() for p in model.parameters())
        self.unsplit_parameters = [name for name, _ in model.named_parameters()]
        grid = topology.grid
        planned, partition = starting_schedule(janus), janus.partition
        if planned.is_folded:
            self.stage = build_stage(model, index=grid.p, num_stages=grid.P, partition=partition)
        else:
            held = hold_stages(model, planned, grid.p, partition=partition)
            self.stage = held[min(held)]
        self.optimizer = _get_optimizer_wd(optimizer_fn, model)
        self.model = model.to(device)
        self.ema_decay = ema_decay
        self.ema_model: AveragedModel | None = None
        if ema_decay is not None:
            self.ema_model = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(ema_decay))

        # callbacks written for fairchem look behind DDP; past torch's registration, which would see a cycle
        object.__setattr__(model, "module", model)

        autocast_dtype = torch.bfloat16 if bf16 else None
        skip = janus.on_nan == "skip"
        engine: dict[str, Any] = {"autocast_dtype": autocast_dtype, "skip_non_finite": skip}
        eval_model = model if self.ema_model is None else self.ema_model.module
        if planned.is_folded:
            self.gradients = GradientBuffer(self.stage, topology)
            self.runtime = Runtime(self.stage, topology, self.tasks, self.gradients, split=janus.split, **engine)
            eval_stage = Stage(eval_model, index=grid.p, num_stages=grid.P, blocks=self.stage.blocks)
            eval_runtime = Runtime(eval_stage, topology, self.tasks, None, skip_non_finite=skip)
        else:
            self.gradients = GradientBuffer(held_by(held, planned, topology), topology)
            self.runtime = UnfoldedRuntime(held, planned, topology, self.tasks, self.gradients, **engine)
            twins = evaluation_stages(held, model, eval_model)
            eval_runtime = UnfoldedRuntime(twins, planned, topology, self.tasks, None, skip_non_finite=skip)
        num_blocks = [len(stage.blocks) for stage in self.stage_parameters]
        profiler = StepProfiler(self.runtime, topology, num_blocks, self._state_bytes)
        self.choice = ScheduleChoice(janus, topology, profiler, Path(run_folder(job_config)))
        self.random_state = checkpoint.RandomState(topology.device)
        self.prepare = BatchPreparation(topology, seed=int(job_config.seed), check=janus.debug_checksums, graph=graph)
        # fairchem evaluates without autocast, whatever bf16 says
        self.eval_unit = JanusEvalUnit(
            job_config=job_config,
            runtime=eval_runtime,
            prepare=self.prepare,
            tf32=tf32,
        )

        self.logger = (
            WandBSingletonLogger.get_instance() if is_master() and not job_config.debug and job_config.logger else None
        )
        if self.logger:
            self.logger.log_summary({"num_params": self.num_params, "dp_world_size": grid.D})
        self.reporter = StepReporter(job_config, self.tasks, self.logger, print_every=print_every)
        self.dp_world_size = grid.D
        self.cosine_lr_scheduler_fn = cosine_lr_scheduler_fn
        self.scheduler: Any = None
        self.step_size: StepSize
        self.steps_per_epoch = 0
        self._steps_before_epoch = 0
        self.lazy_state_location: str | None = None
        self.last_report: StepReport | None = None
        self.last_loss: float | None = None  # as in fairchem, None before the first step
        self.last_grad_norm: float | None = None

    # ---------------------------------------------------------------- training
    def on_train_start(self, state: State) -> None:
        self.model.train()
        if self.scheduler is None:
            self.load_scheduler(len(state.train_state.dataloader))
        self.steps_per_epoch = len(state.train_state.dataloader)
        self.step_size = StepSize.of(state.train_state.dataloader.batch_sampler, self.topology.grid.D)
        if self.lazy_state_location is not None:
            self._execute_load_state(self.lazy_state_location)
        progress = self.train_progress
        epoch, start_step = progress.num_epochs_completed, progress.num_steps_completed_in_epoch
        set_sampler_state(state, epoch, start_step)
        self._steps_before_epoch = progress.num_steps_completed - start_step
        max_steps, max_epochs = state.train_state.max_steps, state.train_state.max_epochs
        limits = [] if max_steps is None else [max_steps]
        if max_epochs is not None:
            limits.append(self._steps_before_epoch + (max_epochs - epoch) * self.steps_per_epoch)
        self.reporter.start(steps_done=progress.num_steps_completed, total_steps=min(limits, default=None))

    def get_next_train_batch(self, state: State, data_iter: Iterator[object]) -> Any:
        """As in torchtnt; the random state is followed, or put back, around it."""
        self.random_state.before_batch()
        return super().get_next_train_batch(state, data_iter)

    def on_train_epoch_start(self, state: State) -> None:
        super().on_train_epoch_start(state)
        self._steps_before_epoch = self.train_progress.num_steps_completed

    def unfinished_epoch(self) -> int:
        """Steps of the last epoch if it was broken off (`max_steps`) and yet counts as completed, else 0."""
        progress = self.train_progress
        done = progress.num_steps_completed - self._steps_before_epoch
        return done if progress.num_steps_completed_in_epoch == 0 and 0 < done < self.steps_per_epoch else 0

    def train_step(self, state: State, data: list[Any]) -> None:
        self.random_state.batch_in_use()
        step = self.train_progress.num_steps_completed
        report = self.compute_gradients(data, step)
        self.last_report, self.last_loss, self.last_grad_norm = report, report.loss, report.grad_norm
        if not report.is_finite:
            self._leave_out(step, report, data)
            return
        if self.debug_checksums_save_path is not None:
            self._write_checksums(self.debug_checksums_save_path, step, report)
        if self.clip_grad_norm is not None:
            self.gradients.clip(report.grad_norm, self.clip_grad_norm)
        self.optimizer.step()
        if self.ema_model is not None:
            self.ema_model.update_parameters(self.model)
        self.gradients.zero()
        progress = self.train_progress
        epoch = progress.num_epochs_completed + progress.num_steps_completed_in_epoch / max(1, self.steps_per_epoch)
        self.reporter.step(step, report, lr=self.scheduler.get_last_lr()[0], epoch=epoch)
        self.scheduler.step()

    def compute_gradients(self, data: list[Any], step: int) -> StepReport:
        """Run one global batch through the pipeline; leaves the exact gradients, unclipped, in the parameters.

        Args:
            data: this replica's micro-batches.
            step: number of the optimizer step; keys the step's random draws.
        """
        started = time.perf_counter()
        batches = self.prepare(data, step=step)
        set_normalisers(self.tasks, batches, self.topology)
        with tf32_context_manager(self.tf32):
            result = self.runtime.run(self.choice.schedule(len(batches)), batches)
            self.gradients.reduce()
        if self.topology.is_first_stage:
            self._check_labels(batches, result)
        meter = None if self.prepare.graph is None else self.prepare.graph.meter
        report = reduce_report(result, self.gradients, batches, self.topology, self.runtime.timeline, started, meter)
        self.choice.after_step(report, batches)
        return report

    def _state_bytes(self) -> int:
        """Parameters, gradients, optimizer state and moving average on this rank."""
        models = [self.model] if self.ema_model is None else [self.model, self.ema_model]
        tensors = [tensor for model in models for tensor in (*model.parameters(), *model.buffers())]
        moments = [value for state in self.optimizer.state.values() for value in state.values()]
        return tensor_bytes([*tensors, *moments, *(p.grad for p in self.model.parameters())])

    def _check_labels(self, batches: list[Any], result: StepResult) -> None:
        own = [batch for batch in batches if batch is not None and self.topology.grid.speaks_for(batch)]
        found = [sample for batch in own for sample in bad_labels(self.tasks, batch)]
        if found and not self.runtime.skip_non_finite:
            raise NonFiniteError(found)
        result.bad += found

    def _leave_out(self, step: int, report: StepReport, data: list[Any]) -> None:
        """Take no step, on any rank: parameters, moving average, optimizer and schedule stay as they are.

        Raises:
            NonFiniteError: with `on_nan: error`, for gradients that are not finite (all else raised before).
        """
        bad = list(report.bad)
        if not report.num_bad:
            bad = [BadSample("gradients", name) for batch in filter(None, data) for name in batch["graph_ids"]]
            if not self.runtime.skip_non_finite:
                raise NonFiniteError(bad)
        self.gradients.zero()
        self.reporter.left_out(step, self.topology.gather_from_replicas(bad))

    def _write_checksums(self, folder: str, step: int, report: StepReport) -> None:
        """fairchem's debugging files, one a rank and step, for the parameters of this stage."""
        grid = self.topology.grid
        name = f"d{grid.d}.{grid.D}_p{grid.p}.{grid.P}_g{grid.g}.{grid.G}_step{step}.txt"
        with open(os.path.join(folder, name), "w") as file:
            file.write(f"Loss,{report.loss}\n")
            for parameter_name, parameter in self.model.named_parameters():
                if parameter.grad is not None:
                    file.write(f"Param,{step},{parameter_name},{parameter.abs().mean().item()}\n")
                    file.write(f"Grad,{step},{parameter_name},{parameter.grad.abs().mean().item()}\n")

    # ---------------------------------------------------------------- evaluation
    def on_eval_epoch_end(self, state: State) -> None:
        metrics = self.eval_unit.on_eval_epoch_end(state)
        step = self.train_progress.num_steps_completed
        self.reporter.evaluation(metrics, step=step)
        if self.runtime.skip_non_finite and (bad := self.topology.gather_from_replicas(self.eval_unit.bad)):
            samples = [BadSample(f"evaluation {sample.phase}", sample.graph) for sample in bad]
            self.reporter.left_out(step, samples, what=f"micro-batches of the evaluation after step {step}")

    # ---------------------------------------------------------------- checkpoints
    def state_dict(self) -> dict[str, Any]:
        return checkpoint.unit_state(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        checkpoint.load_unit_state(self, state_dict)

    def save_state(self, checkpoint_location: str) -> None:
        checkpoint.save_checkpoint(self, checkpoint_location)

    def _execute_load_state(self, checkpoint_location: str) -> None:
        checkpoint.load_checkpoint(self, checkpoint_location)
        logging.info(f"Done loading checkpoint from {checkpoint_location}")
