"""Ends every rank soon after one of them failed.

A rank that is blocked inside a collective cannot run Python: neither an exception elsewhere nor a SIGTERM handler
reaches it, so a job with one failed rank would wait for the process group's timeout (30 minutes by default) or for the
launcher's SIGKILL. A small thread on each rank watches two things and calls `os._exit`:

- a note in the job's key-value store, written by the rank that fails first;
- SIGTERM and Ctrl-C, through `signal.set_wakeup_fd`, which the C handler serves even while Python is blocked. Not under
  SLURM: there SIGTERM is a first warning, after which a job may go on (submitit bypasses it), and SLURM itself sees to
  the end.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
import time

import torch.distributed as dist

EXIT_CODE = 1
POLL_SECONDS = 0.5
GRACE_SECONDS = 5.0
"""Time for a rank's own error message, or its own clean ending, before it is ended from outside."""
SIGNAL_GRACE_SECONDS = 25.0
"""Time to stop before the next step and save (`interrupt.py`); torch's launcher waits 30 seconds, then kills."""

_KEY = "janus/first_failure"


class FailureWatch:
    """Watches over one rank of a job; use one a process, `start` to `stop`."""

    def __init__(self, rank: int, store: dist.Store | None, *, alone: bool = False) -> None:
        self.rank = rank
        self.alone = alone  # a single rank leaves nobody waiting: its process may go on (a notebook, a test)
        self._store = store
        self._ending_signals = {signal.SIGTERM} if alone else {signal.SIGTERM, signal.SIGINT}
        if os.environ.get("SUBMITIT_EXECUTOR") == "slurm":
            self._ending_signals = set()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None
        self._wakeup: socket.socket | None = None
        self._previous_fd = -1

    @property
    def shared_store(self) -> dist.Store | None:
        """The job's key-value store; None for a rank that is alone."""
        return None if self.alone else self._store

    @classmethod
    def of_world(cls) -> FailureWatch:
        """A watch on the default process group's store."""
        if not dist.is_initialized():
            return cls(0, None, alone=True)
        store = dist.distributed_c10d._get_default_store()
        return cls(dist.get_rank(), store, alone=dist.get_world_size() == 1)

    def start(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        reader.setblocking(False)
        self._wakeup = writer
        if threading.current_thread() is threading.main_thread():
            self._previous_fd = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, args=(reader,), name="janus-watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End watching: the run is over."""
        self._done.set()
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._wakeup is not None:
            if threading.current_thread() is threading.main_thread():
                signal.set_wakeup_fd(self._previous_fd)
            self._wakeup.close()
            self._wakeup = None

    def report(self, error: BaseException) -> None:
        """Announce this rank's error; the first one a job reports is printed, later ones are consequences of it."""
        text = f"{type(error).__name__}: {error}"
        own = first = f"{self.rank}|{text}"
        if self._store is not None:
            first = self._store.compare_set(_KEY, "", own).decode()
        if first == own:
            rule = "=" * 100
            logging.error("\n%s\nfairchem-janus: rank %d failed, ending all ranks\n%s\n%s", rule, self.rank, text, rule)
        sys.stderr.flush()
        if self.alone:
            self.stop()
            return
        threading.Thread(target=_exit_after, args=(2 * GRACE_SECONDS,), daemon=True).start()

    def _watch(self, reader: socket.socket) -> None:
        store = self._store.clone() if self._store is not None else None
        while not self._done.is_set():
            if select.select([reader], [], [], POLL_SECONDS)[0]:
                received = self._ending_signals.intersection(reader.recv(64))
                if received:
                    self._end(signal.Signals(min(received)).name, SIGNAL_GRACE_SECONDS)
            try:
                failed = store is not None and store.check([_KEY])
            except Exception:  # the store's host is gone: the job is ending
                failed = False
            if failed and store is not None:
                self._end(f"rank {store.get(_KEY).decode().partition('|')[0]} failed", GRACE_SECONDS)
        reader.close()

    def _end(self, reason: str, grace: float) -> None:
        deadline = time.monotonic() + grace
        while time.monotonic() < deadline:
            if self._done.wait(POLL_SECONDS):
                return
        print(f"fairchem-janus: rank {self.rank} ends because of: {reason}", file=sys.stderr, flush=True)
        os._exit(EXIT_CODE)


def _forget_wakeup_fd() -> None:
    """A process forked off, a loader's worker, must not report its own signals as its rank's."""
    if threading.current_thread() is threading.main_thread():
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_forget_wakeup_fd)


def _exit_after(seconds: float) -> None:
    time.sleep(seconds)
    os._exit(EXIT_CODE)
