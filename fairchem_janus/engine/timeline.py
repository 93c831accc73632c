"""When each action of a step ran on this rank: two marks an action, always on.

A span starts when the action's inputs are there and ends when its result is on its way, so waiting is what lies between
spans.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from fairchem_janus.engine.memory import allocated_bytes
from fairchem_janus.parallel.marks import Mark, mark, seconds
from fairchem_janus.schedule import Action


class Span(NamedTuple):
    """One action on this rank; times in seconds from the step's start here.

    Attributes:
        left: bytes that the action left allocated on top of what was (negative if it freed more), where measured.
        workspace: bytes that it had allocated in between on top of that, where measured (CUDA).
    """

    action: Action
    start: float
    end: float
    left: int = 0
    workspace: int = 0


class Timeline:
    """The step that ran last.

    Attributes:
        measure_memory: also note allocated bytes.
        mark: gives the moment that it is now.
        began: wall-clock time of the step's start (`time.time`), by which spans of several ranks can be aligned.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.mark: Callable[[], Mark] = functools.partial(mark, device)
        self.measure_memory = False
        self.began = 0.0
        self._origin: Mark = None
        self._start: Mark = None
        self._before = 0
        self._marks: list[tuple[Action, Mark, Mark, int, int]] = []

    def begin(self) -> None:
        """Forget the last step; a new one starts now."""
        self._marks = []
        self._origin, self.began = self.mark(), time.time()

    @contextmanager
    def action(self, action: Action) -> Iterator[None]:
        """Around all of an action, the wait for its inputs included."""
        self.inputs_arrived()
        yield
        left = workspace = 0
        if self.measure_memory:
            after = allocated_bytes(self.device)
            left = after - self._before
            if self.device.type == "cuda":
                workspace = torch.cuda.max_memory_allocated(self.device) - max(after, self._before)
        self._marks.append((action, self._start, self.mark(), left, workspace))

    def inputs_arrived(self) -> None:
        """The action that runs now has waited until here."""
        if self.measure_memory:
            self._before = allocated_bytes(self.device)
            if self.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats(self.device)
        self._start = self.mark()

    def spans(self) -> list[Span]:
        """The actions in the order in which they ran."""
        return [
            Span(action, seconds(self._origin, start), seconds(self._origin, end), left, workspace)
            for action, start, end, left, workspace in self._marks
        ]

    def busy(self) -> float:
        """Seconds in which this rank worked."""
        return sum(seconds(start, end) for _, start, end, _, _ in self._marks)

    def elapsed(self) -> float:
        """Seconds from the first action's start to the last one's end."""
        return seconds(self._marks[0][1], self._marks[-1][2]) if self._marks else 0.0
