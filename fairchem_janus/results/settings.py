"""The settings in which runs differ, as few columns as say it.

A canonical configuration is resolved, so one override shows in many places: `steps=10` is `runner.max_steps` and the
learning-rate schedule's `steps`. Keys that differ between the runs in the same way are one column, under the shortest
of their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

IGNORED = (
    "job.run_dir",
    "job.run_name",
    "job.timestamp_id",
    "job.metadata",
    "job.runner_state_path",
    "runner.train_eval_unit.job_config",
    "runner.callbacks",
)
"""They tell runs apart without being settings that figures depend on."""

FIRST = ("runner.janus", "runner.train_eval_unit.optimizer_fn", "job.scheduler", "job.graph_parallel.group_size")
"""Settings under these come first where there is not room for all."""

MISSING = ""


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """Leaves by their dotted path, numbers for places in a list.

    >>> flatten({"a": {"b": [1, 2]}, "c": {}})
    {'a.b.0': 1, 'a.b.1': 2}
    """
    leaves: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if path in IGNORED:
            return
        if isinstance(node, Mapping):
            items = list(node.items())
        elif isinstance(node, Sequence) and not isinstance(node, str):
            items = list(enumerate(node))
        else:
            leaves[path] = node
            return
        for key, child in items:
            walk(child, f"{path}.{key}" if path else str(key))

    walk(config, "")
    return leaves


def differing(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Short name -> the value of every run, for the keys whose values differ; "" where a run has no such key.

    >>> differing([{"runner.max_steps": 1, "x.lr": 2, "x.steps": 1}, {"runner.max_steps": 5, "x.lr": 2, "x.steps": 5}])
    {'steps': [1, 5]}

    Args:
        runs: each run's settings by dotted path.
    """
    keys = list(dict.fromkeys(key for run in runs for key in run))
    alike: dict[str, list[str]] = {}
    for key in keys:
        values = [run.get(key, MISSING) for run in runs]
        if any(value != values[0] for value in values):
            alike.setdefault(repr(values), []).append(key)
    chosen = [min(group, key=lambda key: (key.count("."), len(key))) for group in alike.values()]
    chosen = sorted((key for key in chosen if key == "runner._target_" or not key.endswith("_target_")), key=_rank)
    columns = {}
    for key, name in zip(chosen, _short_names(chosen), strict=True):
        columns[name] = [run.get(key, MISSING) for run in runs]
    return columns


def _rank(key: str) -> int:
    return next((place for place, prefix in enumerate(FIRST) if key.startswith(prefix)), len(FIRST))


def _short_names(keys: Sequence[str]) -> list[str]:
    """The shortest ends of dotted paths that still tell them apart; a number alone is no name."""
    names = []
    for key in keys:
        parts = key.split(".")
        for length in range(1, len(parts) + 1):
            name = ".".join(parts[-length:])
            alone = sum(other == name or other.endswith(f".{name}") for other in keys) == 1
            if alone and not parts[-length].isdigit():
                break
        names.append(name)
    return names
