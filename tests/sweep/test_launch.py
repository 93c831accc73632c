"""Members as processes, with a command that stands in for fairchem."""

from __future__ import annotations

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed.checkpoint as dcp

from fairchem_janus.results.folder import LOCK_FILE
from fairchem_janus.results.summary import summarize
from fairchem_janus.sweep import launch
from fairchem_janus.sweep.expand import expand
from fairchem_janus.sweep.launch import Sweep
from fairchem_janus.sweep.state import State, Status

FAKE = Path(__file__).with_name("fake_fairchem.py")


@pytest.fixture
def make_sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Sweep, list[str]]]:
    """A sweep in a folder with awkward characters, and what it reports."""
    monkeypatch.setattr(launch, "POLL_SECONDS", 0.01)
    command = tmp_path / "fairchem"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} {FAKE} "$@"\n')
    command.chmod(0o755)
    job = tmp_path / "job.yaml"
    job.write_text("runner: {}\n")

    def make(*overrides: str) -> tuple[Sweep, list[str]]:
        said: list[str] = []
        folder = tmp_path / "it's a sweep"
        return Sweep(job, expand(overrides), folder, str(command), lambda _, what: said.append(what)), said

    return make


def states(sweep: Sweep) -> dict[str, str]:
    found = {member: State.read(member.folder_in(sweep.folder)) for member in sweep.members}
    return {str(member): state.status if state else "-" for member, state in found.items()}


def starts(sweep: Sweep) -> list[int]:
    files = [member.folder_in(sweep.folder) / "starts.txt" for member in sweep.members]
    return [len(file.read_text().splitlines()) if file.exists() else 0 for file in files]


def test_a_failing_member_does_not_end_the_sweep(make_sweep: Callable) -> None:
    sweep, said = make_sweep("do=fail,ok")
    assert sweep.run(jobs=1)
    assert states(sweep) == {"do=fail": "failed", "do=ok": "finished"}
    assert said[1] == "failed: ValueError: lr=None is too large"
    state = State.read(sweep.members[0].folder_in(sweep.folder))
    assert state is not None and state.error == "ValueError: lr=None is too large"


def test_run_again_it_skips_what_is_finished_and_no_more(make_sweep: Callable) -> None:
    sweep, _ = make_sweep("do=ok,plain,fail,half,signal,slurm")
    sweep.run(jobs=3)
    assert states(sweep) == {
        "do=ok": "finished",
        "do=plain": "finished",
        "do=fail": "failed",
        "do=half": "interrupted",  # exit status 0, but not all of its steps
        "do=signal": "interrupted",
        "do=slurm": "submitted",
    }
    again, said = make_sweep("do=ok,plain,fail,half,signal,slurm")
    again.run(jobs=1)
    assert starts(sweep) == [1, 1, 2, 2, 2, 1]
    assert said[0] == "finished before, left as it is"


def test_a_refused_member_fails_without_being_started(make_sweep: Callable) -> None:
    sweep, said = make_sweep("lr=1,2")
    assert sweep.run(jobs=1, refused={sweep.members[0]: "Could not override 'lr'"})
    assert states(sweep) == {"lr=1": "failed", "lr=2": "finished"}
    assert starts(sweep) == [0, 1]
    assert said[0] == "failed, not started: Could not override 'lr'"
    assert summarize(sweep.members[0].folder_in(sweep.folder)).error == "Could not override 'lr'"


def test_a_finished_member_stays_so_when_it_is_refused_later(make_sweep: Callable) -> None:
    sweep, _ = make_sweep("lr=1")
    sweep.run(jobs=1)
    sweep.run(jobs=1, refused={sweep.members[0]: "no"})
    assert states(sweep) == {"lr=1": "finished"}


def test_it_says_from_which_step_a_member_goes_on(make_sweep: Callable) -> None:
    sweep, said = make_sweep("do=half")
    sweep.run(jobs=1)
    checkpoint = sweep.members[0].folder_in(sweep.folder) / "checkpoints" / "preemption_state"
    dcp.save({"unit_state": {"progress": {"num_steps_completed": 7}}}, checkpoint_id=checkpoint, no_dist=True)
    sweep.run(jobs=1)
    (checkpoint / ".metadata").write_text("torn")
    sweep.run(jobs=1)
    assert [text.partition(",")[0] for text in said[::2]] == [
        "started",
        "resumed from step 7",
        "resumed from preemption_state",
    ]


