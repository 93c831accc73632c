"""What a rank notes about a step: when it worked, and what it left allocated."""

from __future__ import annotations

import time

import pytest
import torch

from fairchem_janus.engine.memory import allocated_bytes, tensor_bytes
from fairchem_janus.engine.timeline import Timeline
from fairchem_janus.schedule import Action, Phase

CPU = torch.device("cpu")
FE0, FF0 = Action(Phase.FE, 0, 0), Action(Phase.FF, 0, 0)

MALLOC_OVERHEAD = 4096
"""Bytes around a tensor: its header, alignment, and what Python allocates meanwhile."""

knows_memory = pytest.mark.skipif(allocated_bytes(CPU) == 0, reason="this C library does not count what it gives out")


def test_waiting_for_inputs_is_not_work() -> None:
    timeline = Timeline(CPU)
    timeline.begin()
    with timeline.action(FE0):
        time.sleep(0.05)  # waits for a message
        timeline.inputs_arrived()
        time.sleep(0.02)
    with timeline.action(FF0):
        time.sleep(0.01)
    first, second = timeline.spans()
    assert (first.action, second.action) == (FE0, FF0)
    assert 0.05 <= first.start < first.end <= second.start
    assert timeline.busy() == pytest.approx(sum(span.end - span.start for span in (first, second)))
    assert 0.03 <= timeline.busy() <= timeline.elapsed() < second.end - 0.04


def test_a_step_starts_afresh() -> None:
    timeline = Timeline(CPU)
    timeline.begin()
    with timeline.action(FE0):
        pass
    timeline.begin()
    assert timeline.spans() == [] and timeline.busy() == timeline.elapsed() == 0.0


def test_an_action_that_fails_is_not_part_of_the_step() -> None:
    timeline = Timeline(CPU)
    timeline.begin()
    with pytest.raises(RuntimeError), timeline.action(FE0):
        raise RuntimeError
    assert timeline.spans() == []


@knows_memory
def test_bytes_that_an_action_leaves_are_counted_on_request() -> None:
    timeline = Timeline(CPU)
    kept = []
    for measure in (False, True):
        timeline.measure_memory = measure
        timeline.begin()
        with timeline.action(FE0):
            kept.append(torch.zeros(1_000_000))
            torch.zeros(2_000_000)  # is gone again
        with timeline.action(FF0):
            kept.clear()
        made, freed = timeline.spans()
        if measure:
            assert made.left == pytest.approx(4_000_000, abs=MALLOC_OVERHEAD)
            assert freed.left == pytest.approx(-4_000_000, abs=MALLOC_OVERHEAD)
        else:
            assert made.left == freed.left == 0


def test_storage_that_tensors_share_counts_once() -> None:
    flat = torch.zeros(10)
    assert tensor_bytes([flat[:5], flat[5:], None, torch.zeros(3, dtype=torch.float64), "no tensor"]) == 40 + 24


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_on_cuda_the_device_s_time_is_counted_not_the_host_s() -> None:
    timeline = Timeline(torch.device("cuda"))
    timeline.measure_memory = True
    a = torch.randn(4096, 4096, device="cuda")
    timeline.begin()
    with timeline.action(FE0):
        for _ in range(20):
            b = a @ a
    (span,) = timeline.spans()
    assert span.left == b.untyped_storage().nbytes() and span.workspace >= 0
    assert timeline.busy() > 1e-3
