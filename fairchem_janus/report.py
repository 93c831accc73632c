"""What a run tells: one console line a step, W&B metrics under fairchem's names, and `metrics.jsonl`."""

from __future__ import annotations

import csv
import json
import logging
import os
import resource
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.common.distutils import is_master
from fairchem.core.units.mlip_unit.mlip_unit import Task
from omegaconf import DictConfig

from fairchem_janus.engine.finite import BadSample
from fairchem_janus.engine.step import StepReport


def run_folder(job_config: DictConfig) -> str:
    """The folder of one run, `job.run_dir/job.timestamp_id`, beside fairchem's logs and checkpoints."""
    return os.path.join(job_config.run_dir, job_config.timestamp_id)


def worst_peak_gib(device: torch.device) -> float:
    """Peak memory so far of the rank that needed most, in GiB; every rank of the world must call this.

    On CUDA what torch's allocator gave out; on the CPU the resident set, which has the libraries in it too.
    """
    if device.type == "cuda":
        peak = float(torch.cuda.max_memory_allocated(device))
    else:
        peak = 1024.0 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if dist.is_initialized() and dist.get_world_size() > 1:
        worst = torch.tensor(peak, dtype=torch.float64, device=device)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        peak = worst.item()
    return peak / 2**30


class StepReporter:
    """Reports steps and evaluations from rank 0; silent elsewhere.

    `metrics.jsonl` in the run folder gets one object for every reported step and evaluation, and one when training
    ends without an error.
    """

    def __init__(self, job_config: DictConfig, tasks: Sequence[Task], logger: Any, *, print_every: int) -> None:
        self.active = is_master()
        self.logger = logger
        self.print_every = print_every
        self.task_names = [task.name for task in tasks]
        self.path = os.path.join(run_folder(job_config), "metrics.jsonl")
        self.total_steps: int | None = None
        self._last_time = self._started = time.perf_counter()
        self._atoms = self._graphs = self._steps = 0
        self._first_step = 0
        self.take_data_wait: Callable[[], float] = float
        """Gives the seconds that steps waited for data since it was last called; the training loader's, set by the
        runner."""

    def start(self, *, steps_done: int, total_steps: int | None) -> None:
        """Call when training (re)starts."""
        self.total_steps = total_steps
        self._last_time = self._started = time.perf_counter()
        self._first_step = steps_done

    def step(self, step: int, report: StepReport, *, lr: float, epoch: float) -> None:
        """Report optimizer step number `step` (counted from 0), after `epoch` epochs."""
        if not self.active:
            return
        self._atoms += report.num_atoms
        self._graphs += report.num_graphs
        self._steps += 1
        printing = step % self.print_every == 0
        if not (printing or self.logger):
            return
        now = time.perf_counter()
        elapsed = max(now - self._last_time, 1e-9)
        values = {
            "train/loss": report.loss,
            "train/lr": lr,
            "train/step": step,
            "train/epoch": epoch,
            "train/grad_norm": report.grad_norm,
            "train/samples_per_second(approx)": self._graphs / elapsed,
            "train/atoms_per_second(approx)": self._atoms / elapsed,
            "train/num_atoms": report.num_atoms,
            "train/num_samples": report.num_graphs,
            "train/bubble": report.bubble,
            "train/seconds_per_step": elapsed / self._steps,
            "train/data_wait": self.take_data_wait() / self._steps,
        } | {f"train/loss/{name}": loss for name, loss in zip(self.task_names, report.losses, strict=True)}
        if (halo := report.halo) is not None:
            values["train/halo_bytes"] = halo.num_bytes
            values["train/halo_seconds"] = halo.seconds
            values["train/comm_free_share"] = halo.comm_free_share
        self._last_time, self._atoms, self._graphs, self._steps = now, 0, 0, 0
        if self.logger:
            self.logger.log(values, step=step, commit=True)
        if printing:
            logging.info(self._line(step, values, report))
            record: dict[str, Any] = {key.removeprefix("train/"): value for key, value in values.items()}
            if halo is not None:
                record["halo_micro_batches"] = [{"bytes": b, "seconds": s} for b, s in halo.by_micro_batch]
            self._append(record)

    def _line(self, step: int, values: dict[str, Any], report: StepReport) -> str:
        parts = ", ".join(f"{n} {x:.4g}" for n, x in zip(self.task_names, report.losses, strict=True))
        total = f"/{self.total_steps}" if self.total_steps else ""
        line = (
            f"step {step}{total} | epoch {values['train/epoch']:.2f} | loss {report.loss:.5g} ({parts}) | "
            f"grad norm {report.grad_norm:.4g} | lr {values['train/lr']:.3g} | bubble {report.bubble:.1%} | "
            f"{values['train/atoms_per_second(approx)']:,.0f} atoms/s | data wait {values['train/data_wait']:.3f} s"
        )
        if (halo := report.halo) is not None:
            share = halo.seconds / report.seconds if report.seconds else 0.0
            line += (
                f" | halo {halo.num_bytes / 1e6:,.1f} MB, {share:.0%} of the time, comm-free {halo.comm_free_share:.0%}"
            )
        done = step + 1 - self._first_step
        if self.total_steps and done > 0:
            per_step = (time.perf_counter() - self._started) / done
            line += f" | ETA {timedelta(seconds=round(per_step * max(0, self.total_steps - step - 1)))}"
        return line

    def left_out(self, step: int, bad: Sequence[BadSample], *, what: str = "") -> None:
        """Report a step that was not taken, or `what`; a line for every bad graph goes to `bad_samples.csv`."""
        if not self.active:
            return
        path = os.path.join(os.path.dirname(self.path), "bad_samples.csv")
        os.makedirs(os.path.dirname(path), exist_ok=True)
        new = not os.path.exists(path)
        with open(path, "a", newline="") as file:
            writer = csv.writer(file)
            if new:
                writer.writerow(["step", "phase", "graph"])
            writer.writerows((step, sample.phase, sample.graph) for sample in bad)
        phases = ", ".join(dict.fromkeys(sample.phase for sample in bad))
        logging.warning(f"{what or f'step {step}'} left out: NaN or Inf in {phases}; the graphs are in {path}")
        self._append({"step": step, "left_out": [[sample.phase, sample.graph] for sample in bad]})

    def evaluation(self, metrics: dict[str, Any], *, step: int) -> None:
        """Report one evaluation; `metrics` has fairchem's names (`val/...`)."""
        if not self.active:
            return
        if self.logger:
            self.logger.log(metrics, commit=False)
        self._append({"step": step, "eval": {key: float(value) for key, value in metrics.items()}})

    def end(self, *, step: int, completed: bool, peak_memory_gib: float) -> None:
        """Report that training ended: after `max_steps` or `max_epochs` (`completed`), or earlier, asked to stop."""
        if self.active:
            self._append({"step": step, "end": {"completed": completed, "peak_memory_gib": peak_memory_gib}})

    def _append(self, record: dict[str, Any]) -> None:
        os.makedirs(os.path.dirname(self.path), exist_ok=True)
        with open(self.path, "a") as file:
            file.write(json.dumps(record) + "\n")
