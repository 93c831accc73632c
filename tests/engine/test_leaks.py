"""No micro-batch leaves anything alive: neither contexts nor autograd graphs nor tensors, step after step."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from fairchem_janus.engine.context import MicroBatch
from fairchem_janus.engine.gate import pass_gate
from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.engine.runtime import Runtime
from fairchem_janus.model.build import build_stage
from fairchem_janus.parallel.loss import set_normalisers, with_global_losses
from fairchem_janus.schedule import evaluation_schedule, make_schedule
from tests.builders import LocalPipeline, saved_tensors, single_process, tiny_batch, tiny_model, tiny_tasks

STEPS, MICRO_BATCHES = 20, 3
WARM_UP = 2
"""Steps in which lazily made things (optimizer state, gradient views) appear."""

MODELS: dict[str, dict[str, Any]] = {
    "dense": {"num_layers": 2},
    "mole": {"num_layers": 2, "experts": 2, "moe_dropout": 0.1},
    "mole-checkpointing": {"num_layers": 2, "experts": 2, "activation_checkpointing": True},
}


@pytest.fixture(autouse=True)
def without_gc() -> Iterator[None]:
    """What only the collector would free counts as alive; what was there before does not count."""
    gc.collect()
    gc.freeze()
    gc.disable()
    yield
    gc.enable()
    gc.unfreeze()


def live(kind: type) -> int:
    return sum(count for found, count in Counter(map(type, gc.get_objects())).items() if issubclass(found, kind))


def batches(step: int) -> list[Any]:
    """Other graphs, and other sizes, in every step."""
    sizes = [[2 + step % 3, 3], [4], [1, 2, 1 + step % 2]]
    return [tiny_batch(own, first=10 * step + 3 * i, step=step) for i, own in enumerate(sizes)]


class Trainer:
    """Optimizer steps of one process on the real runtime."""

    def __init__(self, split: str, model: dict[str, Any], schedule: str = "wavek") -> None:
        topology = single_process()
        stage = build_stage(tiny_model(**model), index=0, num_stages=1)
        self.tasks = with_global_losses(tiny_tasks())
        self.buffer = GradientBuffer(stage, topology)
        self.runtime = Runtime(stage, topology, self.tasks, self.buffer, split=split)
        self.optimizer = torch.optim.AdamW(stage.model.parameters(), lr=1e-3)
        self.schedule = make_schedule(schedule, num_stages=1, num_micro_batches=MICRO_BATCHES)

    def step(self, step: int) -> float:
        data = batches(step)
        set_normalisers(self.tasks, data)
        result = self.runtime.run(self.schedule, data)
        self.buffer.reduce()
        self.optimizer.step()
        self.buffer.zero()
        return float(result.losses.sum())


def assert_flat(counts: list[int]) -> None:
    assert max(counts[WARM_UP:]) == min(counts[WARM_UP:]), counts


@pytest.mark.parametrize(
    ("kind", "split", "schedule", "steps"),
    [
        ("dense", "merged", "wavek", STEPS),
        ("mole", "merged", "gpipe_2nd", STEPS),  # all micro-batches in flight at once
        ("mole", "eager", "wavek", 6),
        ("mole-checkpointing", "merged", "gpipe_2nd", 6),
    ],
)
def test_training_steps_leave_nothing_alive(kind: str, split: str, schedule: str, steps: int) -> None:
    trainer = Trainer(split, MODELS[kind], schedule)
    tensors = []
    with saved_tensors() as saved:
        for step in range(steps):
            assert trainer.step(step) > 0
            assert live(MicroBatch) == 0
            assert len(saved) == 0  # every autograd graph is gone, in C++ too
            tensors.append(live(torch.Tensor))
    assert_flat(tensors)


def test_evaluation_leaves_nothing_alive() -> None:
    stage = build_stage(tiny_model(**MODELS["mole"]).eval(), index=0, num_stages=1)
    tasks = with_global_losses(tiny_tasks())
    runtime = Runtime(stage, single_process(), tasks, None)
    tensors = []
    with saved_tensors() as saved, torch.no_grad():
        for step in range(STEPS):
            data = batches(step)
            set_normalisers(tasks, data)
            result = runtime.run(evaluation_schedule(1, MICRO_BATCHES), data)
            assert sorted(result.gates) == list(range(MICRO_BATCHES))
            del result, data
            assert live(MicroBatch) == 0
            assert len(saved) == 0
            tensors.append(live(torch.Tensor))
    assert_flat(tensors)


@pytest.mark.parametrize("split", ["merged", "eager"])
def test_stages_in_the_middle_leave_nothing_alive_either(split: str) -> None:
    pipeline = LocalPipeline(3, split=split, **(MODELS["mole"] | {"num_layers": 3}))
    tensors = []
    with saved_tensors() as saved:
        for step in range(5):
            pipeline.step(lambda: batches(step))  # noqa: B023
            assert live(MicroBatch) == 0
            assert len(saved) == 0
            tensors.append(live(torch.Tensor))
    assert_flat(tensors)


def test_a_micro_batch_keeps_its_graph_from_its_first_phase_to_its_last() -> None:
    """The other way round: the counts above would notice what stays."""
    pipeline = LocalPipeline(1, **MODELS["dense"])
    (phases,) = pipeline.phases
    with saved_tensors() as saved:
        data = batches(0)
        set_normalisers(pipeline.tasks, data)
        micro_batch, _ = phases.energy_forward(0, data[0], [])
        assert live(MicroBatch) == 1
        after_energy = len(saved)
        phases.force_forward(micro_batch, [])
        assert len(saved) > after_energy > 100
        del micro_batch
        assert (live(MicroBatch), len(saved)) == (0, 0)


@pytest.mark.parametrize("split", ["merged", "eager"])
def test_the_graph_of_the_forces_goes_with_bf_and_that_of_the_energies_with_be(split: str) -> None:
    """What a schedule's caps on live graphs, and its memory, rely on."""
    pipeline = LocalPipeline(1, split=split, **MODELS["dense"])
    (phases,) = pipeline.phases
    with saved_tensors() as saved:
        data = batches(0)
        set_normalisers(pipeline.tasks, data)
        micro_batch, _ = phases.energy_forward(0, data[0], [])
        energy_graph = len(saved)
        message = phases.force_forward(micro_batch, [])
        gate = pass_gate(phases.stage, pipeline.tasks, data[0], message, training=True)
        assert len(saved) > energy_graph
        phases.backward_of_force(micro_batch, gate.cotangents)
        assert len(saved) == energy_graph
        phases.backward_of_energy(micro_batch, [])
        assert len(saved) == 0
