"""Draws keyed by graph: the same for a graph in any packing, statistically random, and harmless where nothing draws."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from fairchem_janus.model.randomness import (
    Draws,
    KeyedDropout,
    _splitmix,
    combine_keys,
    edge_roll,
    graph_keys,
    install_keyed_draws,
    keyed_uniform,
    step_roll_phase,
)
from fairchem_janus.prepare import key_batches
from tests.builders import DATASETS, collate, tiny_graph, tiny_model

EXACT = 1e-12  # float64; matrix products of other shapes are summed in another order
SIZES = (3, 4, 1, 5, 2)
PACKINGS = [[[0, 1, 2, 3, 4]], [[0], [1], [2], [3], [4]], [[4, 3], [1, 2, 0]]]


# fairchem's MoLE backbone opens a figure for its statistics
pytestmark = pytest.mark.filterwarnings("ignore:More than 20 figures")


def keyed_model(**settings: Any) -> nn.Module:
    model = tiny_model(num_layers=1, **settings)
    install_keyed_draws(model.backbone)
    return model


def graph(number: int) -> tuple[int, Any]:
    return number, tiny_graph(SIZES[number], seed=number, dataset=DATASETS[number % 2])


def run(model: nn.Module, packing: list[list[int]], *, step: int | None = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Energy [num_graphs] and expert mixing coefficients [num_graphs, num_experts] of each graph, by its number."""
    energies, coefficients = {}, {}
    for numbers in packing:
        batch = collate([graph(number) for number in numbers], step=step)
        out = model(batch)
        energy = torch.where(batch.omat_energy.isfinite(), out["omat_energy"]["energy"], out["omol_energy"]["energy"])
        mixing = model.backbone.global_mole_tensors.expert_mixing_coefficients
        for number, own_energy, row in zip(numbers, energy.detach(), mixing.detach(), strict=True):
            energies[number], coefficients[number] = own_energy, row
    order = range(len(SIZES))
    return torch.stack([energies[n] for n in order]), torch.stack([coefficients[n] for n in order])


# ---------------------------------------------------------------- dropout

DROPOUTS = [{"moe_dropout": 0.4}, {"composition_dropout": 0.5}, {"moe_dropout": 0.3, "composition_dropout": 0.3}]


