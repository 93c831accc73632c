"""The figures of one run."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fairchem_janus.results.checkpoints import latest_checkpoint, num_steps
from fairchem_janus.results.folder import (
    FINAL_CHECKPOINT,
    STATE_FILE,
    CanonicalConfig,
    End,
    is_locked,
    read_end,
    read_records,
)
from fairchem_janus.results.settings import flatten

STEP_FIGURES = {
    "seconds_per_step": "seconds_per_step",
    "atoms_per_second": "atoms_per_second(approx)",
    "samples_per_second": "samples_per_second(approx)",
    "bubble": "bubble",
}
"""Figure -> its name in `metrics.jsonl`; medians over the steps are taken."""

LOSS_SHARE = 10
"""The training loss is the mean over the last tenth of the reported steps: one step's loss says little."""


@dataclass(frozen=True, slots=True)
class RunSummary:
    """What one run gave; None where its folder does not tell.

    Attributes:
        folder: the run folder.
        status: `finished`, `unfinished`, or what a sweep noted (`failed`, ...).
        step: optimizer steps done, as far as reported; without any report, those of the last checkpoint.
        loss: training loss, mean over the last tenth of the reported steps.
        val_loss: of the last evaluation.
        seconds_per_step, atoms_per_second, samples_per_second, bubble: medians over the reported steps without the
            first one after each start, which warms up.
        memory_gib: peak of the rank that needed most.
        metrics: all of the last evaluation, under fairchem's names.
        error: of a failed member of a sweep.
        overrides: of a member of a sweep; key -> value.
        config: settings by dotted path.
    """

    folder: Path
    status: str
    step: int | None = None
    loss: float | None = None
    val_loss: float | None = None
    seconds_per_step: float | None = None
    atoms_per_second: float | None = None
    samples_per_second: float | None = None
    bubble: float | None = None
    memory_gib: float | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    error: str | None = None
    overrides: Mapping[str, str] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)


def summarize(folder: Path) -> RunSummary:
    """Read what there is in a run folder."""
    records, end = read_records(folder), read_end(folder)
    config = CanonicalConfig.read(folder)
    noted = _sweep_notes(folder)
    steps = _latest_attempts(records)
    evaluations = [record["eval"] for record in records if "eval" in record]
    metrics = evaluations[-1] if evaluations else {}
    overrides = noted.get("overrides")
    return RunSummary(
        folder=folder,
        status=_status(folder, completed=end.completed if end else None, noted=noted.get("status"), records=records),
        step=_steps_done(folder, end, steps),
        loss=_mean([record["loss"] for record in steps[-max(1, len(steps) // LOSS_SHARE) :]]),
        val_loss=metrics.get("val/loss"),
        **_medians(records),
        memory_gib=end.peak_memory_gib if end else None,
        metrics=metrics,
        error=noted.get("error"),
        overrides=None if overrides is None else dict(_split(override) for override in overrides),
        config=flatten(config.values) if config else {},
    )


def _steps_done(folder: Path, end: End | None, steps: Sequence[dict[str, Any]]) -> int | None:
    if end is not None:
        return end.step
    if steps:
        return steps[-1]["step"] + 1
    checkpoint = latest_checkpoint(folder)
    return None if checkpoint is None else num_steps(checkpoint)


def _split(override: str) -> tuple[str, str]:
    key, _, value = override.partition("=")
    return key.lstrip("+"), value


def _sweep_notes(folder: Path) -> dict[str, Any]:
    try:
        return json.loads((folder / STATE_FILE).read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return {}


def _status(folder: Path, *, completed: bool | None, noted: str | None, records: list[dict[str, Any]]) -> str:
    if completed and noted != "failed":
        return "finished"
    if noted == "running" and not is_locked(folder):
        return "interrupted"  # its sweep was killed, and it with it
    if noted:
        return noted
    if not records and (folder / FINAL_CHECKPOINT / ".metadata").exists():
        return "finished"
    return "unfinished"


def _latest_attempts(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The step records in order of their steps; of a step taken again after a resumption, the later one."""
    steps = {record["step"]: record for record in records if "loss" in record}
    return [steps[step] for step in sorted(steps)]


def _medians(records: Sequence[dict[str, Any]]) -> dict[str, float | None]:
    steps = [record for record in records if "loss" in record]
    starts = {0} | {i for i in range(1, len(steps)) if steps[i]["step"] <= steps[i - 1]["step"]}
    measured = [record for i, record in enumerate(steps) if i not in starts] or steps
    if not measured:
        return dict.fromkeys(STEP_FIGURES)
    return {name: statistics.median(record[key] for record in measured) for name, key in STEP_FIGURES.items()}


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None
