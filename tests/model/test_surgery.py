"""Cutting a model into stages: names, weights, and what the stages compute together are the unsplit model's."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from fairchem.core.datasets.atomic_data import AtomicData
from torch import nn

from fairchem_janus.engine.phases import Phases
from fairchem_janus.model.build import belongs_to, build_stage
from fairchem_janus.model.heads import Given
from fairchem_janus.model.partition import partition_blocks
from fairchem_janus.model.randomness import install_keyed_draws
from fairchem_janus.model.stage import ModelShape, Stage, StageOutput, is_replicated
from fairchem_janus.model.surgery import REPLICATED, Inlet, Skip
from tests.builders import EFS_HEAD, MOE_HEAD, SINGLE_HEAD, head_config, tiny_batch, tiny_model

# fairchem's MoLE backbone opens a figure for its statistics
pytestmark = pytest.mark.filterwarnings("ignore:More than 20 figures")

EXACT = 1e-12  # float64; the same operations, so round-off at most

MODELS: dict[str, dict[str, Any]] = {
    "dense": {},
    "mole": {"experts": 4},
    "frozen-embeddings": {"cs_emb_grad": False, "dataset_emb_grad": False},
    "no-dataset-embedding": {"use_dataset_embedding": False, "dataset_mapping": None},
    "position-embeddings": {"chg_spin_emb_type": "pos_emb"},
    "grid": {"experts": 2, "ff_type": "grid", "act_type": "s2", "norm_type": "layer_norm_sh"},
    "mole-everywhere": {"experts": 2, "moe_type": "all"},
    "head-of-experts": {"heads": head_config(MOE_HEAD)},
    "balanced": {"charge_balanced_channels": [0, 1], "spin_balanced_channels": [2]},
}

CASES = [(kind, 3) for kind in MODELS] + [(kind, stages) for kind in ("dense", "mole") for stages in (1, 2, 4)]
cases = pytest.mark.parametrize(("kind", "num_stages"), CASES)


def cut(kind: str, num_stages: int) -> list[Stage]:
    return [build_stage(tiny_model(**MODELS[kind]), index=i, num_stages=num_stages) for i in range(num_stages)]


def run_chain(stages: list[Stage], sizes: list[int]) -> tuple[list[AtomicData], list[StageOutput]]:
    """FE over all stages in one process; each has its own copy of the batch, as ranks have."""
    batches, outputs = [], []
    h, root = None, []
    for stage in stages:
        batches.append(tiny_batch(sizes))
        with stage.mole_state(None):
            outputs.append(stage.forward(batches[-1], h, root))
        h, root = outputs[-1].out, outputs[-1].root
    return batches, outputs


# ---------------------------------------------------------------- names and weights


@cases
def test_stages_hold_every_parameter_of_the_unsplit_model_once_under_its_name(kind: str, num_stages: int) -> None:
    unsplit = dict(tiny_model(**MODELS[kind]).named_parameters())
    held: Counter[str] = Counter()
    for stage in cut(kind, num_stages):
        parameters = dict(stage.model.named_parameters())
        held.update(parameters.keys())
        for name, value in parameters.items():
            assert torch.equal(value, unsplit[name]), name  # initial weights are the single-process run's
            assert value.requires_grad == unsplit[name].requires_grad
    assert held == {name: num_stages if is_replicated(name) else 1 for name in unsplit}


@pytest.mark.parametrize("kind", MODELS)
def test_names_of_a_stage_keep_the_unsplit_order(kind: str) -> None:
    order = [name for name, _ in tiny_model(**MODELS[kind]).named_parameters()]
    for stage in cut(kind, 3):
        names = [name for name, _ in stage.model.named_parameters()]
        assert names == [name for name in order if name in set(names)]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_each_part_is_where_the_picture_shows_it(num_stages: int) -> None:
    stages = cut("mole", num_stages)
    ranges = partition_blocks(4, num_stages)
    for index, stage in enumerate(stages):
        names = {name for name, _ in stage.model.named_parameters()}
        assert stage.blocks == ranges[index]
        assert {int(name.split(".")[2]) for name in names if ".blocks." in name} == set(ranges[index])
        assert any(name.startswith("output_heads") for name in names) == stage.is_last
        assert any(name.startswith("backbone.norm.") for name in names) == stage.is_last
        for part in ("sphere_embedding", "routing_mlp", "edge_degree_embedding", "mix_csd", "composition_embedding"):
            assert any(name.startswith(f"backbone.{part}") for name in names) == stage.is_first
        assert all(any(name.startswith(prefix) for name in names) for prefix in REPLICATED)


def test_blocks_before_a_stage_are_skipped_and_the_last_of_them_lets_the_embedding_in() -> None:
    kinds_of = [[type(block) for block in stage.model.backbone.blocks] for stage in cut("dense", 4)]
    own = {type(block) for block in tiny_model().backbone.blocks}.pop()
    assert kinds_of == [
        [own, Skip, Skip, Skip],
        [Inlet, own, Skip, Skip],
        [Skip, Inlet, own, Skip],
        [Skip, Skip, Inlet, own],
    ]


def test_the_shape_of_messages_is_read_from_the_model() -> None:
    assert ModelShape.of(tiny_model(experts=3).backbone) == ModelShape(9, 8, 3, forces=True, stress=True)
    energies = tiny_model(regress_forces=False, regress_stress=False, lmax=1, mmax=1, sphere_channels=4)
    assert ModelShape.of(energies.backbone) == ModelShape(4, 4, 0, forces=False, stress=False)


# ---------------------------------------------------------------- what they compute


@cases
def test_chained_stages_compute_the_unsplit_energies(kind: str, num_stages: int) -> None:
    sizes = [3, 1, 4]
    model = tiny_model(**MODELS[kind])
    install_keyed_draws(model.backbone)
    batch = tiny_batch(sizes)
    expected = model(batch)
    energy = expected["omat_energy"]["energy"] + expected["omol_energy"]["energy"]  # zero for the other's graphs
    _, outputs = run_chain(cut(kind, num_stages), sizes)
    torch.testing.assert_close(outputs[-1].out, energy, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("module", [EFS_HEAD, SINGLE_HEAD, MOE_HEAD], ids=["plain", "single", "experts"])
def test_the_gate_turns_given_derivatives_into_fairchems_predictions(module: str) -> None:
    heads = {"efs": {"module": EFS_HEAD, "prefix": "omat"}} if module == EFS_HEAD else head_config(module)
    sizes = [3, 4]
    model = tiny_model(heads=heads)
    install_keyed_draws(model.backbone)
    expected = model(tiny_batch(sizes))

    stage = build_stage(tiny_model(heads=heads), index=0, num_stages=1)
    (batch,), (output,) = run_chain([stage], sizes)
    grad_pos, grad_cell = torch.autograd.grad(output.out.sum(), (batch["pos"], batch["cell"]))
    found = stage.predictions(batch, Given(output.out.detach(), grad_pos, grad_cell))
    found.pop("embeddings", None)
    names = ["omat_energy", "omat_forces", "omat_stress"]
    assert set(found) >= set(names)
    for name in found:
        prop = name.rpartition("_")[2]
        torch.testing.assert_close(found[name][prop], expected[name][prop], rtol=EXACT, atol=EXACT)


def test_a_mean_head_divides_the_reported_energy_only() -> None:
    heads = {"efs": {"module": EFS_HEAD, "reduce": "mean", "prefix": "omat"}}
    model = tiny_model(heads=heads)
    install_keyed_draws(model.backbone)
    expected = model(tiny_batch([3, 4]))
    stage = build_stage(tiny_model(heads=heads), index=0, num_stages=1)
    (batch,), (output,) = run_chain([stage], [3, 4])
    grads = torch.autograd.grad(output.out.sum(), (batch["pos"], batch["cell"]))
    found = stage.predictions(batch, Given(output.out.detach(), *grads))
    for name in ("energy", "forces", "stress"):
        own, theirs = (out[f"omat_{name}"][name] for out in (found, expected))
        torch.testing.assert_close(own, theirs, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(output.out.detach() / torch.tensor([3, 4]), expected["omat_energy"]["energy"])


# ---------------------------------------------------------------- copies


@pytest.mark.parametrize("kind", ["dense", "mole"])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_can_be_deep_copied_after_a_forward_and_the_copy_stands_alone(kind: str, index: int) -> None:
    """As for the moving average: the copy must not run the training model, nor share what it received."""
    stages = cut(kind, 3)
    _, outputs = run_chain(stages, [3, 4])
    received = [outputs[index - 1].out, *outputs[index - 1].root] if index else []
    Phases(stages[index], None, "merged").energy_forward(0, tiny_batch([3, 4]), received)
    model = copy.deepcopy(stages[index].model)
    assert model.backbone.inbox is not stages[index].model.backbone.inbox
    assert all(block.inbox is model.backbone.inbox for block in model.backbone.blocks if isinstance(block, Skip))

    with torch.no_grad():
        for parameter in stages[index].model.parameters():
            parameter.zero_()
    duplicate = Stage(model, index=index, num_stages=3, blocks=stages[index].blocks)
    _, message = Phases(duplicate, None, "merged").energy_forward(0, tiny_batch([3, 4]), received)
    if index < 2:
        torch.testing.assert_close(message[0], outputs[index].out, rtol=EXACT, atol=EXACT)


def test_a_forward_leaves_no_tensors_in_the_model() -> None:
    stage = cut("mole", 1)[0]
    Phases(stage, None, "merged").energy_forward(0, tiny_batch([3, 4]), [])
    inbox, shared = stage.model.backbone.inbox, stage.model.backbone.global_mole_tensors
    assert (inbox.h, inbox.csd, inbox.coefficients) == (None, None, None)
    assert (shared.expert_mixing_coefficients, shared.mole_sizes) == (None, None)


def test_a_forward_that_fails_leaves_no_tensors_in_the_model() -> None:
    stage = cut("mole", 2)[1]
    batch = tiny_batch([3, 4])
    with pytest.raises(RuntimeError):  # an embedding of other atoms
        Phases(stage, None, "merged").energy_forward(
            0, batch, [torch.ones(5, 9, 8), torch.ones(2, 8), torch.ones(2, 4)]
        )
    assert stage.model.backbone.inbox.h is None
    assert stage.model.backbone.global_mole_tensors.mole_sizes is None


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("place", ["backbone", "model"])
def test_a_part_that_no_stage_is_known_to_own_is_an_error(place: str) -> None:
    """Silently training it on every stage, or on none, would be worse."""
    model = tiny_model()
    (model.backbone if place == "backbone" else model).novelty = nn.Linear(2, 2)
    with pytest.raises(ValueError) as caught:
        build_stage(model, index=1, num_stages=2)
    prefix = "backbone." if place == "backbone" else ""
    assert f"stage 1 holds other parameters than planned: {prefix}novelty.bias, {prefix}novelty.weight" in str(
        caught.value
    )
    assert "parts that janus does not know" in str(caught.value)


def test_a_parameter_tied_across_blocks_is_an_error() -> None:
    """It has one name in the unsplit model and would get another on the later stage."""
    model = tiny_model()
    model.backbone.blocks[3].norm_1 = model.backbone.blocks[0].norm_1
    with pytest.raises(ValueError, match=r"stage 1 holds other parameters than planned: backbone\.blocks\.3\.norm_1"):
        build_stage(model, index=1, num_stages=2)


def test_more_stages_than_blocks_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"janus\.pipeline_size=5 is larger than the number of backbone blocks \(4\)"):
        build_stage(tiny_model(), index=0, num_stages=5)


def test_names_that_only_look_like_a_block_belong_to_the_first_stage() -> None:
    ranges = partition_blocks(4, 2)
    assert belongs_to("backbone.blocks.3.x", ranges, 1)
    assert not belongs_to("backbone.blocks.3.x", ranges, 0)
    assert belongs_to("backbone.normal", ranges, 0)
    assert not is_replicated("backbone.source_embedding_2.weight")