def test_a_member_is_the_same_in_another_sweep_unless_an_override_differs(make_sweep: Callable) -> None:
    first, _ = make_sweep("lr=1,2")
    first.run(jobs=2)
    second, _ = make_sweep("lr=2,3")
    second.run(jobs=2)
    third, _ = make_sweep("lr=1,2", "seconds=0.0")
    third.run(jobs=2)
    one, _ = make_sweep("lr=2.0")
    one.run(jobs=1)
    alone, said = make_sweep("lr=2")
    alone.run(jobs=1)
    assert said == ["finished before, left as it is"]
    assert starts(first) == [1, 1]
    assert starts(second) == [1, 1]
    assert starts(third) == [1, 1]


def test_a_changed_job_file_is_pointed_out(make_sweep: Callable) -> None:
    sweep, said = make_sweep("do=ok")
    sweep.run(jobs=1)
    sweep.job_file.write_text("runner: {lr: 2}\n")
    sweep.run(jobs=1)
    assert said[-1] == "finished before, left as it is; the job file has changed since"


def test_a_run_that_outlived_its_sweep_is_found_finished(make_sweep: Callable) -> None:
    sweep, _ = make_sweep("do=ok")
    sweep.run(jobs=1)
    folder = sweep.members[0].folder_in(sweep.folder)
    State(Status.running, [], "x").write(folder)  # what a sweep that was killed leaves
    sweep.run(jobs=1)
    assert starts(sweep) == [1]
    assert states(sweep) == {"do=ok": "finished"}


def test_no_more_than_so_many_at_a_time(make_sweep: Callable) -> None:
    sweep, _ = make_sweep("seconds=0.3,0.31,0.32,0.33")
    sweep.run(jobs=2)
    times = []
    for member in sweep.members:
        folder = member.folder_in(sweep.folder)
        times.append((float((folder / "starts.txt").read_text()), float((folder / "ends.txt").read_text())))
    most = max(sum(start <= at < end for start, end in times) for at, _ in times)
    assert most == 2


def test_a_run_that_ended_with_its_sweep_is_not_called_running(make_sweep: Callable) -> None:
    sweep, _ = make_sweep("do=fail")
    sweep.run(jobs=1)
    folder = sweep.members[0].folder_in(sweep.folder)
    State(Status.running, [], "x").write(folder)
    assert summarize(folder).status == "interrupted"
    with open(folder / LOCK_FILE) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert summarize(folder).status == "running"


def test_two_sweeps_never_run_the_same_member(make_sweep: Callable) -> None:
    sweep, _ = make_sweep("seconds=1.5")
    other, said = make_sweep("seconds=1.5")
    thread = threading.Thread(target=wait_then, args=(sweep, lambda: other._start(other.members[0], "x")))
    thread.start()
    sweep.run(jobs=1)
    thread.join()
    assert said == ["left alone, another process runs it"]
    assert starts(sweep) == [1]


def wait_then(sweep: Sweep, act: Callable[[], object]) -> None:
    deadline = time.monotonic() + 20
    while sum(starts(sweep)) < 1 and time.monotonic() < deadline:
        time.sleep(0.02)
    act()


@pytest.mark.parametrize(("do", "times"), [("sleep", 1), ("deaf", 2)])
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_all_members(make_sweep: Callable, do: str, times: int, number: int) -> None:
    """Those that do not listen are killed when it comes again."""
    sweep, _ = make_sweep(f"do={do},{do}", "lr=1,2,3")

    def stop() -> None:
        for _ in range(times):
            os.kill(os.getpid(), number)
            time.sleep(0.5)

    thread = threading.Thread(target=wait_then, args=(sweep, stop))
    thread.start()
    before = signal.getsignal(number)
    assert not sweep.run(jobs=1)
    thread.join()
    assert signal.getsignal(number) == before
    assert list(states(sweep).values()) == ["interrupted", "-", "-"]
    with pytest.raises(ProcessLookupError):
        os.kill(int((sweep.members[0].folder_in(sweep.folder) / "pid.txt").read_text()), 0)


def test_members_that_take_too_long_to_end_are_killed(make_sweep: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "GRACE_SECONDS", 0.3)
    sweep, _ = make_sweep("do=deaf")
    thread = threading.Thread(target=wait_then, args=(sweep, lambda: os.kill(os.getpid(), signal.SIGINT)))
    thread.start()
    assert not sweep.run(jobs=1)
    thread.join()
    assert states(sweep) == {"do=deaf": "interrupted"}
