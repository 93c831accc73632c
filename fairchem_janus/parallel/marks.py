"""Moments on the device's own clock.

On the CPU a mark is `time.perf_counter`. On CUDA kernels run after the host has gone on, and waiting for a message
makes the stream wait, not the host, so a mark is an event in the stream, read only after the step, when the host has
waited for the device anyway.
"""

from __future__ import annotations

import time
from typing import Any

import torch

Mark = Any
"""A moment: a float on the CPU, a `torch.cuda.Event` on CUDA."""


def mark(device: torch.device) -> Mark:
    """Now."""
    if device.type == "cuda":
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event
    return time.perf_counter()


def seconds(start: Mark, end: Mark) -> float:
    """Time between two marks; on CUDA this waits until the device has passed them."""
    if isinstance(start, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000.0
