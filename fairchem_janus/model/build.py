"""Names of the unsplit model, and the check that the stages hold every one of them exactly once."""

from __future__ import annotations

from collections import Counter

from torch import nn

from fairchem_janus.model.partition import partition_blocks
from fairchem_janus.model.stage import Stage, is_replicated
from fairchem_janus.model.surgery import cut_to_stage


def build_stage(model: nn.Module, *, index: int, num_stages: int) -> Stage:
    """Cut a built, unsplit model to stage `index`, in place.

    Raises:
        ValueError: the stages would not cover the model's parameters exactly.
    """
    unsplit = [name for name, _ in model.named_parameters()]
    ranges = partition_blocks(len(model.backbone.blocks), num_stages)
    held: Counter[str] = Counter()
    for stage in range(num_stages):
        held.update(name for name in unsplit if belongs_to(name, ranges, stage))
    wrong = [name for name in unsplit if held[name] != (num_stages if is_replicated(name) else 1)]
    if wrong:
        raise ValueError(f"parameters that are not held by exactly one stage: {', '.join(wrong)}")
    blocks = ranges[index]
    cut_to_stage(model, blocks, is_first=index == 0, is_last=index == num_stages - 1)
    stage_names = {name for name, _ in model.named_parameters()}
    expected = {name for name in unsplit if belongs_to(name, ranges, index)}
    if stage_names != expected:
        odd = ", ".join(sorted(stage_names ^ expected))
        raise ValueError(
            f"stage {index} holds other parameters than planned: {odd}; the model has parts that janus does not know"
        )
    return Stage(model, index=index, num_stages=num_stages, blocks=blocks)


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
