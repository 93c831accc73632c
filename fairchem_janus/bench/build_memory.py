"""Host memory that building a model takes: whole, and each stage of a pipeline (Linux).

Every build runs in a process of its own that has imported everything; its peak is counted from there.
"""

from __future__ import annotations

import gc
import multiprocessing
import re
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch

from fairchem_janus.bench.workload import Size
from fairchem_janus.model.build import build_stage
from fairchem_janus.model.frugal import only_blocks
from fairchem_janus.model.partition import partition_blocks


@dataclass(frozen=True, slots=True)
class Peak:
    """Of one build.

    Attributes:
        peak_bytes: the most memory while it was built, above that before.
        parameter_bytes: of what is left.
    """

    peak_bytes: int
    parameter_bytes: int


def build_peak(*, num_blocks: int, num_stages: int, channels: int, experts: int) -> list[Peak]:
    """The whole model, and then each stage."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["fairchem_janus.bench.build_memory"])
    size = Size(blocks=num_blocks, lmax=2, channels=channels, experts=experts)
    with ProcessPoolExecutor(1, mp_context=context, max_tasks_per_child=1) as pool:
        return [pool.submit(_build, size, num_stages, index).result() for index in (None, *range(num_stages))]


def _build(size: Size, num_stages: int, index: int | None) -> Peak:
    torch.set_num_threads(1)
    Size(blocks=1, lmax=size.lmax, channels=8, experts=1).build()  # what is loaded on first use
    gc.collect()
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM, the peak, back to the present
    keep = (
        nullcontext() if index is None else only_blocks(size.blocks, partition_blocks(size.blocks, num_stages)[index])
    )
    with keep:
        model = size.build()
    if index is not None:
        build_stage(model, index=index, num_stages=num_stages)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    return Peak(_status("VmHWM") - before, parameters)


def _status(name: str) -> int:
    """A memory figure of this process in bytes."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024
