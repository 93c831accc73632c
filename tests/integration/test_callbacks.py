"""fairchem's callbacks, logger and debugging options on two stages: each does what it does in fairchem."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest

from tests.integration.test_command_line import fairchem, first_with
from tests.integration.train import metrics, train
from tests.integration.variants import adopt, make_variant

_FAIRCHEM = "fairchem.core"
CALLBACKS = [
    "{_target_: torchtnt.framework.callbacks.TQDMProgressBar}",
    f"{{_target_: {_FAIRCHEM}.components.train.train_runner.TrainCheckpointCallback, "
    "checkpoint_every_n_steps: ${checkpoint_every}, max_saved_checkpoints: 2}",
    f"{{_target_: {_FAIRCHEM}.common.profiler_utils.ProfilerCallback, "
    "job_config: ${job}, wait_steps: 1, warmup_steps: 1, active_steps: 1}",
]
LOGGER = (
    f"{{_target_: {_FAIRCHEM}.common.logger.WandBSingletonLogger.init_wandb, _partial_: true, entity: me, project: p}}"
)


def test_callbacks_logger_and_options_in_one_job(
    fake_job: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    checksums = tmp_path / "checksums"
    status, lines = fairchem(
        *fake_job,
        *adopt(P=2, N=2),
        "steps=7",
        "checkpoint_every=2",
        f"job.run_dir='{tmp_path}'",
        "+job.timestamp_id=run",
        "+job.deterministic=true",
        "job.debug=false",
        f"+job.logger={LOGGER}",
        f"runner.callbacks=[{', '.join(CALLBACKS)}]",
        "+runner.train_eval_unit.profile_flops=true",
        "+runner.train_eval_unit.save_inference_ckpt=false",
        f"+runner.train_eval_unit.debug_checksums_save_path='{checksums}'",
        "runner.evaluate_every_n_steps=4",
    )
    text = "\n".join(line for _, line in lines)
    assert status == 0, text[-4000:]
    run = tmp_path / "run"

    assert len(re.findall(r"Train Epoch 0: +0%\| +\| 0/7 \[00:00<\?", text)) == 1  # one bar, from one rank
    assert re.search(r"Train Epoch 0: 100%\|\S+\| 7/7", text)
    assert "Eval Epoch" in text

    assert {path.name for path in (run / "checkpoints").iterdir()} == {"step_4", "step_6", "final"}
    assert not list(run.rglob("inference_ckpt.pt"))

    (trace,) = (run / "logs" / "profiles").iterdir()
    assert trace.name.endswith("_rank_0.pt.trace.json")
    events = json.loads(trace.read_text())["traceEvents"]
    assert any("isend" in event.get("name", "") or "send" in event.get("name", "") for event in events)

    first_with(lines, "profile_flops runs the whole model on one rank and is ignored by janus")
    first_with(lines, "Setting deterministic mode!")

    files = {path.name for path in checksums.iterdir()}
    assert files == {f"d0.1_p{p}.2_g0.1_step{step}.txt" for p in range(2) for step in range(7)}
    written = (checksums / "d0.1_p1.2_g0.1_step3.txt").read_text().splitlines()
    losses = {r["step"]: r["loss"] for r in metrics_of(run) if "loss" in r}
    assert written[0] == f"Loss,{losses[3]}"
    assert all(
        line.startswith(("Param,3,backbone.", "Grad,3,backbone.", "Param,3,output", "Grad,3,output"))
        for line in written[1:]
    )

    (offline,) = (run / "logs" / "wandb").glob("offline-run-*")
    logged = (offline / "run-run.wandb").read_bytes()
    for key in (b"train/loss", b"train/grad_norm", b"val/omat.val,omat_energy,mae", b"num_params", b"dp_world_size"):
        assert key in logged


def metrics_of(run: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_ranks_whose_clocks_differ_stop_after_the_same_step(fake_job: list[str]) -> None:
    """By its own clock the second rank would stop at the end of step 1, and wait in a save for the first, which would
    see its deadline at the start of step 2 and wait in that step for the second."""
    skewed = "{_target_: tests.jobs.callbacks.StopWithSkewedClocks, looks: 5}"
    kept = f"{{_target_: {_FAIRCHEM}.components.callbacks.TrainCheckpointCallback, "
    kept += "checkpoint_every_n_steps: ${checkpoint_every}}"
    callbacks = [f"runner.callbacks=[{skewed}, {kept}]", "checkpoint_every=100"]
    job = [*fake_job, *adopt(P=2, N=2), "steps=50", *callbacks, "+job.timestamp_id=skewed"]
    config = make_variant("dense-ef", job)
    train(config, world_size=2)
    taken = [record["step"] for record in metrics(config) if "loss" in record]
    assert taken == [0, 1, 2]
    assert os.path.isfile(os.path.join(config.job.metadata.checkpoint_dir, "final", ".metadata"))


def test_the_time_limit_of_a_job_stops_it(fake_job: list[str]) -> None:
    """`stop_before_timeout_min` counts from the time that SLURM was asked for, in LOCAL mode too."""
    limit = ["+runner.stop_before_timeout_min=59.999", "++job.scheduler.slurm.timeout_hr=1", "+job.timestamp_id=limit"]
    config = make_variant("dense-ef", [*fake_job, *adopt(P=1, N=2), "steps=50", *limit])
    train(config, world_size=1)
    taken = [record["step"] for record in metrics(config) if "loss" in record]
    assert len(taken) == 1  # the deadline, 60 ms after the start, passes during the first step
