"""A run folder as fairchem and janus leave it: which folders are runs, and what can be read from them.

canonical_config.yaml  the job as it ran, by fairchem
metrics.jsonl          steps, evaluations and the end, by janus
sweep.json             what `fairchem-janus sweep` knows of the run
sweep.lock             held by the processes of a sweep's member for as long as they live
checkpoints/final      written by fairchem's TrainCheckpointCallback when training ends
"""

from __future__ import annotations

import fcntl
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CONFIG_FILE = "canonical_config.yaml"
METRICS_FILE = "metrics.jsonl"
STATE_FILE = "sweep.json"
LOCK_FILE = "sweep.lock"
FINAL_CHECKPOINT = Path("checkpoints") / "final"
JANUS_RUNNER = "fairchem_janus.JanusRunner"
_JANUS_RUNNERS = (JANUS_RUNNER, "fairchem_janus.runner.JanusRunner")


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The run folders among and below the given folders, each once.

    Raises:
        ValueError: a folder that does not exist, or has no run in it.
    """
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ValueError(f"{folder} is not a folder")
        runs = list(_runs_below(folder))
        if not runs:
            raise ValueError(f"{folder} has no run folder in it (none with {CONFIG_FILE} or {METRICS_FILE})")
        found |= {run.resolve(): run for run in runs}
    return list(found.values())


def _runs_below(folder: Path) -> Iterator[Path]:
    if any((folder / name).is_file() for name in (CONFIG_FILE, METRICS_FILE, STATE_FILE)):
        yield folder
        return
    for child in sorted(folder.iterdir()):
        if child.is_dir() and not child.is_symlink() and not child.name.startswith("."):
            yield from _runs_below(child)


def is_locked(folder: Path) -> bool:
    """Whether a process of a sweep's member is alive."""
    try:
        with open(folder / LOCK_FILE) as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


@dataclass(frozen=True, slots=True)
class CanonicalConfig:
    """The resolved job that fairchem saves before a run starts."""

    values: dict[str, Any]

    @classmethod
    def read(cls, folder: Path) -> CanonicalConfig | None:
        """The configuration in a run folder; None if there is none, or none that can be read."""
        try:
            values = yaml.safe_load((folder / CONFIG_FILE).read_text())
        except (FileNotFoundError, yaml.YAMLError):
            return None
        return cls(values) if isinstance(values, dict) else None

    @property
    def is_janus(self) -> bool:
        return (self.values.get("runner") or {}).get("_target_") in _JANUS_RUNNERS

    @property
    def is_slurm(self) -> bool:
        scheduler = (self.values.get("job") or {}).get("scheduler") or {}
        return str(scheduler.get("mode")).lower() == "slurm"


def read_records(folder: Path) -> list[dict[str, Any]]:
    """The objects of `metrics.jsonl`; empty if there is none. A last line that is cut off is left out."""
    try:
        lines = (folder / METRICS_FILE).read_text().splitlines()
    except FileNotFoundError:
        return []
    records = []
    for line in lines:
        try:
            records.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return records


@dataclass(frozen=True, slots=True)
class End:
    """How training ended when it last ended without an error.

    Attributes:
        step: optimizer steps done.
        completed: whether that was as many as the job asked for.
        peak_memory_gib: of the rank that needed most.
    """

    step: int
    completed: bool
    peak_memory_gib: float


def read_end(folder: Path) -> End | None:
    """The end of a run; None if it has not ended, or ended with an error."""
    records = read_records(folder)
    if not records or "end" not in records[-1]:
        return None
    return End(step=records[-1]["step"], **records[-1]["end"])
