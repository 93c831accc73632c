"""Jobs on a real SLURM: scripts/slurm_check.sh starts one on this machine and runs these tests."""

from __future__ import annotations

import os
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from omegaconf import DictConfig

from tests.integration import resume
from tests.integration.test_command_line import fairchem
from tests.integration.train import metrics
from tests.integration.variants import adopt

NUM_STEPS, SAVED_EVERY, INTERRUPTED_AT = 18, 3, 4
_SMALL = [f"++job.scheduler.slurm.{key}=1" for key in ("mem_gb", "cpus_per_task", "timeout_hr")]


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, timeout=30, check=True).stdout


def why_not() -> str:
    try:
        return "" if command("sinfo", "-h") else "SLURM has no nodes"
    except (OSError, subprocess.SubprocessError):
        return "no SLURM answers here: scripts/slurm_check.sh starts one"


pytestmark = [pytest.mark.long, pytest.mark.skipif(bool(why_not()), reason=why_not())]


def submit(*overrides: str) -> str:
    """Start the job through the fairchem command line; returns SLURM's number of it."""
    status, lines = fairchem(*overrides, *_SMALL, "job.scheduler.mode=SLURM")
    text = "\n".join(line for _, line in lines)
    found = re.search(r"slurm id: (\d+)", text)
    assert status == 0 and found is not None, text[-3000:]
    return found[1]


def wait_for(condition: Callable[[], Any], what: str, timeout: float = 180.0) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline, f"no {what} within {timeout:.0f} s; {command('squeue')}"
        time.sleep(0.2)


def steps_of(config: DictConfig) -> dict[int, tuple[float, float]]:
    """Loss and gradient norm by step; of a step that was taken twice, the last time."""
    try:
        return {r["step"]: (r["loss"], r["grad_norm"]) for r in metrics(config) if "loss" in r}
    except OSError:
        return {}


@pytest.mark.parametrize(
    ("how", "D"),
    [("--signal=USR2", 1), ("requeue", 2)],
    ids=["time limit: P2-D1", "another job or a failed node: P2-D2"],
)
def test_a_requeued_job_ends_where_the_uninterrupted_one_does(
    fake_job: list[str], tmp_path: Path, how: str, D: int
) -> None:
    """SLURM sends USR2 before a time limit, on which submitit links the last checkpoint and requeues; or requeues
    without a word. The uninterrupted job runs on ranks that no launcher has made."""
    job = [*fake_job, *adopt(P=2, N=2, D=D), "steps=1000", f"runner.max_steps={NUM_STEPS}"]
    job += [f"checkpoint_every={SAVED_EVERY}", f"job.run_dir='{tmp_path}'"]
    config = resume.job("requeued", job)
    number = submit(*job, "+job.timestamp_id=requeued", "+job.deterministic=true")
    try:
        wait_for(lambda: len(steps_of(config)) > INTERRUPTED_AT, f"step {INTERRUPTED_AT}")
        command(*(["scontrol", how] if how == "requeue" else ["scancel", how]), number)
        wait_for(lambda: "PENDING" in command("squeue", "-h", "-j", number, "-o", "%T"), "requeue")
        done = len(steps_of(config))
        assert INTERRUPTED_AT < done < NUM_STEPS
        link = tmp_path / "requeued" / "checkpoints" / "preemption_state"
        assert link.is_symlink() == (how != "requeue")
        command("scontrol", "update", f"JobId={number}", "StartTime=now")  # or it waits two minutes
        wait_for(lambda: not command("squeue", "-h"), "end of the job")
    finally:
        subprocess.run(["scancel", number], check=False)
    log = (tmp_path / "requeued" / "logs" / f"{number}_0_log.err").read_text()
    (loaded,) = re.findall(r"Done loading checkpoint from (\S+)", log)
    assert Path(loaded).name == ("preemption_state" if link.is_symlink() else f"step_{(done - 1) // 3 * 3}")
    assert "Job completed successfully" in log
    assert f"D={D} x P=2 x G=1" in log

    whole = resume.job("whole", job)
    resume.run_all({"whole": whole}, world_size=2 * D)
    assert len(steps_of(whole)) == NUM_STEPS
    assert steps_of(config) == steps_of(whole)
    assert os.path.isfile(resume.checkpoint(config, "final") / "inference_ckpt.pt")
