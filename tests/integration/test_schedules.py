"""Schedules of a running job: profiled, chosen, kept over a resume, taken from a file; gradients stay fairchem's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from omegaconf import DictConfig

from fairchem_janus.checkpoint.state import OWN_KEY
from fairchem_janus.schedule import Schedule, make_schedule, validate
from fairchem_janus.verify.compare import compare
from fairchem_janus.verify.run import pipeline_trace, reference_trace
from tests.integration.train import metrics, train
from tests.integration.variants import adopt, make_variant


def run_folder(config: DictConfig) -> Path:
    return Path(config.job.run_dir) / config.job.timestamp_id


def job(data: list[str], *overrides: str, N: int = 3, variant: str = "mole-efs") -> DictConfig:
    return make_variant(variant, data, *adopt(P=2, N=N), *overrides)


def equal(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    return all(torch.equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x | y)


def chosen(config: DictConfig, name: str) -> Any:
    """What a checkpoint remembers of the choice."""
    state = {"unit_state": {OWN_KEY: {"schedule": ""}}}
    dcp.load(state, checkpoint_id=Path(config.job.metadata.checkpoint_dir) / name, no_dist=True)
    return json.loads(state["unit_state"][OWN_KEY]["schedule"])


def test_profiling_changes_no_parameter_by_a_bit(fake_job: list[str]) -> None:
    runs = []
    for steps in (0, 2):
        config = job(fake_job, "steps=4", f"+runner.janus.profile_steps={steps}", "+runner.janus.trace=true")
        runs.append(train(config, world_size=2))
        assert (run_folder(config) / "profile.json").exists() is (steps > 0)
    assert equal(*runs)

    profile = json.loads((run_folder(config) / "profile.json").read_text())
    assert [stage["num_blocks"] for stage in profile["stages"]] == [2, 2]
    for stage in profile["stages"]:
        assert all(0 < seconds < 10 for seconds in stage["phase_seconds"].values())
        assert stage["state_bytes"] > 100_000
    assert 0 < profile["link_latency"] < 1 and profile["link_bandwidth"] > 1e6

    bubbles = [record["bubble"] for record in metrics(config) if "loss" in record]
    assert len(bubbles) == 4 and all(0 < bubble < 1 for bubble in bubbles)
    picture = (run_folder(config) / "step.txt").read_text()
    assert picture.startswith("wavek, recorded: ") and "rank 1 |" in picture
    events = json.loads((run_folder(config) / "step.trace.json").read_text())["traceEvents"]
    blocks = [event for event in events if event["ph"] == "X"]
    assert len(blocks) == 2 * 4 * 3
    assert max(event["ts"] for event in blocks) < 60e6
    assert (run_folder(config) / "step.png").stat().st_size > 1000


def test_what_auto_chose_survives_a_resume_and_plain_fairchem_loads_the_checkpoint(fake_job: list[str]) -> None:
    options = ["+runner.janus.schedule=auto", "checkpoint_every=3", "steps=4"]
    config = job(fake_job, *options, "+runner.janus.profile_steps=1")
    train(config, world_size=2)
    stored = chosen(config, "step_3")
    schedule = Schedule.parse_csv(stored["csv"], name="auto", num_stages=2, num_micro_batches=3)
    validate(schedule, max_in_flight=4)
    assert (run_folder(config) / "schedule.csv").read_text() == stored["csv"]

    # the resumed run has one step, too few to choose anything itself
    saved = Path(config.job.metadata.checkpoint_dir) / "step_3"
    resumed = job(fake_job, *options, "+runner.janus.profile_steps=3", f"+job.runner_state_path='{saved}'")
    train(resumed, world_size=2)
    assert [record["step"] for record in metrics(resumed) if "loss" in record] == [3]
    assert chosen(resumed, "final") == stored

    plain = make_variant("mole-efs", fake_job, "steps=5", f"+job.runner_state_path='{saved}'")
    (parameters,) = train(plain, world_size=1)
    assert all(value.isfinite().all() for value in parameters.values())


def test_a_checkpoint_without_a_choice_is_resumed(fake_job: list[str]) -> None:
    """One of plain fairchem, say."""
    plain = make_variant("mole-efs", fake_job, "steps=1", "checkpoint_every=100")
    train(plain, world_size=1)
    saved = Path(plain.job.metadata.checkpoint_dir) / "final"
    config = job(fake_job, "steps=2", "+runner.janus.schedule=auto", f"+job.runner_state_path='{saved}'")
    train(config, world_size=2)
    assert [record["step"] for record in metrics(config) if "loss" in record] == [1]


def test_the_wave_size_that_ran_fastest_stays(fake_job: list[str]) -> None:
    config = job(
        fake_job,
        "steps=14",
        "checkpoint_every=100",
        "+runner.janus.wave_size=auto",
        "+runner.janus.profile_steps=1",
        N=2,
    )
    train(config, world_size=2)
    stored = chosen(config, "final")
    waves = [make_schedule("wavek", num_stages=2, num_micro_batches=2, wave_size=k) for k in (1, 2)]
    assert stored["csv"] == waves[stored["k"] - 1].to_csv()


@pytest.mark.parametrize("partition", ["[1,3]", "[3,1]"])
def test_auto_a_partition_and_a_file_give_fairchem_s_gradients(
    fake_job: list[str], partition: str, tmp_path: Path
) -> None:
    options = ["+runner.janus.schedule=auto", "+runner.janus.profile_steps=1"]
    if partition == "[3,1]":
        path = tmp_path / "mine.csv"
        # BE as late as it can be: no family writes that
        row = [f"{phase}{m}" for phases in (("FE", "FF"), ("BF",), ("BE",)) for m in (2, 0, 1) for phase in phases]
        path.write_text(",".join(row) + "\n" + ",".join(row) + "\n")
        options = [f"+runner.janus.schedule='{path}'"]
    config = job(fake_job, *options, f"+runner.janus.partition={partition}")
    ours = pipeline_trace(config, steps=3, dtype=torch.float64, world_size=2, timeout_seconds=120)
    result = compare(ours, reference_trace(config, ours, dtype=torch.float64, timeout_seconds=120))
    assert result.grad <= 1e-10, result.worst_tensor  # summation order alone leaves about 1e-14
    assert result.loss <= 1e-10 and result.grad_norm <= 1e-10
