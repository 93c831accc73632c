"""What a job's measured steps amount to."""

from __future__ import annotations

import statistics

import pytest
import torch

from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.memory import allocated_bytes
from fairchem_janus.engine.profile import Profile, Sample, StageProfile, StepProfiler, graph_cost, summarise
from fairchem_janus.engine.runtime import Runtime
from fairchem_janus.model.build import build_stage
from fairchem_janus.model.partition import balanced_partition
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.schedule import TRAINING_PHASES, Phase, make_schedule
from tests.builders import single_process, tiny_batch, tiny_model, tiny_tasks

FE, FF, BF, BE = Phase


def stage(times: tuple[float, ...], *, blocks: int = 2, block: float = 0.4, **other: int) -> StageProfile:
    memory = {"fe_graph_bytes": 100, "ff_graph_bytes": 40, "workspace_bytes": 0, "state_bytes": 1000}
    seconds = dict(zip(map(str, Phase), times, strict=True))
    return StageProfile(phase_seconds=seconds, block_seconds=block, num_blocks=blocks, **(memory | other))


def profile(*stages: StageProfile) -> Profile:
    sizes = {str(phase): 1e6 for phase in Phase}
    return Profile(
        device="cpu", num_steps=3, stages=list(stages), message_bytes=sizes, link_latency=1e-4, link_bandwidth=1e9
    )


def test_a_phase_costs_its_median_so_that_one_interruption_does_not_count() -> None:
    samples = [Sample(0, FE, 0, m, seconds) for m, seconds in enumerate((1.0, 1.1, 1.2, 40.0, 0.9))]
    samples += [Sample(0, FE, 1, 0, 77.0)]  # another stage
    found = summarise(samples, 0)
    assert found["phase_seconds"] == {"FE": 1.1, "FF": 0.0, "BF": 0.0, "BE": 0.0}


def test_ff_that_recomputes_fe_is_given_without_it() -> None:
    samples = [Sample(0, FE, 0, 0, 1.0), Sample(0, FF, 0, 0, 3.0)]
    assert summarise(samples, 0, recomputed=True)["phase_seconds"]["FF"] == 2.0


def test_graphs_are_those_of_the_largest_micro_batch() -> None:
    """FE leaves 100, FF 40 more; BF frees 30 of these: what BE will free is 110."""
    samples = []
    for micro_batch, scale in enumerate((1, 2)):
        for phase, left in ((FE, 100), (FF, 40), (BF, -30), (BE, -110)):
            samples.append(Sample(0, phase, 0, micro_batch, 1.0, scale * left, workspace=scale * 7))
    found = summarise(samples, 0)
    assert (found["fe_graph_bytes"], found["ff_graph_bytes"], found["workspace_bytes"]) == (220, 80, 14)


def test_costs_are_in_seconds_and_bytes() -> None:
    costs = profile(stage((1.0, 2.0, 3.0, 4.0)), stage((2.0, 2.0, 3.0, 4.0))).costs(5)
    assert (costs.num_stages, costs.num_micro_batches) == (2, 5)
    assert costs.times[FE] == (1.0, 2.0)
    assert costs.fe_graph_sizes == (100.0, 100.0)
    assert costs.transfer_time(FF, 0) == pytest.approx(1e-3)


def test_what_moves_with_a_block_and_what_stays_with_a_stage() -> None:
    """A block takes 0.4 of FE's 1.0; all phases take 10, so a block costs 4, and 2 blocks leave 2 (on stage 0: 4)."""
    measured = profile(stage((1.2, 2.4, 4.8, 3.6)), stage((1.0, 2.0, 4.0, 3.0)), stage((1.0, 2.0, 4.0, 3.0)))
    blocks, stages = measured.block_and_stage_costs()
    assert blocks == pytest.approx([4.0] * 6)
    assert stages == pytest.approx([4.0, 2.0, 2.0])
    assert balanced_partition(blocks, stages) == [2, 2, 2]


def test_a_profile_is_plain_json() -> None:
    assert profile(stage((1.0,) * 4)).to_json()["stages"][0]["phase_seconds"]["FE"] == 1.0


def test_a_graphs_cost_is_fitted_to_the_time_of_all_its_phases_on_all_stages() -> None:
    """2 ms an atom and 0.1 ms an edge, on each of two stages; every micro-batch has 5 ms of its own on top."""
    loads = {(step, index): (10 + 3 * index + step, 400 - 90 * index) for step in range(2) for index in range(3)}
    samples = [
        Sample(step, phase, stage_index, index, (5e-3 + 2e-3 * atoms + 1e-4 * edges) / 4)
        for (step, index), (atoms, edges) in loads.items()
        for stage_index in range(2)
        for phase in TRAINING_PHASES
    ]
    found = graph_cost(samples, loads)
    assert found == pytest.approx({"per_atom": 2 * 2e-3, "per_edge": 2 * 1e-4})
    assert graph_cost(samples, dict.fromkeys(loads, (10, 400))) is None


def test_profiling_measures_and_leaves_gradients_bit_identical() -> None:
    gradients = []
    for profiled in (False, True):
        built = build_stage(tiny_model(experts=2), index=0, num_stages=1)
        topology, tasks = single_process(), with_global_losses(tiny_tasks())
        buffer = GradientBuffer(built, topology)
        runtime = Runtime(built, topology, tasks, buffer)
        profiler = StepProfiler(runtime, topology, [4], lambda: 1234)
        schedule = make_schedule("wavek", num_stages=1, num_micro_batches=3)
        if profiled:
            profiler.start()
        for _ in range(2):
            batches = [tiny_batch([3, 4], first=2 * i) for i in range(3)]
            set_normalisers(tasks, batches)
            runtime.run(schedule, batches)
            if profiled:
                profiler.note(batches)
        buffer.reduce()
        gradients.append({name: p.grad for name, p in built.trainable() if p.grad is not None})
        if profiled:
            found = profiler.finish(schedule)
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])

    (measured,) = found.stages
    assert found.num_steps == 2 and measured.num_blocks == 4 and measured.state_bytes == 1234
    assert all(seconds > 0 for seconds in measured.phase_seconds.values())
    assert 0 < 4 * measured.block_seconds < 1.5 * measured.phase_seconds[FE]
    if allocated_bytes(torch.device("cpu")):
        assert measured.fe_graph_bytes > 10_000 and measured.ff_graph_bytes > 10_000
    assert not runtime.timeline.measure_memory
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in built.model.backbone.blocks)
    assert statistics.fmean(found.message_bytes.values()) > 0
    assert all(atoms == 7 and edges > 0 for atoms, edges in profiler._loads.values())
