"""A rank that fails ends the others soon, even those that are blocked inside a collective."""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch.distributed as dist

from fairchem_janus.parallel import watch as module
from fairchem_janus.parallel.watch import FailureWatch

TIMEOUT = 20.0
"""Seconds for every rank to be gone; the bound promised to users is 30, with grace periods of 5 to 25 of them."""

RANK = textwrap.dedent(
    """
    import os, signal, sys, time
    from datetime import timedelta
    import torch
    import torch.distributed as dist
    from fairchem_janus.parallel import watch

    watch.GRACE_SECONDS, watch.SIGNAL_GRACE_SECONDS = 1.0, 1.0
    signal.signal(signal.SIGTERM, lambda *_: print("handled", flush=True))  # as fairchem's, served between bytecodes
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    guard = watch.FailureWatch.of_world()
    guard.start()
    dist.barrier()
    print("ready", flush=True)
    if os.environ["RANK"] == os.environ["FAILS"]:
        guard.report(ValueError("no such luck"))
    if os.environ["RANK"] == os.environ["BLOCKS"]:
        dist.all_reduce(torch.zeros(1))  # the other never comes
    time.sleep(600)  # still holds its connections: nothing but the watch can end its peers
    """
)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return int(probe.getsockname()[1])


@pytest.fixture
def launch() -> Iterator[Callable[..., list[subprocess.Popen[str]]]]:
    processes: list[subprocess.Popen[str]] = []

    def start(*, fails: int | None, blocks: int) -> list[subprocess.Popen[str]]:
        """Two ranks, both past their imports: one reports an error (if any does), one waits in a collective."""
        world = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
        for rank in range(2):
            environment = {**os.environ, **world, "RANK": str(rank), "FAILS": str(fails), "BLOCKS": str(blocks)}
            command = [sys.executable, "-c", RANK]
            processes.append(
                subprocess.Popen(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
            )
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        return processes

    yield start
    for process in processes:
        process.kill()
        process.communicate()


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_ends_one_that_is_blocked(
    launch: Callable[..., list[subprocess.Popen[str]]], failing: int
) -> None:
    """Rank 0 hosts the job's store: its own failure must get through as well."""
    processes = launch(fails=failing, blocks=1 - failing)
    started = time.monotonic()
    failed, blocked = processes[failing], processes[1 - failing]
    assert blocked.wait(TIMEOUT) == module.EXIT_CODE != 0
    assert failed.wait(TIMEOUT) == module.EXIT_CODE
    assert time.monotonic() - started < TIMEOUT
    errors = {process: process.communicate()[1] for process in processes}
    assert f"rank {failing} failed, ending all ranks\nValueError: no such luck" in errors[failed]
    assert f"rank {1 - failing} ends because of: rank {failing} failed" in errors[blocked]


def test_sigterm_ends_a_rank_that_is_blocked(launch: Callable[..., list[subprocess.Popen[str]]]) -> None:
    blocked, sleeping = launch(fails=None, blocks=0)
    time.sleep(0.2)  # into the collective
    blocked.send_signal(signal.SIGTERM)
    assert blocked.wait(TIMEOUT) == module.EXIT_CODE
    output, error = blocked.communicate()
    assert "ends because of: SIGTERM" in error
    assert "handled" not in output  # what the launcher's own handler would need, it does not get
    assert sleeping.poll() is None


def test_under_slurm_a_signal_is_slurms_affair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SUBMITIT_EXECUTOR", "slurm")
    assert FailureWatch(1, dist.HashStore())._ending_signals == set()


# ---------------------------------------------------------------- in one process


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Exit codes instead of the end of this process."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    monkeypatch.setattr(module, "POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "GRACE_SECONDS", 0.05)
    return codes


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5.0
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_stopping_leaves_nothing_behind(exits: list[int]) -> None:
    before = threading.active_count()
    guard = FailureWatch(0, dist.HashStore())
    guard.start()
    assert threading.active_count() == before + 1
    guard.stop()
    assert threading.active_count() == before
    assert signal.set_wakeup_fd(-1) == -1
    assert exits == []


def test_a_rank_that_ends_by_itself_within_the_grace_period_is_left_alone(
    exits: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GRACE_SECONDS", 5.0)
    store = dist.HashStore()
    guard = FailureWatch(0, store)
    guard.start()
    store.set(module._KEY, "1|ValueError: elsewhere")
    time.sleep(0.1)
    guard.stop()
    assert exits == []


def test_a_signal_to_a_loaders_worker_is_not_its_ranks(exits: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SIGNAL_GRACE_SECONDS", 0.05)
    previous = signal.signal(signal.SIGTERM, lambda *_: None)
    guard = FailureWatch(0, dist.HashStore())
    guard.start()
    worker = os.fork()
    if worker == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(worker, 0)
    time.sleep(0.3)
    guard.stop()
    signal.signal(signal.SIGTERM, previous)
    assert exits == []


def test_a_note_of_another_rank_ends_this_one(exits: list[int], capsys: pytest.CaptureFixture[str]) -> None:
    store = dist.HashStore()
    guard = FailureWatch(0, store)
    guard.start()
    store.set(module._KEY, "1|ValueError: elsewhere")
    wait_for(lambda: bool(exits))
    guard.stop()
    assert set(exits) == {module.EXIT_CODE}
    assert "rank 0 ends because of: rank 1 failed" in capsys.readouterr().err


def test_only_the_first_error_is_printed(exits: list[int], caplog: pytest.LogCaptureFixture) -> None:
    store = dist.HashStore()
    with caplog.at_level(logging.ERROR):
        FailureWatch(1, store).report(ValueError("a | in the text"))
        FailureWatch(0, store).report(RuntimeError("connection closed by peer"))
    wait_for(lambda: len(exits) == 2)  # ended in any case, should it hang on the way out
    (record,) = caplog.records
    assert "rank 1 failed" in record.getMessage()
    assert "ValueError: a | in the text" in record.getMessage()


def test_the_same_error_on_every_rank_is_printed_once(exits: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """As a wrong key in the job file gives it."""
    store = dist.HashStore()
    for rank in range(3):
        FailureWatch(rank, store).report(ValueError("unknown key janus.x"))
    wait_for(lambda: len(exits) == 3)
    assert len(caplog.records) == 1


def test_a_rank_alone_reports_and_its_process_goes_on(exits: list[int], caplog: pytest.LogCaptureFixture) -> None:
    """Nobody waits for it: a notebook, or a test, must survive the error that it is about to see."""
    guard = FailureWatch.of_world()
    guard.start()
    guard.report(ValueError("alone"))
    assert "rank 0 failed, ending all ranks\nValueError: alone" in caplog.text
    assert guard._thread is None  # nothing is left that could end the process later
    assert exits == []
