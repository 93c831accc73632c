"""How fast a message goes from one stage to the next: ping-pong between neighbours, some milliseconds in all."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist

from fairchem_janus.parallel.topology import Topology

REPEATS = 5


def measure_link(topology: Topology, num_bytes: int) -> tuple[float, float] | None:
    """(latency in s, bandwidth in bytes/s) from this rank to the next stage; None on the last stage.

    All ranks of a replica must call this, between steps. Latency is the time of a one-byte message, bandwidth follows
    from what `num_bytes` take on top of it; both are the best of a few tries.
    """
    grid, link = topology.grid, None
    if grid.p > 0:
        for size in (1, num_bytes):
            _ping_pong(topology, grid.rank_at(p=grid.p - 1), size, first=False)
    if grid.p < grid.P - 1:
        peer = grid.rank_at(p=grid.p + 1)
        latency, large = (_ping_pong(topology, peer, size, first=True) for size in (1, num_bytes))
        link = latency, num_bytes / max(large - latency, 1e-9)
    return link


def _ping_pong(topology: Topology, peer: int, num_bytes: int, *, first: bool) -> float:
    """Seconds of one way, the best of `REPEATS` after one to warm up; `first` sends down and receives the answer."""
    buffer = torch.zeros(num_bytes, dtype=torch.uint8, device=topology.device)
    times = []
    for _ in range(REPEATS + 1):
        started = time.perf_counter()
        if first:
            dist.send(buffer, dst=peer, group=topology.down_group)
            dist.recv(buffer, src=peer, group=topology.up_group)
        else:
            dist.recv(buffer, src=peer, group=topology.down_group)
            dist.send(buffer, dst=peer, group=topology.up_group)
        if topology.device.type == "cuda":
            torch.cuda.synchronize(topology.device)
        times.append((time.perf_counter() - started) / 2)
    return min(times[1:])
