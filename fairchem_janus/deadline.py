"""fairchem's `StopBeforeTimeoutCallback` on one clock for all ranks.

In fairchem each rank looks at its own clock, before and after each step. If the deadline falls between the looks of two
ranks, one stops and saves while the other starts a step, and both wait for each other until the process group gives up.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from fairchem.core.components.callbacks import StopBeforeTimeoutCallback


def follow_first_rank(callback: StopBeforeTimeoutCallback, device: torch.device) -> None:
    """Let the callback go by the clock and the deadline of rank 0; every rank must call this, and use it alike."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    own_clock = callback.clock

    def from_first(value: float) -> float:
        shared = torch.tensor([value], dtype=torch.float64, device=device)
        dist.broadcast(shared, src=0)
        return float(shared.item())

    callback.deadline = from_first(callback.deadline)
    callback.clock = lambda: from_first(own_clock())
