"""Which stage holds which parameter, under the names of the unsplit model, and the checks that none is lost."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from fairchem_janus.model.partition import partition_blocks
from fairchem_janus.model.stage import Stage, is_replicated
from fairchem_janus.model.surgery import cut_to_stage


@dataclass(frozen=True, slots=True)
class StageParameters:
    """Parameters of one stage.

    Attributes:
        blocks: indices of its backbone blocks.
        own: scalar parameters that only this stage holds.
        replicated: scalar parameters that every stage holds.
        trains: whether this stage or one before it has anything to train.
    """

    blocks: range
    own: int
    replicated: int
    trains: bool


def stage_parameters(
    model: nn.Module, num_stages: int, partition: Sequence[int] | None = None
) -> list[StageParameters]:
    """How an unsplit model's parameters fall to the stages; `partition` as in `partition_blocks`.

    Raises:
        ValueError: the stages' own parameters and the replicated ones, counted once, are not the model's.
    """
    ranges = partition_blocks(len(model.backbone.blocks), num_stages, partition)
    named = list(model.named_parameters())
    replicated = sum(p.numel() for name, p in named if is_replicated(name))
    stages, trains = [], False
    for stage, blocks in enumerate(ranges):
        held = [(name, p) for name, p in named if belongs_to(name, ranges, stage)]
        own = sum(p.numel() for name, p in held if not is_replicated(name))
        trains = trains or any(p.requires_grad for _, p in held)
        stages.append(StageParameters(blocks, own, replicated, trains))
    total, expected = sum(s.own for s in stages) + replicated, sum(p.numel() for _, p in named)
    if total != expected:
        raise ValueError(
            f"the stages hold {total:,} different parameters, the unsplit model has {expected:,}: the model has parts "
            "that janus does not know"
        )
    return stages


def build_stage(model: nn.Module, *, index: int, num_stages: int, partition: Sequence[int] | None = None) -> Stage:
    """Cut a built, unsplit model to stage `index`, in place; `partition` as in `partition_blocks`.

    Raises:
        ValueError: the stages would not hold the model's parameters exactly.
    """
    parameters = stage_parameters(model, num_stages, partition)
    ranges = [stage.blocks for stage in parameters]
    expected = {name for name, _ in model.named_parameters() if belongs_to(name, ranges, index)}
    cut_to_stage(model, ranges[index], is_first=index == 0, is_last=index == num_stages - 1)
    found = {name for name, p in model.named_parameters() if not p.is_meta}  # see frugal.py
    if found != expected:
        odd = ", ".join(sorted(found ^ expected))
        raise ValueError(
            f"stage {index} holds other parameters than planned: {odd}; the model has parts that janus does not know"
        )
    return Stage(model, index=index, num_stages=num_stages, blocks=ranges[index], trains=parameters[index].trains)


def belongs_to(name: str, ranges: list[range], stage: int) -> bool:
    """Whether stage number `stage` holds the parameter of that (unsplit) name."""
    if is_replicated(name):
        return True
    parts = name.split(".")
    if parts[:2] == ["backbone", "blocks"]:
        return int(parts[2]) in ranges[stage]
    if parts[:2] == ["backbone", "norm"] or parts[0] == "output_heads":
        return stage == len(ranges) - 1
    return stage == 0
