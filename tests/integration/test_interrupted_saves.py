"""Ranks that die, and disks that fill up, in the middle of a save."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch.distributed as dist
from fairchem.core.components.train.train_runner import get_most_recent_viable_checkpoint_path
from omegaconf import DictConfig
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemWriter

from fairchem_janus.checkpoint import folder
from fairchem_janus.parallel.launch import RankError, run_on_ranks
from tests.integration.resume import Resumed, checkpoint, job, run_all, run_job
from tests.integration.variants import adopt


def two_stages(name: str, data: list[str], folder: Path, *overrides: str, **options: Any) -> DictConfig:
    common = [f"job.run_dir='{folder}'", "steps=8", "checkpoint_every=2", "runner.callbacks.0.max_saved_checkpoints=2"]
    return job(name, data, *adopt(P=2, N=2), *common, *overrides, **options)


def names(config: DictConfig) -> set[str]:
    return {path.name for path in checkpoint(config, "").iterdir()}


def die_while_writing(config: DictConfig, rank: int, save: int) -> None:
    """Run a job in which a rank writes all its data of a save, and dies before the others know."""
    write, count = FileSystemWriter.write_data, iter(range(100))

    def write_data(self: Any, *args: Any) -> Any:
        result = write(self, *args)
        if next(count) == save and dist.get_rank() == rank:
            os._exit(1)
        return result

    with patch.object(FileSystemWriter, "write_data", write_data):
        run_job(config)


def die_while_exporting(config: DictConfig) -> None:
    """Rank 0 dies when the training checkpoint is complete, but the inference checkpoint is not."""
    with patch.object(folder, "write_inference_checkpoint", lambda *_: os._exit(1)):
        run_job(config)


def test_ranks_that_die_while_saving_leave_the_checkpoint_before_to_resume_from(
    fake_job: list[str], tmp_path: Path
) -> None:
    config = two_stages("killed", fake_job, tmp_path)
    with pytest.raises(RankError):
        run_on_ranks(die_while_writing, config, 1, 2, world_size=2, timeout_seconds=60)  # at step 4
    assert names(config) == {"step_0", "step_2", ".incomplete"}
    step_2 = checkpoint(config, "step_2")
    assert get_most_recent_viable_checkpoint_path(str(step_2.parent)) == str(step_2)

    with pytest.raises(RankError):  # resumes at step 2 and first saves step 2 again
        run_on_ranks(die_while_exporting, config, world_size=2, timeout_seconds=60)
    assert names(config) == {"step_0", "step_2", ".incomplete"}

    uninterrupted = two_stages("whole", fake_job, tmp_path)
    results = run_all({"resumed": config, "whole": uninterrupted}, world_size=2)
    resumed, whole = results["resumed"][0], results["whole"][0]
    assert resumed.resumed_from == str(step_2)
    assert resumed.losses == {step: whole.losses[step] for step in range(2, 8)}
    assert names(config) == names(uninterrupted) == {"step_4", "step_6", "final"}  # of which fairchem prunes


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """The kernel's ENOSPC for the tensors that a rank writes."""
    create = FileSystem.create_stream

    def create_stream(self: FileSystem, path: Any, mode: str) -> Any:
        hit = "w" in mode and str(path).endswith(".distcp") and dist.get_rank() == rank
        return create(self, Path("/dev/full") if hit else path, mode)

    with patch.object(FileSystem, "create_stream", create_stream):
        yield


def with_a_full_disk(config: DictConfig) -> Resumed:
    """The second save finds no room on rank 1, the third none on rank 0."""
    save, count = folder.save_checkpoint, iter(range(100))

    def save_checkpoint(unit: Any, location: str) -> bool:
        number = next(count)
        if number not in (1, 2):
            return save(unit, location)
        with full_disk(2 - number):
            return save(unit, location)

    with patch("fairchem_janus.checkpoint.save_checkpoint", save_checkpoint):
        return run_job(config)


def test_a_disk_that_is_full_for_a_while_costs_checkpoints_but_not_the_run(fake_job: list[str], tmp_path: Path) -> None:
    config = two_stages("full", fake_job, tmp_path, "runner.callbacks.0.max_saved_checkpoints=100")
    ranks = run_on_ranks(with_a_full_disk, config, world_size=2, timeout_seconds=120)
    assert all(list(rank.losses) == list(range(8)) for rank in ranks)
    assert names(config) == {"step_0", "step_6", "final"}


def test_random_draws_of_a_job_go_on_where_they_were(fake_job: list[str], tmp_path: Path) -> None:
    """The job's collater draws from all generators; the resumed run is the uninterrupted one to the bit, at P = 2."""
    noise = [
        "train_dataloader.collate_fn._target_=tests.integration.models.noisy_collater",
        "runner.callbacks.0.max_saved_checkpoints=100",
    ]
    whole = two_stages("noisy", fake_job, tmp_path, *noise)
    resumed = two_stages("noisy-resumed", fake_job, tmp_path, *noise, start=checkpoint(whole, "step_4"))
    results = run_all({"whole": whole, "resumed": resumed}, world_size=2)
    for first, second in zip(*results.values(), strict=True):
        assert second.losses == {step: first.losses[step] for step in range(4, 8)}
        assert all((first.parameters[name] == value).all() for name, value in second.parameters.items())
        assert all((first.ema[name] == value).all() for name, value in second.ema.items())
