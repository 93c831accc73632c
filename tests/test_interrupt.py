"""Signals: all ranks stop before the same step; what a run leaves to resume from."""

from __future__ import annotations

import logging
import os
import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist
from fairchem.core.components.train.train_runner import get_most_recent_viable_checkpoint_path
from omegaconf import OmegaConf

from fairchem_janus import interrupt
from fairchem_janus import runner as runner_module
from fairchem_janus.interrupt import StopOnSignal, link_last_checkpoint
from fairchem_janus.runner import JanusRunner


@pytest.fixture(autouse=True)
def _processes_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interrupt.distutils, "cleanup", lambda: None)


def at(step: int) -> Any:
    return SimpleNamespace(train_progress=SimpleNamespace(num_steps_completed=step))


def rank(store: dist.Store | None, saved: list[str], location: str = "preempted") -> StopOnSignal:
    def save(location: str) -> bool:
        saved.append(location)
        return False

    return StopOnSignal(save, location, store)


def test_without_a_signal_nothing_happens() -> None:
    saved: list[str] = []
    rank(dist.HashStore(), saved).on_train_step_start(None, at(3))  # type: ignore[arg-type]
    assert saved == []


def test_all_ranks_stop_before_the_step_that_the_signalled_one_announces() -> None:
    store, saved = dist.HashStore(), []
    signalled, other = rank(store, saved), rank(store, saved)
    other.on_train_step_start(None, at(7))  # type: ignore[arg-type]
    signalled.received = signal.SIGINT
    signalled.on_train_step_start(None, at(7))  # type: ignore[arg-type]
    assert saved == []
    for one, code in ((other, 128 + signal.SIGTERM), (signalled, 128 + signal.SIGINT)):
        with pytest.raises(SystemExit) as end:
            one.on_train_step_start(None, at(8))  # type: ignore[arg-type]
        assert end.value.code == code
    assert saved == ["preempted"] * 2


def test_the_first_announcement_holds() -> None:
    store, saved = dist.HashStore(), []
    early, late = rank(store, saved), rank(store, saved)
    early.received = late.received = signal.SIGTERM
    early.on_train_step_start(None, at(7))  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        late.on_train_step_start(None, at(8))  # type: ignore[arg-type]
    assert saved == ["preempted"]


def test_a_rank_that_is_alone_stops_before_the_next_step() -> None:
    saved: list[str] = []
    alone = rank(None, saved)
    alone.received = signal.SIGTERM
    with pytest.raises(SystemExit):
        alone.on_train_step_start(None, at(0))  # type: ignore[arg-type]
    assert saved == ["preempted"]


@pytest.mark.parametrize("number", interrupt.SIGNALS)
def test_handlers_note_a_signal_and_are_put_back(number: signal.Signals) -> None:
    before = signal.getsignal(number)
    stop = rank(None, [])
    with stop.installed():
        os.kill(os.getpid(), number)
    assert stop.received == number
    assert signal.getsignal(number) is before


def test_a_loaders_worker_ends_at_sigterm_and_leaves_ctrl_c_to_its_rank() -> None:
    stop = rank(None, [])
    with stop.installed():
        worker = os.fork()
        if worker == 0:
            os.kill(os.getpid(), signal.SIGINT)
            os.kill(os.getpid(), signal.SIGTERM)
            os._exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(worker, 0)[1]) == 1
    assert stop.received is None


# ---------------------------------------------------------------- the link to the last checkpoint


def checkpoint(folder: Path, name: str, time: int) -> Path:
    path = folder / name
    path.mkdir(parents=True)
    (path / ".metadata").touch()
    os.utime(path, (time, time))
    return path


def test_the_link_leads_to_the_youngest_complete_checkpoint_each_time(tmp_path: Path) -> None:
    link = tmp_path / "preemption_state"
    assert not link_last_checkpoint(str(tmp_path), str(link))
    (tmp_path / "broken").mkdir()
    old = checkpoint(tmp_path, "step_1", 1)
    for _ in range(2):  # the second time the link itself may be the youngest that is found
        assert link_last_checkpoint(str(tmp_path), str(link))
        assert link.is_symlink() and link.resolve() == old
    young = checkpoint(tmp_path, "step_2", 2)
    assert link_last_checkpoint(str(tmp_path), str(link))
    assert link.resolve() == young


def test_the_link_takes_the_place_of_an_older_state_and_not_of_the_youngest(tmp_path: Path) -> None:
    state = checkpoint(tmp_path, "preemption_state", 1)
    assert link_last_checkpoint(str(tmp_path), str(state))
    assert not state.is_symlink()
    young = checkpoint(tmp_path, "step_2", 2)
    assert link_last_checkpoint(str(tmp_path), str(state))
    assert state.resolve() == young


@pytest.mark.parametrize("disk_full", [False, True])
def test_an_interrupted_run_is_saved_or_else_linked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, disk_full: bool
) -> None:
    last = checkpoint(tmp_path, "step_1", 1)
    link = tmp_path / "preemption_state"
    link.symlink_to(last)  # of an earlier preemption

    def save(unit: object, location: str) -> bool:
        assert not link.exists()
        if not disk_full:
            checkpoint(tmp_path, link.name, 2)
        return not disk_full

    monkeypatch.setattr(runner_module, "save_checkpoint", save)
    runner = object.__new__(JanusRunner)
    runner.job_config = OmegaConf.create({"metadata": {"checkpoint_dir": str(tmp_path)}})
    runner.train_eval_unit = None  # type: ignore[assignment]
    assert runner._save_interrupted(str(link))
    assert link.is_symlink() == disk_full
    youngest = get_most_recent_viable_checkpoint_path(str(tmp_path))
    assert youngest is not None and Path(youngest).resolve() == (last if disk_full else link)


def test_fairchem_finds_its_own_name_for_the_job_that_goes_on(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    state = checkpoint(tmp_path, "preemption_state", 1)
    (state / "resume.yaml").write_text("job: {}\n")
    stop = StopOnSignal(lambda location: True, str(state), None)
    stop.received = signal.SIGTERM
    with caplog.at_level(logging.INFO), pytest.raises(SystemExit):
        stop.on_train_step_start(None, at(4))  # type: ignore[arg-type]
    assert (state / "resume_config.yaml").read_text() == "job: {}\n"
    assert "SIGTERM: stopping before step 4" in caplog.text
    assert f"go on with: fairchem -c {state / 'resume.yaml'}" in caplog.text
