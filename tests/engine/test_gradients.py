"""Gradients of a step: what the phases accumulate is fairchem's gradient; it is summed, measured and clipped once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from fairchem.core.datasets.atomic_data import AtomicData
from fairchem.core.units.mlip_unit.mlip_unit import Task
from torch import nn

from fairchem_janus.engine.gradients import GradientBuffer
from fairchem_janus.parallel.topology import Grid, Topology
from tests.builders import (
    DATASETS,
    EFS_HEAD,
    MOE_HEAD,
    LocalPipeline,
    collate,
    head_config,
    plain_gradients,
    single_process,
    tiny_graph,
    tiny_tasks,
)

pytestmark = pytest.mark.filterwarnings("ignore:More than 20 figures")  # fairchem's, for statistics of experts

TOLERANCE = 1e-10  # relative to the largest entry of the tensor; summation order alone leaves about 1e-14

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mole": {"experts": 4},
    "mole-dropout": {"experts": 4, "moe_dropout": 0.3, "composition_dropout": 0.3},
    "mole-everywhere": {"experts": 2, "moe_type": "all"},
    "mole-checkpointing": {"experts": 4, "activation_checkpointing": True},
    "mean-head": {"heads": {"efs": {"module": EFS_HEAD, "reduce": "mean", "prefix": "omat"}}},
    "head-of-experts": {"heads": head_config(MOE_HEAD)},
    "grid-activation": {"experts": 2, "ff_type": "grid", "act_type": "s2", "norm_type": "layer_norm_sh"},
    "balanced-channels": {"charge_balanced_channels": [0, 1], "spin_balanced_channels": [2]},
    "frozen-embeddings": {"cs_emb_grad": False, "dataset_emb_grad": False},
    "no-dataset-embedding": {"use_dataset_embedding": False, "dataset_mapping": None},
    "position-embedding": {"chg_spin_emb_type": "pos_emb"},
    "euler-angles": {"use_quaternion_wigner": False, "experts": 2},
    "narrow-edges": {"mmax": 1},
    "forces": {"regress_stress": False},
    "energies": {"regress_stress": False, "regress_forces": False, "experts": 2},
    "frozen-backbone": {"freeze_backbone": True},
    "experts-in-one-layer": {"experts": 2, "layers_moe": [1]},
    "no-composition": {"experts": 2, "use_composition_embedding": False},
}

SIZES = (3, 1, 4, 2, 5)
PACKING = [[4, 1], [0, 3, 2]]
CASES = [(kind, 3, "merged") for kind in MODELS] + [
    *((kind, stages, "merged") for kind in ("dense", "mole-dropout") for stages in (1, 2, 4)),
    *((kind, 3, "eager") for kind in ("dense", "mole-dropout", "mole-checkpointing", "balanced-channels")),
]


def graphs(kind: str) -> list[tuple[int, AtomicData]]:
    names = ["omat"] * 2 if kind == "mean-head" else DATASETS
    return [(n, tiny_graph(size, seed=n, dataset=names[n % 2])) for n, size in enumerate(SIZES)]


def tasks_of(kind: str) -> list[Task]:
    """Those whose property the model predicts; the plain head knows one data set."""
    model = {"regress_forces": True, "regress_stress": True, **MODELS[kind]}
    properties = ["energy", *(name for name in ("forces", "stress") if model[f"regress_{name}"])]
    datasets = ["omat"] if kind == "mean-head" else list(DATASETS)
    return [task for task in tiny_tasks() if task.property in properties and task.datasets[0] in datasets]


def assert_same(ours: dict[str, torch.Tensor], reference: dict[str, torch.Tensor]) -> None:
    """A parameter that nothing reached has no gradient on either side."""
    floor = 1e-8 * max(gradient.abs().max().item() for gradient in reference.values())
    assert {name for name, g in ours.items() if g.any()} == {name for name, g in reference.items() if g.any()}
    for name in ours.keys() & reference.keys():
        scale = max(reference[name].abs().max().item(), floor)
        assert (ours[name] - reference[name]).abs().max().item() <= TOLERANCE * scale, name


@pytest.mark.parametrize(("kind", "num_stages", "split"), CASES)
def test_gradients_equal_plain_fairchem_on_the_union(kind: str, num_stages: int, split: str) -> None:
    """Through every phase and message, for every option of the model."""
    packing = [list(range(len(SIZES)))] if kind == "mole-everywhere" else PACKING  # the rest: two in flight at once
    pipeline = LocalPipeline(num_stages, split=split, tasks=tasks_of(kind), **MODELS[kind])
    results = pipeline.step(lambda: [collate([graphs(kind)[n] for n in numbers]) for numbers in packing])
    loss, reference = plain_gradients(collate(graphs(kind)), tasks=tasks_of(kind), **MODELS[kind])
    assert sum(result.losses.sum().item() for result in results) == pytest.approx(loss, rel=TOLERANCE)
    assert_same(pipeline.gradients(), reference)


# ---------------------------------------------------------------- the buffer


class FakeStage:
    """A stage with the given trainable parameters."""

    def __init__(self, **parameters: torch.Tensor) -> None:
        self.parameters = {name: nn.Parameter(value) for name, value in parameters.items()}

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return [(name.replace("__", "."), p) for name, p in self.parameters.items() if p.requires_grad]


def make_buffer(topology: Topology | None = None, **parameters: torch.Tensor) -> GradientBuffer:
    return GradientBuffer(FakeStage(**parameters), topology or single_process())  # type: ignore[arg-type]


def stage_rank(*, P: int = 1, D: int = 1, rank: int = 0) -> Topology:
    return Topology(Grid(D=D, P=P, G=1, rank=rank), torch.device("cpu"))


def test_contributions_add_up_and_none_adds_nothing() -> None:
    buffer = make_buffer(a=torch.zeros(2), b=torch.zeros(1, 3), c=torch.zeros(()))
    buffer.add([torch.ones(2), None, torch.tensor(5.0)])
    buffer.add([2 * torch.ones(2), torch.ones(1, 3), None])
    buffer.reduce()
    assert [p.grad.tolist() for p in buffer.parameters] == [[3, 3], [[1, 1, 1]], 5]  # type: ignore[union-attr]


def test_a_parameter_that_nothing_reached_has_no_gradient() -> None:
    """As in a plain backward: an optimizer with momentum or weight decay must leave it alone."""
    buffer = make_buffer(a=torch.zeros(2), b=torch.zeros(2), c=torch.zeros(2))
    buffer.add([None, torch.ones(2), torch.zeros(2)])
    buffer.reduce()
    a, b, c = buffer.parameters
    assert a.grad is None
    assert b.grad is not None
    assert c.grad is not None  # reached, and zero


def test_two_parameters_that_are_handed_one_tensor_do_not_share_it() -> None:
    buffer = make_buffer(a=torch.zeros(2), b=torch.zeros(2))
    shared = torch.ones(2)
    buffer.add([shared, shared])
    buffer.add([torch.ones(2), None])
    buffer.reduce()
    assert [p.grad.tolist() for p in buffer.parameters] == [[2, 2], [1, 1]]  # type: ignore[union-attr]
    assert shared.tolist() == [1, 1]


def test_zeroing_starts_the_next_step_afresh() -> None:
    buffer = make_buffer(a=torch.zeros(2), b=torch.zeros(2))
    buffer.add([torch.ones(2), torch.ones(2)])
    buffer.reduce()
    buffer.zero()
    assert [p.grad for p in buffer.parameters] == [None, None]
    buffer.add([torch.ones(2), None])
    buffer.reduce()
    a, b = buffer.parameters
    assert a.grad is not None
    assert a.grad.tolist() == [1, 1]
    assert b.grad is None


def test_replicated_parameters_come_after_a_stages_own_and_frozen_ones_not_at_all() -> None:
    stage = FakeStage(
        backbone__source_embedding__weight=torch.zeros(1), a=torch.zeros(2), frozen=torch.zeros(3), b=torch.zeros(4)
    )
    stage.parameters["frozen"].requires_grad_(False)
    buffer = GradientBuffer(stage, single_process())  # type: ignore[arg-type]
    assert [p.numel() for p in buffer.parameters] == [2, 4, 1]


def test_gradients_must_be_as_many_as_parameters() -> None:
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        make_buffer(a=torch.zeros(2), b=torch.zeros(2)).add([torch.zeros(2)])


def test_parameters_of_two_types_are_refused() -> None:
    with pytest.raises(ValueError, match=r"must be of one type, found \['torch\.float32', 'torch\.float64'\]"):
        make_buffer(a=torch.zeros(2), b=torch.zeros(2, dtype=torch.float64))


def test_a_stage_with_nothing_to_train_has_nothing_to_do() -> None:
    buffer = make_buffer()
    buffer.add([])
    buffer.reduce()
    assert buffer.squared_norm() == 0.0
    buffer.clip(1.0, 0.5)
    buffer.zero()


# ---------------------------------------------------------------- norm and clipping


def filled(topology: Topology) -> GradientBuffer:
    """A stage's own parameter with gradient norm 5 and a replicated one with norm 12."""
    buffer = make_buffer(topology, own=torch.zeros(2), backbone__target_embedding__weight=torch.zeros(3))
    buffer.add([torch.tensor([3.0, 4.0]), torch.tensor([12.0, 0.0, 0.0])])
    buffer.reduce()
    return buffer


def test_the_squared_norm_over_the_world_counts_every_parameter_once() -> None:
    """Own parameters on each of two stages, replicated ones once, each on the first replica alone."""
    parts = [filled(stage_rank(P=2, D=2, rank=rank)).squared_norm() for rank in range(4)]
    assert parts == [pytest.approx(5.0**2 + 12.0**2), pytest.approx(5.0**2), 0.0, 0.0]


@pytest.mark.parametrize("max_norm", [0.5, 13.0, 1000.0])
def test_clipping_is_torchs(max_norm: float) -> None:
    buffer = filled(single_process())
    twins = [nn.Parameter(torch.zeros_like(p)) for p in buffer.parameters]
    for twin, parameter in zip(twins, buffer.parameters, strict=True):
        assert parameter.grad is not None
        twin.grad = parameter.grad.clone()
    total = torch.nn.utils.clip_grad_norm_(twins, max_norm)
    assert buffer.squared_norm() ** 0.5 == pytest.approx(total.item())
    buffer.clip(total.item(), max_norm)
    for twin, parameter in zip(twins, buffer.parameters, strict=True):
        torch.testing.assert_close(parameter.grad, twin.grad, rtol=1e-6, atol=0)  # float32
