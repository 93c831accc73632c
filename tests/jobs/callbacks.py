"""Callbacks for jobs that tests start through the command line."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

from fairchem.core.common.distutils import get_rank
from fairchem.core.components.callbacks import StopBeforeTimeoutCallback, TrainCheckpointCallback
from torchtnt.framework.callback import Callback


class FailOnRank(Callback):
    """Fails on one rank at the start of a step: by raising inside a phase, or by dying without a word.

    Args:
        how: `phase` (the stage's forward raises) or `kill` (SIGKILL).
    """

    def __init__(self, rank: int, step: int, how: str = "phase") -> None:
        self.rank, self.step, self.how = rank, step, how

    def on_train_step_start(self, state: object, unit: object) -> None:
        if get_rank() != self.rank or unit.train_progress.num_steps_completed != self.step:  # type: ignore[attr-defined]
            return
        if self.how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)

        def fail(*args: object) -> None:
            raise ZeroDivisionError("planted by a test")

        unit.stage.forward = fail  # type: ignore[attr-defined]


class SaveAt(TrainCheckpointCallback):
    """Saves at the start of given steps and at the end, and prunes nothing.

    Args:
        steps: in place of every n-th.
    """

    def __init__(self, steps: list[int], **kwargs: int) -> None:
        super().__init__(**kwargs)
        self.steps = steps

    def on_train_step_start(self, state: object, unit: object) -> None:
        step = unit.train_progress.num_steps_completed  # type: ignore[attr-defined]
        if step in self.steps:
            save, folder = self._checkpoint_hooks()
            save(os.path.join(folder, f"step_{step}"))


class WriteEnd(Callback):
    """Writes how the training ended to a file of JSON: last loss, completed steps and epochs, steps of an epoch."""

    def __init__(self, path: str) -> None:
        self.path = Path(path)

    def on_train_end(self, state: object, unit: object) -> None:
        progress = unit.train_progress  # type: ignore[attr-defined]
        end = {
            "loss": float(unit.last_loss),  # type: ignore[attr-defined]
            "steps": progress.num_steps_completed,
            "epochs": progress.num_epochs_completed,
            "steps_per_epoch": len(state.train_state.dataloader),  # type: ignore[attr-defined]
        }
        self.path.write_text(json.dumps(end))


class StopWithSkewedClocks(StopBeforeTimeoutCallback):
    """Sees its deadline after a number of looks at the clock, one look earlier on every later rank."""

    def __init__(self, looks: int) -> None:
        self.seconds = float(get_rank())
        super().__init__(timeout_hr=1.0, stop_before_timeout_min=1.0, clock=self._tick)
        self.deadline = float(looks)

    def _tick(self) -> float:
        self.seconds += 1.0
        return self.seconds - 1.0
