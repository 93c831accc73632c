"""A run in LOCAL mode that is told to end, and goes on later."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from tests.integration import resume
from tests.integration.test_command_line import fairchem, first_with
from tests.integration.train import metrics
from tests.integration.variants import adopt

NUM_STEPS = 8


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.long)])
def test_an_interrupted_run_ends_saved_and_resumes_to_the_bit(
    fake_job: list[str], tmp_path: Path, number: signal.Signals
) -> None:
    """The signal goes to the command line; torch's launcher hands it to the ranks, and kills them after 30 seconds."""
    job = [*fake_job, *adopt(P=2, N=3), "steps=1000", "checkpoint_every=1000", f"job.run_dir='{tmp_path}'"]
    told, lines = fairchem(
        *job, "+job.timestamp_id=told", "+job.deterministic=true", signal_at=("step 2/1000 | epoch", number)
    )
    assert told != 0
    received, _ = first_with(lines, f"Received {number.value} death signal")
    assert lines[-1][0] - received < 30
    _, text = first_with(lines, f"{number.name}: stopping before step ")
    stopped = int(text.split("before step ")[1].split(",")[0])
    assert 3 <= stopped < NUM_STEPS
    first_with(lines, "saved; go on with: fairchem -c ")
    ranks_say = "\n".join(
        line for _, line in lines if "forcefully" in line or "failed" in line or "ends because" in line
    )
    assert ranks_say == ""

    state = tmp_path / "told" / "checkpoints" / "preemption_state"
    status, lines = fairchem(f"runner.max_steps={NUM_STEPS}", job=state / "resume.yaml")
    assert status == 0, "\n".join(line for _, line in lines[-40:])
    first_with(lines, f"step {stopped}/{NUM_STEPS} | epoch")

    whole = resume.job("whole", job, f"runner.max_steps={NUM_STEPS}")
    resume.run_all({"whole": whole}, world_size=2)
    resumed = whole.copy()
    resumed.job.timestamp_id = "told"
    losses, uninterrupted = (
        [(r["step"], r["loss"], r["grad_norm"]) for r in metrics(config) if "loss" in r] for config in (resumed, whole)
    )
    assert losses == uninterrupted
