"""Runs a function on several local ranks, for commands and tests that need a small world of their own.

Ranks are forked from a server process that has imported fairchem once, which saves its import (5 to 20 s) for every
rank and run; the server itself computes nothing, so forking it is safe.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from fairchem.core.common import distutils

PRELOAD = ["fairchem_janus.unit"]


class RankError(RuntimeError):
    """A rank failed; the text holds its traceback."""


def run_on_ranks(
    function: Callable[..., Any], *args: Any, world_size: int, device_type: str = "cpu", timeout_seconds: float = 600.0
) -> list[Any]:
    """Call `function(*args)` on `world_size` ranks, each with torch.distributed initialised; returns their results.

    Raises:
        RankError: a rank raised, died, or the time ran out. The others are ended.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    payload = pickle.dumps((function, args))  # by plain pickle: torch's own would share memory through file handles
    with tempfile.TemporaryDirectory() as folder:
        receivers, processes = [], []
        for rank in range(world_size):
            receiver, sender = context.Pipe(duplex=False)
            spec = (payload, rank, world_size, device_type, f"file://{folder}/store", timeout_seconds)
            process = context.Process(target=_rank_main, args=(sender, *spec))  # no daemon: loaders have workers
            process.start()
            sender.close()
            receivers.append(receiver)
            processes.append(process)
        try:
            return _collect(receivers, timeout_seconds)
        finally:
            for process in processes:
                process.join(timeout=2)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(receivers: list[Connection], timeout_seconds: float) -> list[Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(results) < len(receivers):
        open_ends: list[Any] = [r for rank, r in enumerate(receivers) if rank not in results]
        ready = wait(open_ends, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            missing = [rank for rank in range(len(receivers)) if rank not in results]
            raise RankError(f"ranks {missing} did not finish within {timeout_seconds:.0f} s")
        for end in ready:
            rank = receivers.index(end)  # type: ignore[arg-type]
            try:
                ok, value = pickle.loads(receivers[rank].recv_bytes())
            except EOFError:
                raise RankError(f"rank {rank} died without a message") from None
            if not ok:
                raise RankError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(receivers))]


def _send(sender: Connection, ok: bool, value: Any) -> None:
    """Send by plain pickle: torch's own reduction would share memory that ends with this process."""
    sender.send_bytes(pickle.dumps((ok, value)))


def _rank_main(
    sender: Connection,
    payload: bytes,
    rank: int,
    world_size: int,
    device_type: str,
    init_method: str,
    timeout_seconds: float,
) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world_size))
    if device_type == "cpu":
        torch.set_num_threads(1)
    try:
        function, args = pickle.loads(payload)
        distutils.assign_device_for_local_rank(device_type == "cpu", rank)
        dist.init_process_group(
            backend="gloo" if device_type == "cpu" else "nccl",
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_seconds),
        )
        _send(sender, True, function(*args))
        dist.destroy_process_group()
    except BaseException:
        _send(sender, False, traceback.format_exc())
    finally:
        sender.close()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)
