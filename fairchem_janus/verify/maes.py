"""Mean absolute errors of a training step's own predictions, before the update."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from typing import Any

from fairchem.core.units.mlip_unit.mlip_unit import Task, compute_metrics

Sums = dict[str, tuple[float, int]]
"""Task -> (sum of absolute errors, number of labels); eV, eV/A, eV/A^3."""


def absolute_errors(tasks: Sequence[Task], predicted: Iterable[tuple[dict[str, Any], Any]]) -> Sums:
    """Sums over (prediction dictionary, batch) pairs, with fairchem's own metric."""
    sums: Sums = {task.name: (0.0, 0) for task in tasks}
    for predictions, batch in predicted:
        for task in tasks:
            only_mae = Task(**{f.name: getattr(task, f.name) for f in fields(Task)} | {"metrics": ["mae"]})
            found = compute_metrics(only_mae, predictions, batch)["mae"]
            total, count = sums[task.name]
            sums[task.name] = (total + float(found.total), count + int(found.numel))
    return sums


def add_sums(a: Sums, b: Sums) -> Sums:
    return {name: (a[name][0] + b[name][0], a[name][1] + b[name][1]) for name in a}
