"""What a rank holds under an unfolded schedule: several stages, and the parameters of each, under unsplit names.

Folded, rank s holds stage s. Unfolded, a rank runs FE and BE of one stage and FF and BF of another, and needs the
parameters of both; so every parameter has two holders (P = 4)::

                    looped              contiguous
    rank 0     FE0 BE0 FF3 BF3      FE0 FE1 BE0 BE1      holds {0, 3}, {0, 1}
    rank 1     FE1 BE1 FF2 BF2      FE2 FE3 BE2 BE3            {1, 2}, {2, 3}
    rank 2     FE2 BE2 FF1 BF1      FF3 FF2 BF3 BF2            {1, 2}, {2, 3}
    rank 3     FE3 BE3 FF0 BF0      FF1 FF0 BF1 BF0            {0, 3}, {0, 1}

Each holder finds a part of the gradient. The sum over the holders, taken before the step, is the whole, so that their
optimizers keep the copies equal.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn

from fairchem_janus.engine.gradients import HeldBy
from fairchem_janus.model.build import build_stage
from fairchem_janus.model.stage import Stage, is_replicated
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.schedule import Schedule


def stages_of_rows(schedule: Schedule) -> list[set[int]]:
    """The stages that each row of a schedule has actions of.

    Raises:
        ValueError: a row is empty.
    """
    stages = [{action.stage for action in row} for row in schedule.rows]
    if not all(stages):
        raise ValueError(
            f"schedule {schedule.name!r} leaves row {stages.index(set()) + 1} empty: every rank must hold a stage"
        )
    return stages


def hold_stages(model: nn.Module, schedule: Schedule, row: int, **options: Any) -> dict[int, Stage]:
    """Cut the stages of a row off a built, unsplit model, which keeps their parameters and loses all others, in place.

    The stages share their parameters with the model and so with each other; the model itself is not run any more: it is
    what optimizer, moving average and checkpoints see.

    Args:
        options: of `build_stage`.
    """
    stages = {}
    for index in sorted(stages_of_rows(schedule)[row]):
        cut = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        stages[index] = build_stage(cut, index=index, num_stages=schedule.num_stages, **options)
    kept = {name for stage in stages.values() for name, _ in stage.model.named_parameters()}
    for name in [name for name, _ in model.named_parameters() if name not in kept]:
        module, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(module), leaf, None)
    return stages


def evaluation_stages(stages: dict[int, Stage], model: nn.Module, averaged: nn.Module) -> dict[int, Stage]:
    """The stages of `hold_stages` on other weights, for evaluation; to be called before any stage has run.

    Args:
        model: what `hold_stages` cut the stages off.
        averaged: a copy of it, or the model itself.
    """
    pairs = list(zip(model.parameters(), averaged.parameters(), strict=True))
    copies = {}
    for index, stage in stages.items():
        twin = copy.deepcopy(stage.model, {id(own): other for own, other in pairs}).eval()
        copies[index] = Stage(twin, index=index, num_stages=stage.num_stages, blocks=stage.blocks)
    return copies


def held_by(stages: dict[int, Stage], schedule: Schedule, topology: Topology) -> list[HeldBy]:
    """The trainable parameters of this rank's stages by their holders; every rank of the world must call this."""
    rows = stages_of_rows(schedule)
    everyone = tuple(range(len(rows)))
    holders = {s: tuple(row for row, held in enumerate(rows) if s in held) for s in set().union(*rows)}
    parameters: dict[tuple[int, ...], dict[str, nn.Parameter]] = {
        ranks: {} for ranks in sorted({everyone, *holders.values()})
    }
    for index, stage in stages.items():
        for name, parameter in stage.trainable():
            parameters[everyone if is_replicated(name) else holders[index]][name] = parameter
    parts = []
    for ranks, named in parameters.items():
        group = topology.new_groups(ranks) if len(ranks) > 1 else None
        if topology.grid.p in ranks:
            parts.append(HeldBy(list(named.values()), group, counts=topology.grid.p == ranks[0]))
    return parts
