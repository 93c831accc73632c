"""Runs the members of a sweep, a few at a time, each as a `fairchem` command of its own.

A member's run folder is `SWEEP_DIR/NAME`: `job.run_dir` and `job.timestamp_id` say so. fairchem goes on from the
last checkpoint in a run folder that it is started in again, which is how an interrupted member is resumed.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.types import Quote, QuotedString

from fairchem_janus.results.checkpoints import latest_checkpoint, num_steps
from fairchem_janus.results.folder import LOCK_FILE
from fairchem_janus.sweep.compose import composition_error
from fairchem_janus.sweep.expand import Member
from fairchem_janus.sweep.state import CONSOLE_LOG, Before, State, Status, job_digest, judge, known_state

POLL_SECONDS = 0.1
GRACE_SECONDS = 45.0
"""Time that a stopped member gets to note its last checkpoint; torch's launcher alone may take 30 s."""

STAYS = (Status.finished, Status.submitted)
"""Members that are left as they are when the sweep is run again."""


def fairchem_command() -> str:
    """The `fairchem` of this Python environment.

    Raises:
        ValueError: there is none.
    """
    beside = Path(sys.executable).with_name("fairchem")
    found = str(beside) if beside.exists() else shutil.which("fairchem")
    if found is None:
        raise ValueError(f"no fairchem command beside {sys.executable} or on PATH")
    return found


def make_folder(folder: Path) -> None:
    """Make the folder of a sweep.

    Raises:
        ValueError: it cannot be made, or nothing can be written in it.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise ValueError(f"no run folders can be made in {folder}: {error.strerror}") from None


@dataclass(slots=True)
class _Running:
    member: Member
    folder: Path
    process: subprocess.Popen[bytes]
    before: Before
    stopped: bool = False

    def kill_rest(self) -> None:
        """Kill what is left of the member's process group: ranks and loaders that outlived their launcher."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class Sweep:
    """A job file, its members and where they run.

    Attributes:
        folder: gets a run folder for every member.
        command: the `fairchem` command.
        report: called with a member and what happened to it.
    """

    job_file: Path
    members: Sequence[Member]
    folder: Path
    command: str
    report: Callable[[Member, str], None]

    def refused(self) -> dict[Member, str]:
        """The members whose configuration cannot be composed -> what fairchem says."""
        errors = {member: composition_error(self.job_file, self._overrides(member)) for member in self.members}
        return {member: error for member, error in errors.items() if error is not None}

    def run(self, jobs: int, *, refused: Mapping[Member, str] | None = None) -> bool:
        """Run every member that has not finished, at most `jobs` at a time; those that are `refused` fail unstarted.

        Returns whether all had their turn: False if SIGINT, SIGTERM or SIGHUP came. Then running members are asked to
        end, and killed when they take too long or the signal comes again.
        """
        digest = job_digest(self.job_file)
        waiting = list(reversed(self.members))
        running: list[_Running] = []
        with _signals_counted() as signals:
            while (waiting or running) and not signals:
                while waiting and len(running) < jobs:
                    member = waiting.pop()
                    started = self._start(member, digest, (refused or {}).get(member))
                    if started is not None:
                        running.append(started)
                if running:
                    time.sleep(POLL_SECONDS)
                running = [member for member in running if not self._ended(member, digest)]
            if signals:
                self._stop(running, digest, signals)
            return not signals

    def _start(self, member: Member, digest: str, error: str | None = None) -> _Running | None:
        """Start a member, or report why not: `error`, for one."""
        folder = member.folder_in(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        state = known_state(folder, member, digest)
        if state is not None and state.status in STAYS:
            state.write(folder)
            changed = "" if state.job_digest == digest else "; the job file has changed since"
            self.report(member, f"{state.status} before, left as it is{changed}")
            return None
        with open(folder / LOCK_FILE, "w") as lock, open(folder / CONSOLE_LOG, "ab") as log:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:  # another sweep's, or one that outlived the sweep that started it
                self.report(member, "left alone, another process runs it")
                return None
            if error is not None:
                State(Status.failed, list(member.overrides), digest, error).write(folder)
                self.report(member, f"failed, not started: {error}")
                return None
            before, how = Before.of(folder), _how_it_starts(folder)
            State(Status.running, list(member.overrides), digest).write(folder)
            arguments = [self.command, "-c", str(self.job_file), *self._overrides(member)]
            log.write(f"$ {' '.join(arguments)}\n".encode())
            log.flush()
            process = subprocess.Popen(
                arguments,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a Ctrl-C at the terminal reaches the sweep alone, which then ends its members
                pass_fds=[lock.fileno()],  # so the lock is held for as long as the member lives
            )
        self.report(member, f"{how}, {folder / CONSOLE_LOG}")
        return _Running(member, folder, process, before)

    def _overrides(self, member: Member) -> list[str]:
        """Its own and those that say where its run folder is."""
        folder = member.folder_in(self.folder)
        values = {"job.run_dir": str(folder.parent.resolve()), "job.timestamp_id": folder.name}
        return [*member.overrides, *(f"++{key}={quoted(value)}" for key, value in values.items())]

    def _ended(self, running: _Running, digest: str) -> bool:
        exit_status = running.process.poll()
        if exit_status is None:
            return False
        running.kill_rest()
        status, error = judge(running.folder, exit_status=exit_status, before=running.before, stopped=running.stopped)
        State(status, list(running.member.overrides), digest, error).write(running.folder)
        self.report(running.member, f"{status}: {error}" if error else str(status))
        return True

    def _stop(self, running: list[_Running], digest: str, signals: list[int]) -> None:
        """End members: SIGTERM to the launcher, which passes it on, then SIGKILL to all that is left."""
        asked = len(signals)
        for member in running:
            member.stopped = True
            member.process.terminate()
        deadline = time.monotonic() + GRACE_SECONDS
        while running and time.monotonic() < deadline and len(signals) == asked:
            time.sleep(POLL_SECONDS)
            running = [member for member in running if not self._ended(member, digest)]
        for member in running:
            member.kill_rest()
            member.process.wait()
            self._ended(member, digest)


def _how_it_starts(folder: Path) -> str:
    checkpoint = latest_checkpoint(folder)
    if checkpoint is None:
        return "started"
    steps = num_steps(checkpoint)
    return f"resumed from {checkpoint.name if steps is None else f'step {steps}'}"


def quoted(text: str) -> str:
    """A text as a value in Hydra's override syntax, whatever is in it."""
    return QuotedString(text, Quote.single).with_quotes()


@contextmanager
def _signals_counted() -> Iterator[list[int]]:
    """SIGINT, SIGTERM and SIGHUP are noted in the list, and do nothing else."""
    came: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    before = {number: signal.signal(number, lambda number, frame: came.append(number)) for number in numbers}
    try:
        yield came
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
