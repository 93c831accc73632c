"""The table that a run prints when it starts: what was replaced, and what a step now is."""

from __future__ import annotations

import io
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.utils.data import DataLoader

from fairchem_janus.config import JanusConfig
from fairchem_janus.model.checks import ModelSettings
from fairchem_janus.model.partition import partition_blocks
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
    blocks = partition_blocks(settings.num_blocks, grid.P)
    shown = ", ".join(f"{r.start}-{r.stop - 1}" if len(r) > 1 else f"{r.start}" for r in blocks)
    n = config.num_micro_batches
    table.add_row("ranks", f"{grid.D * grid.P * grid.G} x data parallel", str(grid))
    table.add_row("backbone", settings.backbone_class.__name__, f"blocks {shown} on stages 0-{grid.P - 1}")
    table.add_row("runner", "TrainEvalRunner", "JanusRunner")
    table.add_row("train_eval_unit", "MLIPTrainEvalUnit", "JanusTrainEvalUnit")
    table.add_row("a sampler's batch", "one step of a rank", f"one micro-batch; {n} make a step of a replica")
    table.add_row("gradient", "mean over ranks", "exact over the whole global batch")
    for name, loader in (("training", train_dataloader), ("evaluation", eval_dataloader)):
        table.add_row(f"{name} steps an epoch", f"{len(loader.batch_sampler.batches)} batches", f"{len(loader)} steps")
    wave = f", k = {config.wave_size}" if config.schedule == "wavek" else ""
    table.add_row("schedule", "-", f"{config.schedule}{wave}; split {config.split}")
    text = io.StringIO()
    Console(file=text, width=110).print(table)
    return text.getvalue().rstrip()
