"""Jobs started by the fairchem command line, as users start them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.variants import adopt
from tests.jobs.prepare import STOCK_JOB

ROOT = Path(__file__).parents[2]
FAIRCHEM = Path(sys.executable).with_name("fairchem")


def fairchem(
    *overrides: str, job: Path = STOCK_JOB, timeout: float = 240.0, signal_at: tuple[str, int] | None = None
) -> tuple[int, list[tuple[float, str]]]:
    """Exit status, and every line that came out with the time at which it came.

    Args:
        signal_at: a text and a signal, sent to the command when a line with that text comes.
    """
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    command = [str(FAIRCHEM), "-c", str(job), *overrides]
    deadline = time.monotonic() + timeout
    lines = []
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append((time.monotonic(), line.rstrip()))
            if signal_at is not None and signal_at[0] in line:
                process.send_signal(signal_at[1])
                signal_at = None
            if time.monotonic() > deadline:
                process.kill()
                pytest.fail("the job did not end in time:\n" + "\n".join(text for _, text in lines[-30:]))
        status = process.wait()
    lines.append((time.monotonic(), "end of process"))
    return status, lines


def first_with(lines: list[tuple[float, str]], text: str) -> tuple[float, str]:
    found = next((line for line in lines if text in line[1]), None)
    assert found is not None, f"no line with {text!r}:\n" + "\n".join(t for _, t in lines[-40:])
    return found


def test_a_stock_job_is_switched_to_the_pipeline_by_overrides_alone(real_job: list[str], tmp_path: Path) -> None:
    status, lines = fairchem(*real_job, *adopt(P=2, N=4), f"job.run_dir={tmp_path}", "steps=3", "checkpoint_every=100")
    assert status == 0, "\n".join(text for _, text in lines[-40:])
    first_with(lines, "fairchem-janus")
    first_with(lines, "one micro-batch; 4 make a step of a replica")
    assert len([text for _, text in lines if "step 2/3 | epoch" in text]) == 1  # one line a step, from one rank
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records if "loss" in record] == [0, 1, 2]
    evaluations = [record["eval"] for record in records if "eval" in record]
    assert {"val/omat.val,omat_stress,mae", "val/omol.val,omol_forces,cosine_similarity", "val/loss"} <= set(
        evaluations[-1]
    )
    assert (run / "checkpoints" / "final" / "inference_ckpt.pt").exists()


def test_a_job_with_graph_parallelism_under_fairchems_older_key(real_job: list[str], tmp_path: Path) -> None:
    """fairchem's launcher makes groups of its own; halo traffic is on the console and in the metrics."""
    adopted = [*adopt(P=2, N=3, D=2), "+job.graph_parallel_group_size=2", "+runner.janus.gars.graphs_per_step=16"]
    status, lines = fairchem(*real_job, *adopted, f"job.run_dir={tmp_path}", "steps=2", "checkpoint_every=100")
    assert status == 0, "\n".join(text for _, text in lines[-40:])
    first_with(lines, "D=1 x P=2 x G=2")
    _, text = first_with(lines, "step 1/2 | epoch")
    assert " | halo " in text and "comm-free" in text
    (run,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for record in (record for record in records if "loss" in record):
        assert 0 <= record["comm_free_share"] <= 1 and record["num_samples"] == 16
        assert (record["halo_bytes"] > 0) == (record["comm_free_share"] < 1)
        assert len(record["halo_micro_batches"]) == 3
    assert any("eval" in record for record in records)
    assert (run / "checkpoints" / "final" / "inference_ckpt.pt").exists()


@pytest.mark.parametrize("how", ["phase", "kill"])
def test_a_failing_rank_ends_all_ranks_within_30_seconds(fake_job: list[str], how: str) -> None:
    kept = "{_target_: fairchem.core.components.train.train_runner.TrainCheckpointCallback, " + (
        "checkpoint_every_n_steps: ${checkpoint_every}}"
    )
    fail = f"{{_target_: tests.jobs.callbacks.FailOnRank, rank: 1, step: 1, how: {how}}}"
    status, lines = fairchem(*fake_job, *adopt(P=3, N=2), "steps=50", f"runner.callbacks=[{kept}, {fail}]")
    assert status != 0
    last_step, _ = first_with(lines, "step 0/50 | epoch")
    assert lines[-1][0] - last_step < 30 + 10  # ten seconds for the step in which it fails
    if how == "phase":
        reported, _ = first_with(lines, "fairchem-janus: rank 1 failed, ending all ranks")
        assert lines[-1][0] - reported < 30
        _, text = first_with(lines, "PhaseError: rank 1 (d=0 p=1 g=0), stage 1, FE of micro-batch 0 (graphs om")
        assert "ZeroDivisionError: planted by a test" in text
    else:
        first_with(lines, "rank 1 does not answer any more; it failed, was killed (out of memory?)")


def test_a_world_of_the_wrong_size_is_an_error_that_shows_the_grid(fake_job: list[str]) -> None:
    status, lines = fairchem(*fake_job, *adopt(P=2, N=2), "job.scheduler.ranks_per_node=3")
    assert status != 0
    _, text = first_with(lines, "ValueError: the world has 3 ranks")
    assert "Set job.scheduler.ranks_per_node (times job.scheduler.num_nodes) to 2 or 4" in text
