"""The random generators of a rank: Python's, NumPy's, and torch's on the CPU and on this rank's device.

The engine's own draws are keyed by step and graph and need none of these; data sets, transforms and callbacks of a job
may.

A checkpoint is written when the step's batch has been fetched and not yet used, and a resumed run fetches it again. So
what is saved is the state before that batch was fetched, and it is restored at the same place::

    before_batch()   fetch batch 7   [checkpoint]   batch_in_use()   step 7
"""

from __future__ import annotations

import logging
import pickle
import random
from typing import Any

import numpy as np
import torch


class RandomState:
    """Follows the generators of this process.

    Args:
        device: where torch draws, besides the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._before_batch: dict[str, Any] | None = None
        self._to_restore: dict[str, Any] | None = None

    def before_batch(self) -> None:
        """Call before a batch is fetched."""
        if self._to_restore is not None:
            self._restore(self._to_restore)
            self._to_restore = None
        self._before_batch = self._read()

    def batch_in_use(self) -> None:
        """Call when a step begins: what it draws is not drawn again by a run that resumes after it."""
        self._before_batch = None

    def state(self) -> bytes:
        """To be saved."""
        return pickle.dumps(self._before_batch or self._to_restore or self._read())

    def load(self, state: bytes) -> None:
        """To be in force from the next batch on."""
        self._to_restore = pickle.loads(state)

    def _read(self) -> dict[str, Any]:
        state = {
            "python": random.getstate(),
            "numpy": np.random.get_state(),  # noqa: NPY002 - fairchem seeds this one
            "torch": torch.get_rng_state(),
        }
        if self.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state(self.device)
        return state

    def _restore(self, state: dict[str, Any]) -> None:
        random.setstate(state["python"])
        np.random.set_state(state["numpy"])  # noqa: NPY002
        torch.set_rng_state(state["torch"])
        if self.device.type == "cuda" and "cuda" in state:
            torch.cuda.set_rng_state(state["cuda"], self.device)


def key_of(rank: int) -> str:
    """Under which name a rank's state is saved."""
    return f"rank{rank}"


def log_moved_states(num_saved: int, num_ranks: int) -> None:
    """Say what happens to random states when the number of ranks has changed: a rank that did not exist takes that of
    its number modulo theirs. It may be another rank's: fairchem, too, starts all ranks from one seed."""
    if 0 < num_saved < num_ranks:
        logging.info(
            f"the checkpoint has random states of {num_saved} rank(s); ranks from {num_saved} on take that of their "
            f"number modulo {num_saved}"
        )
    elif num_saved > num_ranks:
        logging.info(f"the checkpoint has random states of {num_saved} ranks; those from {num_ranks} on are not used")
