"""What became of a sweep's member, read from its run folder and kept there in `sweep.json`.

finished     the run took all of its steps and ended without an error
failed       it ended with an error; the last one is kept
interrupted  it was stopped; run again, it goes on from its last checkpoint
running      another process is at it
submitted    handed to SLURM

An exit status of 0 does not make a run finished: fairchem also returns 0 when a local job was stopped by a signal, when
it stopped before a time limit, and when it has just submitted a job to SLURM.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path

from fairchem_janus.results.folder import STATE_FILE, CanonicalConfig, read_end, read_records
from fairchem_janus.sweep.expand import Member

CONSOLE_LOG = "console.log"
PREEMPTION_FOLDER = Path("checkpoints") / "preemption_state"
LONGEST_ERROR = 300
_ERROR = re.compile(r"^(?:\[\w+\]:?\s*)*(?P<text>[A-Za-z_][\w.]*(?:Error|Exception|Interrupt|Exit)(?::.*)?)$")
_NOT_THE_CAUSE = "ChildFailedError"  # torch's launcher, after a rank's own error
_CUT_OFF = re.compile(r"^\s*$|^[=-]{5}|^Traceback |^\[?\d{4}-|^[A-Z]+:|^[A-Z]\d{4} |^\[rank\d")


class Status(StrEnum):
    finished = "finished"
    failed = "failed"
    interrupted = "interrupted"
    running = "running"
    submitted = "submitted"


@dataclass(frozen=True, slots=True)
class State:
    """What is kept of a member.

    Attributes:
        error: the last error of a failed member.
        job_digest: of the job file's text when the member ran.
    """

    status: Status
    overrides: list[str]
    job_digest: str
    error: str | None = None

    def write(self, folder: Path) -> None:
        """Write `sweep.json`, all of it or nothing."""
        temporary = folder / f"{STATE_FILE}.part"
        temporary.write_text(json.dumps(asdict(self), indent=1) + "\n")
        os.replace(temporary, folder / STATE_FILE)

    @classmethod
    def read(cls, folder: Path) -> State | None:
        """The state in a folder; None if there is none."""
        try:
            values = json.loads((folder / STATE_FILE).read_text())
        except (FileNotFoundError, json.JSONDecodeError):
            return None
        return cls(**values | {"status": Status(values["status"])})


def job_digest(job_file: Path) -> str:
    return hashlib.sha256(job_file.read_bytes()).hexdigest()[:16]


def known_state(folder: Path, member: Member, digest: str) -> State | None:
    """What a member's folder tells before anything is started; None: it never ran.

    A run that went on after the sweep itself was killed is found finished by its own record.
    """
    state = State.read(folder)
    if state is None or state.status is not Status.finished:
        end = read_end(folder)
        if end is not None and end.completed and (state is None or state.status is not Status.failed):
            return State(Status.finished, list(member.overrides), state.job_digest if state else digest)
    return state


@dataclass(frozen=True, slots=True)
class Before:
    """What was in a member's folder before it was started, to tell what this start added.

    Attributes:
        num_records: in `metrics.jsonl`.
        stop_time: when a signal last stopped the run; None: never.
        log_bytes: size of the console log.
    """

    num_records: int
    stop_time: int | None
    log_bytes: int

    @classmethod
    def of(cls, folder: Path) -> Before:
        preemption = folder / PREEMPTION_FOLDER
        stop_time = preemption.lstat().st_mtime_ns if os.path.lexists(preemption) else None
        log = folder / CONSOLE_LOG
        return cls(len(read_records(folder)), stop_time, log.stat().st_size if log.exists() else 0)


def judge(folder: Path, *, exit_status: int, before: Before, stopped: bool) -> tuple[Status, str | None]:
    """What became of a member whose process has ended, and its error.

    Args:
        stopped: whether the sweep stopped it.
    """
    now = Before.of(folder)
    end = read_end(folder) if now.num_records > before.num_records else None
    if exit_status == 0 and end is not None and end.completed:
        return Status.finished, None
    if stopped:
        return Status.interrupted, None
    if exit_status != 0:
        return Status.failed, last_error(_log_text(folder, before), exit_status)
    config = CanonicalConfig.read(folder)
    if config is not None and config.is_slurm:
        return Status.submitted, None
    if now.stop_time != before.stop_time or (config is not None and config.is_janus):
        return Status.interrupted, None
    return Status.finished, None  # plain fairchem keeps no record of its end


def _log_text(folder: Path, before: Before) -> str:
    with open(folder / CONSOLE_LOG, "rb") as log:
        log.seek(before.log_bytes)
        return log.read().decode(errors="replace")


def last_error(log: str, exit_status: int) -> str:
    """The last error in a console log, on one line; what is known where there is none."""
    lines = log.splitlines()
    found = ""
    for index, line in enumerate(lines):
        match = _ERROR.match(line.rstrip())
        if match and _NOT_THE_CAUSE not in line:
            found = shortened([match["text"], *_continued(lines[index + 1 :])])
    if found:
        return found
    how = f"signal {-exit_status}" if exit_status < 0 else f"exit status {exit_status}"
    last = next((line for line in reversed(lines) if line.strip()), "")
    return shortened([f"{how}; {last}" if last else how])


def _continued(lines: Iterable[str]) -> list[str]:
    """Further lines of a message: up to an empty line, a log line, or another traceback."""
    more: list[str] = []
    for line in lines:
        if _CUT_OFF.match(line) or len(more) == 3:
            break
        more.append(line)
    return more


def shortened(lines: list[str]) -> str:
    """A message on one line, cut off where it is too long for a table."""
    text = " ".join(" ".join(lines).split())
    return text if len(text) <= LONGEST_ERROR else text[: LONGEST_ERROR - 3] + "..."
