"""NaN and Inf: found where they enter, named by graph, never turned into zeros.

fairchem masks labels that are not finite and zeroes losses that are not. Here each of labels, predictions, losses and
gradients is checked, and a bad value either ends the job with the names of the graphs (`janus.on_nan: error`) or makes
every rank leave the step out (`skip`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from fairchem.core.units.mlip_unit.mlip_unit import Task


@dataclass(frozen=True, slots=True)
class BadSample:
    """A graph with a value that is not finite.

    Attributes:
        phase: where it was found: `label TASK`, `forward`, `loss` or `gradients`.
        graph: its name, data set and row.
    """

    phase: str
    graph: str


class NonFiniteError(FloatingPointError):
    """Something is NaN or infinite; the text names phase and graphs."""

    def __init__(self, samples: Sequence[BadSample]) -> None:
        self.samples = list(samples)
        phases = ", ".join(dict.fromkeys(sample.phase for sample in samples))
        graphs = list(dict.fromkeys(sample.graph for sample in samples))
        shown = ", ".join(graphs[:8]) + (f" and {len(graphs) - 8} more" if len(graphs) > 8 else "")
        super().__init__(
            f"NaN or Inf in {phases} of {shown}. Remove or mend these graphs, lower the learning rate if it is the "
            "forward or the gradients, or set +runner.janus.on_nan=skip to leave such steps out"
        )


def graph_names(data: Any, graphs: Sequence[int]) -> list[str]:
    """Names of some graphs of a batch."""
    ids = data.get("graph_ids", None)
    return [ids[graph] if ids is not None else f"graph {graph} of the micro-batch" for graph in graphs]


def graphs_with_bad_rows(values: torch.Tensor, data: Any) -> list[int]:
    """Graphs whose rows of `values` ([num_graphs, ...] or [num_atoms, ...]) are not all finite."""
    bad = ~torch.isfinite(values.detach()).reshape(values.shape[0], -1).all(1)
    if not bool(bad.any()):
        return []
    if values.shape[0] == data["natoms"].shape[0]:
        return bad.nonzero().view(-1).tolist()
    owner = torch.arange(len(data["natoms"]), device=bad.device).repeat_interleave(data["natoms"])
    return owner[bad].unique().tolist()


def bad_labels(tasks: Sequence[Task], data: Any) -> list[BadSample]:
    """Graphs that belong to a task's data set but have a label that is not finite.

    Labels of other data sets' tasks are filled in with infinity by fairchem's collater and do not count.
    """
    found = []
    for task in tasks:
        for graph in graphs_with_bad_rows(data[task.name], data):
            if data.dataset[graph] in task.datasets:
                found.append(BadSample(f"label {task.name}", *graph_names(data, [graph])))
    return found
