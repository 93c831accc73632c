"""What is counted as training state and as graphs, on both sides alike."""

from __future__ import annotations

import torch

from fairchem_janus.bench.memory import MemoryCase, WatchedRuntime, run_plain
from fairchem_janus.bench.workload import make_batches, make_tasks
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.model.build import build_stage
from fairchem_janus.parallel.loss import with_global_losses
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.schedule import make_schedule
from tests.bench.test_one_process import TINY

CASE = MemoryCase(size=TINY, changes={}, atoms=4, num_stages=1)


def test_training_state_is_five_times_the_parameters() -> None:
    """Parameters, gradients, two moments, the average; and AdamW's step counts, one number a tensor."""
    states, _ = run_plain(CASE)
    parameters = sum(p.numel() * 4 for p in TINY.build().parameters())
    assert states["parameters"] == states["gradients"] == states["moving average"] == parameters
    assert states["optimizer"] == 2 * parameters + 4 * len(list(TINY.build().parameters()))


def test_one_micro_batch_on_one_stage_keeps_what_plain_fairchem_does() -> None:
    """Within a few percent: the pipeline also has the gate's small tensors, fairchem the loss's."""
    _, plain = run_plain(CASE)
    topology = Topology(Grid(D=1, P=1, G=1, rank=0), torch.device("cpu"))
    stage = build_stage(TINY.build(), index=0, num_stages=1)
    runtime = WatchedRuntime(stage, topology, with_global_losses(make_tasks()), GradientBuffer(stage, topology))
    found = {}
    for N in (1, 3):
        schedule = make_schedule("gpipe_2nd", num_stages=1, num_micro_batches=N)
        found[N] = runtime.watched(schedule, make_batches(N, atoms=4)).at_phase_ends
    assert 0.95 < found[1] / plain.at_phase_ends < 1.05
    assert 2.8 < found[3] / found[1] < 3.1
    assert runtime.live.total == 0
