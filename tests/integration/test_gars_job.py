"""A job with a `janus.gars` block: trained, reported, and resumed with another number of replicas."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from omegaconf import DictConfig

from tests.integration.train import metrics, train
from tests.integration.variants import adopt, make_variant

STEPS, SAVED_AT = 5, 3

GARS = [
    "+runner.janus.gars.graphs_per_step=5",
    "+runner.janus.gars.max_atoms=30",
    "+runner.janus.prefetch_steps=1",
    "dataloader_workers=1",
    "train_dataset.combined_dataset_config.sampling.ratios={omat.train: 0.1, omol.train: 0.1}",
    f"steps={STEPS}",
    f"checkpoint_every={SAVED_AT}",
]
"""Eight graphs, so two steps an epoch, the second with three graphs; saved in the middle of the second epoch."""


@pytest.fixture(scope="module")
def run(fake_job: list[str]) -> DictConfig:
    config = make_variant("mole-dropout-efs", fake_job, *adopt(P=1, N=2), *GARS)
    train(config, world_size=1)
    return config


def test_waiting_for_data_is_reported(run: DictConfig) -> None:
    records = [record for record in metrics(run) if "loss" in record]
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["num_samples"] for record in records] == [5, 3, 5, 3, 5]
    assert all(0 <= record["data_wait"] <= record["seconds_per_step"] for record in records)


def test_the_run_folder_has_the_data_report(run: DictConfig) -> None:
    path = Path(run.job.run_dir) / run.job.timestamp_id / "data_report.json"
    report = json.loads(path.read_text())["train"]
    assert (report["graphs"], report["used_per_epoch"], report["steps_per_epoch"]) == (8, 8, 2)
    assert report["budget_of_a_micro_batch"] == "30 atoms"


def test_a_run_resumed_with_another_number_of_replicas_goes_on_with_the_same_global_batches(
    run: DictConfig, fake_job: list[str]
) -> None:
    config = make_variant("mole-dropout-efs", fake_job, *adopt(P=1, D=2, N=1), *GARS)
    config.job.timestamp_id = run.job.timestamp_id + "-resumed"
    config.runner.train_eval_unit.job_config.timestamp_id = config.job.timestamp_id
    saved = Path(run.job.metadata.checkpoint_dir) / f"step_{SAVED_AT}"
    config.job.metadata.checkpoint_dir = str(saved.parent / "of-resumed-run")
    config.job.runner_state_path = str(saved)
    train(config, world_size=2)
    before = {record["step"]: record for record in metrics(run) if "loss" in record}
    after = {record["step"]: record for record in metrics(config) if "loss" in record}
    assert list(after) == list(range(SAVED_AT, STEPS))
    for step, record in after.items():
        for same in ("num_samples", "num_atoms", "epoch"):
            assert record[same] == before[step][same]
        # float32, and the graphs are summed in another order
        assert record["loss"] == pytest.approx(before[step]["loss"], rel=1e-4)
        assert record["grad_norm"] == pytest.approx(before[step]["grad_norm"], rel=1e-3)


def test_evaluation_can_be_packed_too_and_uses_every_graph_once(fake_job: list[str]) -> None:
    """The stock sampler repeats graphs to fill the last batches of all replicas; here the metrics count each once."""
    sampler = {
        "_target_": "fairchem_janus.data.gars_sampler.GARSBatchSampler",
        "_partial_": True,
        "graphs_per_step": 7,
        "shuffle": False,
    }
    maes = []
    for D in (1, 2):
        config = make_variant("mole-efs", fake_job, *adopt(P=1, D=D, N=2), *GARS, "max_atoms=20")
        config.runner.eval_dataloader.batch_sampler_fn = sampler
        config.job.timestamp_id = config.runner.train_eval_unit.job_config.timestamp_id = f"eval-{D}"
        config.job.metadata.checkpoint_dir = str(Path(config.job.run_dir) / f"eval-{D}" / "checkpoints")
        config.runner.max_steps = 1
        train(config, world_size=D)
        evaluations = [record["eval"] for record in metrics(config) if "eval" in record]
        maes.append(torch.tensor([value for key, value in sorted(evaluations[-1].items()) if key.endswith("mae")]))
    torch.testing.assert_close(maes[0], maes[1], rtol=1e-3, atol=1e-5)
