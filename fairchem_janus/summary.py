"""The table that a run prints when it starts: what was replaced, and what a step now is."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from fairchem_janus.config import JanusConfig
from fairchem_janus.data.gars_sampler import GARSBatchSampler
from fairchem_janus.model.build import StageParameters
from fairchem_janus.model.checks import ModelSettings
from fairchem_janus.parallel.topology import Grid


def describe_run(
    config: JanusConfig,
    grid: Grid,
    settings: ModelSettings,
    train_dataloader: DataLoader[list[Any]],
    eval_dataloader: DataLoader[list[Any]],
) -> str:
    """A table with the job's parts as they were and as they run."""
    table = Table(title="fairchem-janus", title_justify="left")
    for column in ("what", "in the job file", "here"):
        table.add_column(column, overflow="fold")
    n = config.num_micro_batches
    table.add_row("ranks", f"{grid.D * grid.P * grid.G} x data parallel", str(grid))
    table.add_row("backbone", settings.backbone_class.__name__, f"{settings.num_blocks} blocks over {grid.P} stage(s)")
    table.add_row("runner", "TrainEvalRunner", "JanusRunner")
    table.add_row("train_eval_unit", "MLIPTrainEvalUnit", "JanusTrainEvalUnit")
    table.add_row("a sampler's batch", "one step of a rank", f"one micro-batch; {n} make a step of a replica")
    table.add_row("gradient", "mean over ranks", "exact over the whole global batch")
    for name, loader in (("training", train_dataloader), ("evaluation", eval_dataloader)):
        if isinstance(loader.batch_sampler, GARSBatchSampler):
            before, packed = "-", f"packed by GARS ({loader.batch_sampler.config.cost})"
        else:
            before, packed = f"{len(loader.batch_sampler.batches)} batches", "batches of the job's sampler, grouped"
        table.add_row(f"{name} steps an epoch", before, f"{len(loader)} steps, {packed}")
    wave = f", k = {config.wave_size}" if config.schedule == "wavek" else ""
    table.add_row("schedule", "-", f"{config.schedule}{wave}; split {config.split}")
    return _rendered(table)


def describe_stages(stages: list[StageParameters]) -> str:
    """A table of the stages: their blocks, their own parameters, and the replicated ones, which count once."""
    table = Table(title="parameters per stage", title_justify="left", show_footer=True)
    total = sum(stage.own for stage in stages) + stages[0].replicated
    table.add_column("stage", "all")
    table.add_column("blocks", f"{sum(len(stage.blocks) for stage in stages)}")
    table.add_column("own", f"{sum(stage.own for stage in stages):,}", justify="right")
    table.add_column("replicated", f"{stages[0].replicated:,}", justify="right")
    table.add_column("share", f"{total:,}", justify="right")
    for index, stage in enumerate(stages):
        first, last = stage.blocks.start, stage.blocks.stop - 1
        blocks = f"{first}" if first == last else f"{first}-{last}"
        share = f"{(stage.own + stage.replicated) / total:.1%}"
        table.add_row(str(index), blocks, f"{stage.own:,}", f"{stage.replicated:,}", share)
    return _rendered(table)


def _rendered(table: Table) -> str:
    text = io.StringIO()
    Console(file=text, width=110).print(table)
    return text.getvalue().rstrip()
