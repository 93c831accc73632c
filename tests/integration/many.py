"""Compares many jobs with plain fairchem in few launches: starting a rank costs more than a step of a tiny model."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from omegaconf import DictConfig

from fairchem_janus.parallel.launch import RankError, run_on_ranks
from fairchem_janus.verify.compare import Comparison, compare
from fairchem_janus.verify.janus_side import merge_traces, run_janus
from fairchem_janus.verify.reference import run_reference
from fairchem_janus.verify.trace import Trace

SECONDS_A_JOB = 60.0


@dataclass(frozen=True)
class Job:
    """A job's canonical configuration and how many of its steps to compare."""

    config: DictConfig
    steps: int = 1


def traces_of(
    jobs: Mapping[str, Job], *, world_size: int, dtype: torch.dtype = torch.float64
) -> dict[str, tuple[Trace, Trace]]:
    """The pipeline's and the reference's trace of every job, by name.

    Raises:
        RankError: a job failed.
    """
    ours = pipeline_traces(jobs, world_size=world_size, dtype=dtype)
    work = [(job.config, ours[name]) for name, job in jobs.items()]
    (references,) = run_on_ranks(_run_references, work, dtype, world_size=1, timeout_seconds=SECONDS_A_JOB * len(jobs))
    return {name: (ours[name], reference) for name, reference in zip(jobs, references, strict=True)}


def pipeline_traces(
    jobs: Mapping[str, Job], *, world_size: int, dtype: torch.dtype = torch.float64
) -> dict[str, Trace]:
    """The pipeline's traces alone."""
    with tempfile.TemporaryDirectory() as folder:
        folders = {name: Path(folder) / str(index) for index, name in enumerate(jobs)}
        for path in folders.values():
            path.mkdir()
        work = [(job.config, job.steps, folders[name]) for name, job in jobs.items()]
        run_on_ranks(_run_jobs, work, dtype, world_size=world_size, timeout_seconds=SECONDS_A_JOB * len(jobs))
        return {name: merge_traces(path) for name, path in folders.items()}


def compare_all(
    jobs: Mapping[str, Job], *, world_size: int, dtype: torch.dtype = torch.float64
) -> dict[str, Comparison | RankError]:
    """Compare every job with plain fairchem; if one fails, all are run again one by one to see which."""
    try:
        traces = traces_of(jobs, world_size=world_size, dtype=dtype)
    except RankError as error:
        if len(jobs) == 1:
            return dict.fromkeys(jobs, error)
        results: dict[str, Comparison | RankError] = {}
        for name in jobs:
            results |= compare_all({name: jobs[name]}, world_size=world_size, dtype=dtype)
        return results
    return {name: compare(ours, reference) for name, (ours, reference) in traces.items()}


def _run_jobs(jobs: list[tuple[DictConfig, int, Path]], dtype: torch.dtype) -> None:
    for config, steps, folder in jobs:
        run_janus(config, steps=steps, dtype=dtype, folder=folder)


def _run_references(jobs: list[tuple[DictConfig, Trace]], dtype: torch.dtype) -> list[Trace]:
    return [run_reference(config, ours, dtype=dtype) for config, ours in jobs]
