"""Both sides of a comparison, launched and compared."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from omegaconf import DictConfig, open_dict

from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.verify.compare import Comparison, compare
from fairchem_janus.verify.janus_side import merge_traces, run_janus
from fairchem_janus.verify.reference import run_reference
from fairchem_janus.verify.trace import Trace


def pipeline_trace(
    config: DictConfig,
    *,
    steps: int,
    dtype: torch.dtype,
    world_size: int,
    keep_gradients: bool = True,
    timeout_seconds: float = 3600.0,
) -> Trace:
    """Run a job's first steps on `world_size` local ranks."""
    with tempfile.TemporaryDirectory() as folder:
        run_on_ranks(
            _janus_rank,
            config,
            steps,
            dtype,
            folder,
            keep_gradients,
            world_size=world_size,
            device_type=str(config.job.device_type.value),
            timeout_seconds=timeout_seconds,
        )
        return merge_traces(Path(folder))


def reference_trace(
    config: DictConfig,
    ours: Trace,
    *,
    dtype: torch.dtype,
    keep_gradients: bool = True,
    timeout_seconds: float = 3600.0,
) -> Trace:
    """Run the same global batches through plain fairchem in one process."""
    (trace,) = run_on_ranks(
        _reference_rank,
        config,
        ours,
        dtype,
        keep_gradients,
        world_size=1,
        device_type=str(config.job.device_type.value),
        timeout_seconds=timeout_seconds,
    )
    return trace


def verify_job(
    config: DictConfig, *, steps: int, dtype: torch.dtype, world_size: int, accumulate_reference: bool = False
) -> Comparison:
    """Compare a job with plain fairchem.

    Args:
        accumulate_reference: compare with this package at P = D = 1 instead, one micro-batch after another, for jobs
            whose union of micro-batches does not fit in memory.
    """
    ours = pipeline_trace(config, steps=steps, dtype=dtype, world_size=world_size)
    if accumulate_reference:
        return compare(ours, pipeline_trace(_accumulating(config, ours), steps=steps, dtype=dtype, world_size=1))
    return compare(ours, reference_trace(config, ours, dtype=dtype))


def _accumulating(config: DictConfig, ours: Trace) -> DictConfig:
    """The job on one rank, with as many micro-batches a step as all replicas had together."""
    single = config.copy()
    with open_dict(single):
        janus = single.runner.get("janus", {})
        janus.pipeline_size = 1
        janus.num_micro_batches = sum(len(replica) for replica in ours.batches[0])
        single.runner.janus = janus
    return single


def _janus_rank(config: DictConfig, steps: int, dtype: torch.dtype, folder: str, keep_gradients: bool) -> None:
    run_janus(config, steps=steps, dtype=dtype, folder=Path(folder), keep_gradients=keep_gradients)


def _reference_rank(config: DictConfig, ours: Trace, dtype: torch.dtype, keep_gradients: bool) -> Trace:
    return run_reference(config, ours, dtype=dtype, keep_gradients=keep_gradients)
