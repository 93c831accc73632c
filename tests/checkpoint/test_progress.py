"""A run whose steps are of another size goes on where the earlier one was in its epoch."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from fairchem_janus.checkpoint.progress import StepSize, converted_steps, warn_of_other_epochs
from fairchem_janus.data.sampler import MicroBatchSampler


def batches(amount: int) -> StepSize:
    return StepSize("batches", amount)


@pytest.mark.parametrize(
    ("steps", "before", "now", "expected"),
    [(3, 4, 4, 3), (3, 4, 2, 6), (6, 2, 4, 3), (3, 1, 3, 1), (0, 4, 2, 0)],
)
def test_steps_of_another_size_are_counted_by_what_they_used(
    steps: int, before: int, now: int, expected: int, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert converted_steps(steps, batches(before), batches(now), 100) == expected
    assert not caplog.records


def test_what_does_not_divide_is_rounded_down_and_told(caplog: pytest.LogCaptureFixture) -> None:
    assert converted_steps(5, batches(1), batches(3), 100) == 1
    assert "5 batches into an epoch, which is step 1 of 3 here: the last 2 batches are used again" in caplog.text


def test_the_step_exists_in_this_runs_epoch() -> None:
    """The stock sampler refuses to start behind its last batch."""
    assert converted_steps(9, batches(2), batches(1), 17) == 16


def test_another_kind_of_sampler_is_told(caplog: pytest.LogCaptureFixture) -> None:
    assert converted_steps(5, batches(1), StepSize("graphs", 8), 4) == 3
    assert "this run counts graphs and goes on at its own step 3" in caplog.text


def test_a_checkpoint_that_does_not_tell_is_taken_at_its_word() -> None:
    assert converted_steps(5, None, batches(3), 100) == 5


def test_a_step_of_a_stock_sampler_is_n_batches_on_each_replica() -> None:
    assert StepSize.of(MicroBatchSampler([], 3), 2) == batches(6)
    assert StepSize.from_json(batches(6).to_json()) == batches(6)


def test_plain_fairchem_s_step_is_one_batch_a_data_parallel_rank(tmp_path: Path) -> None:
    assert StepSize.of_plain_fairchem(str(tmp_path)) is None
    job = {"scheduler": {"num_nodes": 2, "ranks_per_node": 8}, "graph_parallel": {"group_size": 4}}
    OmegaConf.save(OmegaConf.create({"job": job}), tmp_path / "resume.yaml")
    assert StepSize.of_plain_fairchem(str(tmp_path)) == batches(4)


def test_an_epoch_of_another_length_is_told(caplog: pytest.LogCaptureFixture) -> None:
    warn_of_other_epochs(7, 7)
    assert not caplog.records
    warn_of_other_epochs(7, 6)
    assert "a run with 7 steps an epoch, this one has 6" in caplog.text
