"""`GlobalLoss` is fairchem's `DDPMTLoss` on the union of the micro-batches, however they are packed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from fairchem.core.datasets.atomic_data import AtomicData
from fairchem.core.modules.loss import DDPMTLoss, L2NormLoss, MAELoss, MSELoss, PerAtomMAELoss
from fairchem.core.units.mlip_unit.mlip_unit import compute_loss

from fairchem_janus.parallel.loss import (
    GlobalLoss,
    NonFiniteLossError,
    count_samples,
    set_normalisers,
    with_global_losses,
)
from tests.builders import DATASETS, collate, tiny_graph, tiny_tasks

EXACT = 1e-13  # relative; float64 sums of a few hundred numbers, taken in another order
CPU = torch.device("cpu")
NATOMS = torch.tensor([3, 1, 4, 2])
LOSSES = {"mae": MAELoss, "mse": MSELoss, "per_atom_mae": PerAtomMAELoss, "l2norm": L2NormLoss}

# what a prediction and its mask look like: [graphs, ...] or [atoms, ...]
SHAPES = {
    "energy": ((4, 1), (4,)),
    "stress": ((4, 9), (4, 9)),
    "forces": ((10, 3), (10,)),
    "charges": ((10, 1), (10,)),
}

FAIRCHEM_CAN = [
    *itertools.product(("mae", "mse"), ("mean", "sum"), ("energy", "stress", "charges")),
    *itertools.product(("per_atom_mae",), ("mean", "sum"), ("energy",)),
    *itertools.product(("l2norm",), ("mean", "sum", "per_structure"), ("forces",)),
]
FAIRCHEM_CANNOT = [
    case for case in itertools.product(LOSSES, ("mean", "sum", "per_structure"), SHAPES) if case not in FAIRCHEM_CAN
]


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """fairchem's `per_structure` needs the default type to be that of the loss."""
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def make_case(kind: str, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A prediction, its label and a mask with gaps; labels are NaN and infinite where the mask is not set."""
    shape, mask_shape = SHAPES[kind]
    generator = torch.Generator().manual_seed(seed)
    prediction = torch.randn(shape, generator=generator).requires_grad_()
    target = torch.randn(shape, generator=generator)
    mask = torch.rand(mask_shape, generator=generator) > 0.3
    mask[1], mask[-1] = False, True
    missing = ~mask.view(*mask_shape, *[1] * (len(shape) - len(mask_shape))).expand(shape)
    target[missing] = torch.tensor([torch.inf, torch.nan, -torch.inf]).repeat(missing.numel())[: int(missing.sum())]
    return prediction, target, mask


def with_gradient(loss: torch.Tensor, prediction: torch.Tensor) -> tuple[float, torch.Tensor]:
    (gradient,) = torch.autograd.grad(loss, prediction)
    return loss.item(), gradient


def global_loss(source: DDPMTLoss, mask: torch.Tensor, natoms: torch.Tensor) -> GlobalLoss:
    loss = GlobalLoss(source)
    loss.num_samples = max(loss.count(mask, natoms).item(), 1.0)
    return loss


@pytest.mark.parametrize(("name", "reduction", "kind"), FAIRCHEM_CAN)
def test_one_batch_gives_fairchems_loss_and_gradient(name: str, reduction: Any, kind: str) -> None:
    prediction, target, mask = make_case(kind)
    theirs = DDPMTLoss(LOSSES[name](), reduction=reduction, coefficient=7.0)
    loss, gradient = with_gradient(theirs(prediction, target, mask, NATOMS), prediction)
    ours = global_loss(theirs, mask, NATOMS)
    own_loss, own_gradient = with_gradient(ours(prediction, target, mask, NATOMS), prediction)
    assert loss != 0
    assert own_loss == pytest.approx(loss, rel=EXACT)
    torch.testing.assert_close(own_gradient, gradient, rtol=EXACT, atol=0)


@pytest.mark.parametrize(("name", "reduction", "kind"), FAIRCHEM_CANNOT)
def test_what_fairchem_cannot_do_is_never_silently_something_else(name: str, reduction: Any, kind: str) -> None:
    prediction, target, mask = make_case(kind)
    theirs = DDPMTLoss(LOSSES[name](), reduction=reduction)
    with pytest.raises((RuntimeError, AssertionError)):
        theirs(prediction, target, mask, NATOMS)
    if name in ("mae", "mse") and (reduction, kind) == ("per_structure", "charges"):
        ours = global_loss(theirs, mask, NATOMS)(prediction, target, mask, NATOMS)
        assert ours.item() == pytest.approx(mean_over_structures(theirs.loss_fn, prediction, target, mask), rel=EXACT)
        return
    with pytest.raises((RuntimeError, AssertionError, ValueError, IndexError)):
        global_loss(theirs, mask, NATOMS)(prediction, target, mask, NATOMS)


def mean_over_structures(
    loss_fn: torch.nn.Module, prediction: torch.Tensor, target: torch.Tensor, mask: torch.Tensor
) -> float:
    """The mean over labelled structures of the mean over labelled atoms, one structure after another."""
    means = []
    for values, labels, known in zip(*(x.split(NATOMS.tolist()) for x in (prediction, target, mask)), strict=True):
        if known.any():
            means.append(loss_fn(values[known], labels[known], NATOMS).mean())
    return torch.stack(means).mean().item()


@pytest.mark.parametrize("loss", [MAELoss, MSELoss])
def test_a_loss_that_keeps_the_components_of_forces_is_refused_by_name(loss: type) -> None:
    """fairchem crashes on it too, or broadcasts the mask wrongly when there are three atoms."""
    prediction = torch.zeros(3, 3)
    with pytest.raises(ValueError) as caught:
        GlobalLoss(DDPMTLoss(loss()))(prediction, prediction, torch.ones(3, dtype=torch.bool), torch.tensor([3]))
    assert f"{loss.__name__} gives a loss of shape (3, 3)" in str(caught.value)
    assert "For forces use L2NormLoss" in str(caught.value)


def test_a_label_may_have_another_shape_than_the_prediction() -> None:
    """Energies come as [G] and [G, 1]."""
    prediction, target, mask = make_case("energy")
    ours = global_loss(DDPMTLoss(PerAtomMAELoss()), mask, NATOMS)
    assert torch.equal(ours(prediction, target[:, 0], mask, NATOMS), ours(prediction, target, mask, NATOMS))


@pytest.mark.parametrize("reduction", ["mean", "per_structure"])
def test_nothing_labelled_is_a_loss_of_zero(reduction: Any) -> None:
    """With one number for a denominator, as in fairchem, and a gradient that exists."""
    prediction = torch.randn(10, 3).requires_grad_()
    mask = torch.zeros(10, dtype=torch.bool)
    ours = global_loss(DDPMTLoss(L2NormLoss(), reduction=reduction), mask, NATOMS)
    loss, gradient = with_gradient(ours(prediction, torch.full((10, 3), torch.inf), mask, NATOMS), prediction)
    assert loss == 0
    assert not gradient.any()


def test_per_structure_counts_structures_with_a_label() -> None:
    """Unlike fairchem, which leaves out a single atom whose force is exactly right."""
    target = torch.randn(10, 3)
    prediction = target + 1.0
    prediction[3] = target[3]  # the second structure, a single atom
    mask = torch.ones(10, dtype=torch.bool)
    theirs = DDPMTLoss(L2NormLoss(), reduction="per_structure")
    ours = global_loss(theirs, mask, NATOMS)
    assert ours.num_samples == 4
    error = 3**0.5
    assert ours(prediction, target, mask, NATOMS).item() == pytest.approx(error * 3 / 4, rel=EXACT)
    assert theirs(prediction, target, mask, NATOMS).item() == pytest.approx(error, rel=EXACT)


# ---------------------------------------------------------------- a loss that is not finite


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize(
    ("kind", "loss", "row", "graphs"),
    [
        ("energy", MAELoss, 2, [2]),
        ("forces", L2NormLoss, 3, [1]),
        ("forces", L2NormLoss, 8, [3]),
        ("stress", MAELoss, 0, [0]),
    ],
)
def test_a_loss_that_is_not_finite_names_its_graphs(
    kind: str, loss: type, row: int, graphs: list[int], value: float
) -> None:
    shape, mask_shape = SHAPES[kind]
    prediction = torch.zeros(shape)
    prediction[row, -1] = value
    with pytest.raises(NonFiniteLossError) as caught:
        GlobalLoss(DDPMTLoss(loss()))(prediction, torch.zeros(shape), torch.ones(mask_shape, dtype=torch.bool), NATOMS)
    assert caught.value.graphs == graphs


def test_several_graphs_are_named_once_each() -> None:
    prediction = torch.zeros(10, 3)
    prediction[[0, 1, 5]] = torch.nan
    with pytest.raises(NonFiniteLossError) as caught:
        GlobalLoss(DDPMTLoss(L2NormLoss()))(prediction, torch.zeros(10, 3), torch.ones(10, dtype=torch.bool), NATOMS)
    assert caught.value.graphs == [0, 2]


def test_a_prediction_that_is_not_finite_is_an_error_without_a_label_too() -> None:
    """0 x NaN is NaN: it would reach every parameter."""
    prediction = torch.zeros(4, 1)
    prediction[1] = torch.nan
    mask = torch.tensor([True, False, True, True])
    with pytest.raises(NonFiniteLossError) as caught:
        GlobalLoss(DDPMTLoss(MAELoss()))(prediction, torch.zeros(4, 1), mask, NATOMS)
    assert caught.value.graphs == [1]


# ---------------------------------------------------------------- tasks and whole batches

SIZES = (3, 1, 4, 2, 5, 2, 1)
PACKINGS = [
    [[0, 1, 2, 3, 4, 5, 6]],
    [[0], [1], [2], [3], [4], [5], [6]],
    [[6, 2], [5, 0, 1, 3], [4]],
    [[1, 3, 5], [0, 2, 4, 6]],
]


def labelled_graphs() -> list[tuple[int, AtomicData]]:
    """Graphs of both data sets with every kind of gap: labels missing (NaN, inf), fixed atoms, single atoms."""
    graphs = [tiny_graph(size, seed=n, dataset=DATASETS[n % 2]) for n, size in enumerate(SIZES)]
    graphs[0].omat_energy[:] = torch.nan
    graphs[2].omat_stress[0, 4] = torch.inf
    graphs[4].omat_forces[1] = torch.inf
    graphs[4].fixed[2:4] = 1
    graphs[5].fixed[:] = 1
    return list(enumerate(graphs))


def predictions_for(batch: AtomicData) -> dict[str, dict[str, torch.Tensor]]:
    """A number for every output that depends on the graph and the place in it, not on the packing."""
    number = batch["graph_numbers"].to(torch.float64)
    place = torch.cat([torch.arange(n) for n in batch["natoms"].tolist()])
    atom = torch.sin(5.0 * number.repeat_interleave(batch["natoms"]) + place)
    values = {
        "energy": torch.cos(number),
        "forces": torch.stack([atom, atom**2, atom**3], 1),
        "stress": torch.sin(number[:, None] + torch.arange(9)),
    }
    return {task.name: {task.property: values[task.property].clone().requires_grad_()} for task in tiny_tasks()}


@pytest.mark.parametrize("reduction", ["mean", "sum", "per_structure"])
@pytest.mark.parametrize("free_atoms", [True, False])
@pytest.mark.parametrize("packing", PACKINGS, ids=["one", "single", "mixed", "by-dataset"])
def test_micro_batches_sum_to_fairchems_loss_of_their_union(
    packing: list[list[int]], free_atoms: bool, reduction: Any
) -> None:
    tasks = tiny_tasks()
    for task in tasks:
        task.train_on_free_atoms = free_atoms
        if reduction != "per_structure" or task.property == "forces":
            task.loss_fn.reduction = reduction  # type: ignore[union-attr]
    graphs = labelled_graphs()
    union = collate(graphs)
    expected = compute_loss(tasks, predictions_for(union), union)

    ours = with_global_losses(tasks)
    batches = [collate([graphs[n] for n in numbers]) for numbers in packing]
    set_normalisers(ours, batches)
    parts = [compute_loss(ours, predictions_for(batch), batch) for batch in batches]
    assert all(value.item() > 0 for value in expected.values())
    for name, value in expected.items():
        assert sum(part[name].item() for part in parts) == pytest.approx(value.item(), rel=EXACT), name


def test_samples_are_counted_from_the_labels_alone() -> None:
    tasks = with_global_losses(tiny_tasks())
    counts = dict(zip([task.name for task in tasks], count_samples(tasks, [collate(labelled_graphs())]), strict=True))
    # omat: graphs of 3, 4, 5, 1 atoms, one energy and one stress component missing, one atom unlabelled, two fixed
    assert counts["omat_energy"] == 3
    assert counts["omat_stress"] == 4 * 9 - 1
    assert counts["omat_forces"] == 3 + 4 + (5 - 1 - 2) + 1
    # omol: graphs of 1, 2, 2 atoms, the last one held fixed
    assert counts["omol_energy"] == 3
    assert counts["omol_forces"] == 1 + 2


def test_the_tasks_handed_in_keep_their_own_losses() -> None:
    tasks = tiny_tasks()
    ours = with_global_losses(tasks)
    assert all(type(task.loss_fn) is DDPMTLoss for task in tasks)
    for before, after in zip(tasks, ours, strict=True):
        assert isinstance(after.loss_fn, GlobalLoss)
        assert (after.name, after.datasets, after.normalizer) == (before.name, before.datasets, before.normalizer)


def test_a_loss_of_another_class_is_refused_by_name() -> None:
    tasks = tiny_tasks()
    tasks[1].loss_fn = L2NormLoss()
    with pytest.raises(
        ValueError,
        match=r"task 'omat_forces' has a loss of type L2NormLoss; janus .* fairchem.core.modules.loss.DDPMTLoss only",
    ):
        with_global_losses(tasks)
