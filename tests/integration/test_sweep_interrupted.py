"""Ctrl-C during a sweep of real jobs: all ranks end, and run again the sweep goes on where it was."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.integration.variants import adopt
from tests.jobs.prepare import STOCK_JOB

ROOT = Path(__file__).parents[2]
STEPS = 30


def start(folder: Path, job: list[str]) -> subprocess.Popen[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    data = [text for text in job if not text.startswith("job.run_dir")]
    sizes = [*adopt(P=2, N=2), f"steps={STEPS}", "max_atoms=60", "checkpoint_every=5"]
    command = [sys.executable, "-c", "from fairchem_janus.cli.main import app; app()", "sweep", "-c", str(STOCK_JOB)]
    return subprocess.Popen(
        [*command, *data, *sizes, "--sweep-dir", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        cwd=ROOT,
    )


def steps_in(folder: Path) -> list[int]:
    (file,) = folder.glob("*/metrics.jsonl")
    return [r["step"] for r in map(json.loads, file.read_text().splitlines()) if "loss" in r]


def processes_of(folder: Path) -> list[str]:
    """Command lines that name the folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(folder) in line:
            found.append(line)
    return found


@pytest.mark.long
def test_an_interrupted_member_is_resumed_from_its_checkpoint(fake_job: list[str], tmp_path: Path) -> None:
    folder = tmp_path / "sweep"
    sweep = start(folder, fake_job)
    deadline = time.monotonic() + 200
    while not any(folder.glob("*/metrics.jsonl")) or len(steps_in(folder)) < 8:
        assert sweep.poll() is None and time.monotonic() < deadline, "the member did not get to its eighth step"
        time.sleep(0.05)
    sweep.send_signal(signal.SIGINT)
    output, _ = sweep.communicate(timeout=100)
    assert sweep.returncode == 130, output
    assert "interrupted" in output
    assert processes_of(folder) == []
    done = len(steps_in(folder))
    assert done < STEPS
    sweep = start(folder, fake_job)
    output, _ = sweep.communicate(timeout=300)
    assert sweep.returncode == 0, output
    steps = steps_in(folder)
    first = steps[done]
    assert first % 5 == 0 and 5 <= first <= steps[done - 1]  # the last checkpoint, not the start
    assert steps[done:] == list(range(first, STEPS))
