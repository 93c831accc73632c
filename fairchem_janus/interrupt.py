"""SIGTERM and Ctrl-C in LOCAL mode: every rank stops before the same step, the run is saved, the ranks end.

fairchem's own handler acts on each rank by itself, in the middle of a step: it links the last checkpoint (all ranks
race for the link) and leaves the others inside a collective. Here a signal is only noted. At the start of a step a rank
that has noted one announces the next step as the one before which everybody stops::

    rank 0   step 7              step 8               | stop, save
    rank 1   step 7  signal ->   announces 9, step 8  | stop, save

That is the same step for all: each step ends with a sum over the whole world, so no rank starts step 9 before rank 1
has taken part in step 8, and the announcement came earlier.

If that takes too long (torch's launcher kills its ranks 30 seconds after the signal), `FailureWatch` ends them and the
last checkpoint is what there is to resume from.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import torch.distributed as dist
from fairchem.core.common import distutils
from fairchem.core.components.train.train_runner import get_most_recent_viable_checkpoint_path
from fairchem.core.units.mlip_unit.mlip_unit import UNIT_RESUME_CONFIG
from torchtnt.framework import State, TrainUnit
from torchtnt.framework.callback import Callback

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopOnSignal(Callback):
    """Ends training with a saved state; the last callback of a run.

    Args:
        save: saves the run in a folder; returns whether it is there. Called on all ranks.
        location: fairchem's `job.metadata.preemption_checkpoint_dir`.
        store: what the ranks agree through; None for one that is alone.
    """

    def __init__(self, save: Callable[[str], bool], location: str, store: dist.Store | None) -> None:
        self.save, self.location, self.store = save, location, store
        self.received: signal.Signals | None = None
        self._key = f"janus/stop/{location}"
        self._process = os.getpid()

    @contextmanager
    def installed(self) -> Iterator[None]:
        """Take both signals; what handled them before is put back at the end."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = [(number, signal.signal(number, self._note)) for number in SIGNALS]
        try:
            yield
        finally:
            for number, handler in previous:
                signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            self.received = signal.Signals(number)
        elif number == signal.SIGTERM:
            os._exit(1)  # a loader's worker, which has inherited this handler; Ctrl-C is for its rank to act on

    def on_train_step_start(self, state: State, unit: TrainUnit) -> None:
        step = unit.train_progress.num_steps_completed
        if not self._stops_before(step):
            return
        received = self.received or signal.SIGTERM  # this rank may know from another one
        first = distutils.is_master()
        if first:
            logging.info(f"{received.name}: stopping before step {step}, saving to {self.location}")
        if self.save(self.location) and first:
            link_resume_config(self.location)
            logging.info(f"saved; go on with: fairchem -c {os.path.join(self.location, UNIT_RESUME_CONFIG)}")
        distutils.cleanup()
        sys.exit(128 + received)  # not fairchem's 0: with that, torch's launcher keeps a rank until it kills it

    def _stops_before(self, step: int) -> bool:
        if self.store is None:
            return self.received is not None
        if self.received is not None:
            return step >= int(self.store.compare_set(self._key, "", str(step + 1)))
        return self.store.check([self._key]) and step >= int(self.store.get(self._key))


def link_last_checkpoint(checkpoint_dir: str, link: str) -> bool:
    """Make `link` lead to the youngest complete checkpoint; for one rank. Returns whether there is one.

    fairchem's `TrainEvalRunner.save_state` does this for SLURM's preemption. Here it also works a second time, when the
    youngest may be that link itself, and where a folder is in its place.
    """
    last = get_most_recent_viable_checkpoint_path(checkpoint_dir)
    if last is None:
        logging.info("There is no complete checkpoint yet: a run that resumes starts from scratch")
        return False
    last = os.path.realpath(last)
    if last != os.path.realpath(link):
        if os.path.isdir(link) and not os.path.islink(link):
            shutil.rmtree(link)
        elif os.path.lexists(link):
            os.unlink(link)
        os.symlink(last, link)
    logging.info(f"A run that resumes uses {last}, to which {link} leads")
    return True


def link_resume_config(location: str) -> None:
    """The name by which fairchem's LOCAL mode calls the job that goes on from a preempted state."""
    link = os.path.join(location, "resume_config.yaml")
    if not os.path.lexists(link):
        os.symlink(UNIT_RESUME_CONFIG, link)
