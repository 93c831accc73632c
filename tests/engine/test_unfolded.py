"""Unfolded schedules: what a rank holds, who counts and sums which gradient, and what messages are made of."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from fairchem_janus.engine.gradients import GradientBuffer, HeldBy
from fairchem_janus.engine.held import evaluation_stages, held_by, hold_stages, stages_of_rows
from fairchem_janus.engine.unfolded import link_specs
from fairchem_janus.model.stage import is_replicated
from fairchem_janus.parallel.topology import Grid, Topology
from fairchem_janus.schedule import Action, Phase, Schedule, make_schedule
from tests.builders import tiny_batch, tiny_model

FE, FF, BF, BE = Phase


def baseline(name: str, num_stages: int) -> Schedule:
    return make_schedule(name, num_stages=num_stages, num_micro_batches=2)


class FakeTopology(Topology):
    """One rank of a pipeline; a group is just the tuple of rows it was made of."""

    def new_groups(self, rows):  # type: ignore[no-untyped-def,override]
        return tuple(rows)


def rank_of(P: int, p: int) -> Topology:
    return FakeTopology(Grid(D=1, P=P, G=1, rank=p), torch.device("cpu"))


@pytest.mark.parametrize(
    ("name", "num_stages", "rows"),
    [
        ("1f1b_2nd", 4, [{0, 3}, {1, 2}, {1, 2}, {0, 3}]),
        ("1f1b_2nd_contiguous", 4, [{0, 1}, {2, 3}, {2, 3}, {0, 1}]),
        ("1f1b_2nd_contiguous", 3, [{0, 1}, {2}, {0, 1}]),
        ("hanayo_2nd", 4, [{0}, {1}, {2}, {3}]),
    ],
)
def test_each_rank_holds_the_stages_of_its_row(name: str, num_stages: int, rows: list[set[int]]) -> None:
    assert stages_of_rows(baseline(name, num_stages)) == rows


def test_a_rank_without_a_stage_is_refused() -> None:
    rows = (tuple(Action(phase, stage, 0) for phase in Phase for stage in range(2)), ())
    with pytest.raises(ValueError, match="leaves row 2 empty: every rank must hold a stage"):
        stages_of_rows(Schedule(2, 1, rows, "lopsided"))


def test_the_model_keeps_just_the_parameters_of_the_stages_and_shares_them() -> None:
    unsplit = [name for name, _ in tiny_model(experts=2).named_parameters()]
    model = tiny_model(experts=2)
    stages = hold_stages(model, baseline("1f1b_2nd", 4), 0)
    kept = dict(model.named_parameters())
    assert list(kept) == [name for name in unsplit if name in kept]  # the optimizer's order is the unsplit model's
    assert not any(name.startswith(("backbone.blocks.1.", "backbone.blocks.2.")) for name in kept)
    assert all(any(name.startswith(f"backbone.blocks.{b}.") for name in kept) for b in (0, 3))
    for stage in stages.values():
        for name, parameter in stage.model.named_parameters():
            assert parameter is kept[name]
    assert {id(p) for s in stages.values() for p in s.model.parameters()} == {id(p) for p in kept.values()}


def test_stages_for_evaluation_follow_the_moving_average() -> None:
    model = tiny_model()
    stages = hold_stages(model, baseline("1f1b_2nd", 4), 1)
    averaged = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in averaged.parameters():
            parameter.add_(1.0)
    copies = evaluation_stages(stages, model, averaged)
    values = dict(averaged.named_parameters())
    for index, stage in copies.items():
        assert not stage.model.training and stages[index].model.training
        assert all(p is values[name] for name, p in stage.model.named_parameters())


@pytest.mark.parametrize("name", ["1f1b_2nd", "1f1b_2nd_contiguous", "hanayo_2nd"])
@pytest.mark.parametrize("P", [2, 3, 4])
def test_every_parameter_is_counted_once_and_summed_over_its_holders(name: str, P: int) -> None:
    schedule = baseline(name, P)
    counted: list[str] = []
    for p in range(P):
        model = tiny_model()
        stages = hold_stages(model, schedule, p)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        found = []
        for part in held_by(stages, schedule, rank_of(P, p)):
            found += [names[id(parameter)] for parameter in part.parameters]
            holders = part.group or (p,)
            assert p in holders
            counted += [names[id(x)] for x in part.parameters] if part.counts else []
            everyone = {is_replicated(names[id(x)]) for x in part.parameters}
            assert True not in everyone or holders == tuple(range(P))
        assert sorted(found) == sorted(names.values())
    assert sorted(counted) == sorted(name for name, _ in tiny_model().named_parameters())


def test_a_copy_that_another_rank_counts_is_not_in_the_norm() -> None:
    mine, theirs = nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(1))
    buffer = GradientBuffer([HeldBy([mine]), HeldBy([theirs], None, counts=False)], rank_of(1, 0))
    buffer.add([torch.tensor([3.0, 4.0]), torch.tensor([12.0])])
    buffer.reduce()
    assert buffer.squared_norm() == pytest.approx(25.0)
    buffer.clip(10.0, 5.0)
    assert theirs.grad is not None and theirs.grad.item() == pytest.approx(6.0, rel=1e-6)


def test_messages_follow_from_their_two_ends() -> None:
    model = tiny_model(experts=4)
    shape = hold_stages(model, baseline("1f1b_2nd", 2), 0)[0].shape
    batch = tiny_batch([3, 4])
    h, csd, coefficients, energy = (7, 9, 8), (2, 8), (2, 4), (2,)

    def sent(producer: Phase, consumer: Phase, stage: int) -> list[tuple[int, ...]]:
        found = link_specs(Action(producer, stage, 0), Action(consumer, stage, 0), batch, shape)
        return [spec.shape for spec in found]

    assert sent(FE, FE, 0) == [h, csd, coefficients]
    assert sent(FE, FF, 0) == []  # stage 0 starts from the batch
    assert sent(FE, FF, 1) == [h, csd, coefficients]
    assert sent(BF, BE, 0) == [energy]
    assert sent(BF, BE, 1) == [energy, h, csd, coefficients]
    assert sent(BE, BE, 1) == [h, csd, coefficients]