@pytest.mark.parametrize("dropouts", DROPOUTS, ids=lambda d: "+".join(d))
def test_a_graph_draws_the_same_masks_in_any_packing_and_order(dropouts: dict[str, float]) -> None:
    model = keyed_model(experts=4, **dropouts)
    energies, coefficients = run(model, PACKINGS[0])
    for packing in PACKINGS[1:]:
        torch.manual_seed(1)  # whatever the global generator holds
        other_energies, other_coefficients = run(model, packing)
        torch.testing.assert_close(other_coefficients, coefficients, rtol=EXACT, atol=EXACT)
        torch.testing.assert_close(other_energies, energies, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("dropouts", DROPOUTS, ids=lambda d: "+".join(d))
def test_another_step_draws_other_masks(dropouts: dict[str, float]) -> None:
    model = keyed_model(experts=4, **dropouts)
    (_, first), (_, second) = (run(model, PACKINGS[0], step=step) for step in (0, 1))
    assert (first - second).abs().max() > 1e-3


@pytest.mark.parametrize("off", ["without keys", "in evaluation"])
def test_nothing_is_dropped(off: str) -> None:
    keyed, plain = (make(experts=4) for make in (keyed_model, lambda **kw: tiny_model(num_layers=1, **kw)))
    dropping = keyed_model(experts=4, moe_dropout=0.5, composition_dropout=0.5)
    if off == "in evaluation":
        dropping.eval()
    step = None if off == "without keys" else 0
    for model in (keyed, dropping):
        _, coefficients = run(model, PACKINGS[0], step=step)
        torch.testing.assert_close(coefficients, run(plain, PACKINGS[0])[1], rtol=EXACT, atol=EXACT)


def test_dropout_keeps_the_given_share_and_the_mean() -> None:
    draws = Draws()
    dropout = KeyedDropout(0.3, draws).train()
    draws.graph_keys = graph_keys(torch.arange(2000), combine_keys(0, 0))
    out = dropout(torch.ones(2000, 32))
    assert sorted(out.unique().tolist()) == pytest.approx([0.0, 1 / 0.7])
    # 64,000 draws: standard deviations 0.002 and 0.003 of the mean
    assert (out == 0).double().mean().item() == pytest.approx(0.3, abs=0.01)
    assert out.mean().item() == pytest.approx(1.0, abs=0.015)


def test_composition_dropout_takes_atoms_away_at_the_given_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    backbone = keyed_model(experts=2, composition_dropout=0.25).backbone
    kept = []

    def embed(atomic_numbers: torch.Tensor) -> torch.Tensor:
        kept.append(len(atomic_numbers))
        return torch.ones(len(atomic_numbers), backbone.sphere_channels)

    monkeypatch.setattr(backbone.composition_embedding, "forward", embed)
    backbone.to(torch.float32)
    numbers, batch = torch.full((8000,), 6), torch.arange(400).repeat_interleave(20)
    backbone.draws.graph_keys = graph_keys(torch.arange(400), combine_keys(0, 0))
    backbone.set_MOLE_coefficients(numbers, batch, torch.zeros(400, backbone.sphere_channels))
    assert kept[0] / 8000 == pytest.approx(0.75, abs=0.02)  # standard deviation 0.005


# ---------------------------------------------------------------- the numbers themselves


def test_keyed_numbers_are_uniform_and_uncorrelated() -> None:
    keys = graph_keys(torch.arange(400), combine_keys(7, 3))
    x = keyed_uniform(keys[:, None], torch.arange(400)[None, :])
    assert x.dtype == torch.float64
    assert x.min() >= 0
    assert x.max() < 1
    counts = torch.histc(x, bins=20, min=0.0, max=1.0)
    chi_squared = ((counts - 8000) ** 2 / 8000).sum().item()
    assert chi_squared < 43.8  # 19 degrees of freedom: exceeded once in 1,000 random trials
    centred = x - 0.5
    for shifted in (centred.roll(1, 0), centred.roll(1, 1)):  # neighbouring graphs, neighbouring counters
        correlation = (centred * shifted).mean().item() * 12
        assert abs(correlation) < 0.01  # standard deviation 0.0025


def test_keys_differ_between_seeds_steps_and_graphs() -> None:
    keys = [
        key
        for seed in range(3)
        for step in range(20)
        for key in graph_keys(torch.arange(50), combine_keys(seed, step)).tolist()
    ]
    assert len(set(keys)) == len(keys) == 3 * 20 * 50
    assert combine_keys(1, 2) != combine_keys(2, 1)


def test_the_hash_is_splitmix64() -> None:
    """First numbers of the published generator (https://prng.di.unimi.it/splitmix64.c) from the state 1234567."""
    golden = 0x9E3779B97F4A7C15 - 2**64
    states = torch.tensor([1234567, 1234567 + golden])
    assert [value % 2**64 for value in _splitmix(states).tolist()] == [6457827717110365317, 3203168211198807973]


def test_a_batch_is_keyed_by_its_graphs_numbers_not_their_places() -> None:
    one, other = collate([graph(0), graph(3)], step=None), collate([graph(3), graph(1), graph(0)], step=None)
    key_batches([one, other], seed=5, step=2)
    assert one["graph_keys"].tolist() == [other["graph_keys"][2].item(), other["graph_keys"][0].item()]
    assert one["roll_phase"] == other["roll_phase"] == step_roll_phase(5, 2)


# ---------------------------------------------------------------- roll


def test_the_roll_is_smooth_in_the_edge_vector_and_detached() -> None:
    edges = torch.randn(50, 3, dtype=torch.float64).requires_grad_()
    roll = edge_roll(edges, 0.25)
    assert roll.shape == (50,)
    assert not roll.requires_grad
    nudge = 1e-9 * torch.randn(50, 3, dtype=torch.float64)
    # at most 7 rad/A along any direction
    assert (edge_roll(edges + nudge, 0.25) - roll).abs().max() < 7 * nudge.norm(dim=1).max()
    assert torch.allclose(edge_roll(edges, 1.25), roll + 1.0)


def test_neighbouring_edges_get_unrelated_rolls() -> None:
    """Uniform over the circle: the first moment of 20,000 of them is zero to about 1/sqrt(20,000)."""
    roll = edge_roll(2.0 * torch.randn(20_000, 3, generator=torch.Generator().manual_seed(0)), 0.0).double()
    assert roll.cos().mean().abs() < 0.03
    assert roll.sin().mean().abs() < 0.03


def test_the_phase_of_a_step_is_an_angle_of_its_own() -> None:
    phases = [step_roll_phase(seed, step) for seed in range(3) for step in range(30)]
    assert len(set(phases)) == 90
    assert all(0 <= phase < 6.2832 for phase in phases)
    assert max(phases) > 6
    assert min(phases) < 0.3


@pytest.mark.parametrize("quaternion", [True, False])
def test_a_gated_model_does_not_depend_on_the_roll(quaternion: bool) -> None:
    """fairchem draws it at random; the keyed one must be a rotation about the edge like any other."""
    keyed, plain = (make(experts=2, use_quaternion_wigner=quaternion) for make in (keyed_model, plain_model))
    batch = [graph(n) for n in range(3)]
    ours, theirs = keyed(collate(batch)), plain(collate(batch))
    for name in ("omat_energy", "omat_forces", "omat_stress"):
        prop = name.removeprefix("omat_")
        torch.testing.assert_close(ours[name][prop], theirs[name][prop], rtol=1e-10, atol=1e-11)


def plain_model(**settings: Any) -> nn.Module:
    return tiny_model(num_layers=1, **settings)


def test_a_grid_activation_gives_the_same_numbers_for_the_same_rolls() -> None:
    """There results do depend on the roll, and fairchem's own change from call to call."""
    settings = {"experts": 2, "act_type": "s2"}
    keyed, plain = keyed_model(**settings), plain_model(**settings)
    energies = [run(keyed, packing)[0] for packing in PACKINGS]
    for other in energies[1:]:
        torch.testing.assert_close(other, energies[0], rtol=EXACT, atol=EXACT)
    first, second = (run(plain, PACKINGS[0])[0] for _ in range(2))
    assert (first - second).abs().max() > EXACT


@pytest.mark.parametrize(
    ("moe_type", "independent"), [("so2", True), ("so2m0", True), ("all", False), ("notso2", False)]
)
def test_a_graphs_energy_depends_on_its_batch_where_experts_act_on_atoms(moe_type: str, independent: bool) -> None:
    """fairchem deals weights out by numbers of edges, to atoms too: why `checks.py` refuses those types."""
    model = keyed_model(experts=2, moe_type=moe_type)
    difference = (run(model, PACKINGS[1])[0] - run(model, PACKINGS[0])[0]).abs().max()
    assert (difference < EXACT) == independent


# ---------------------------------------------------------------- the model around it


def test_parameters_and_their_names_stay() -> None:
    plain, keyed = plain_model(experts=2, moe_dropout=0.1), keyed_model(experts=2, moe_dropout=0.1)
    assert [name for name, _ in keyed.named_parameters()] == [name for name, _ in plain.named_parameters()]
    assert keyed.state_dict().keys() == plain.state_dict().keys()


def test_a_deep_copy_keeps_draws_of_its_own() -> None:
    """As `AveragedModel` makes one: evaluation must not read the training model's keys, nor write them."""
    model = keyed_model(experts=2, moe_dropout=0.5)
    duplicate = copy.deepcopy(model).backbone
    original = model.backbone
    assert duplicate.draws is not original.draws
    assert duplicate.mole_dropout.draws is duplicate.draws
    assert original.mole_dropout.draws is original.draws
    original.draws.graph_keys = torch.tensor([1])
    assert duplicate.draws.graph_keys is None
    x = torch.ones(1, 2)
    assert torch.equal(duplicate.mole_dropout(x), x)


def test_a_forward_leaves_no_keys_behind() -> None:
    model = keyed_model(experts=2, moe_dropout=0.5)
    run(model, PACKINGS[0])
    assert model.backbone.draws.graph_keys is None
