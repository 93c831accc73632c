"""`fairchem-janus verify`: is this job trained exactly? Before a cluster is spent on it."""

from __future__ import annotations

import json
import logging
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fairchem_janus.verify.compare import Comparison


class Precision(StrEnum):
    float64 = "float64"
    float32 = "float32"


def register(app: typer.Typer) -> None:
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(verify)


def verify(
    context: typer.Context,
    config: Annotated[Path, typer.Option("-c", "--config", help="The job file.", exists=True, dir_okay=False)],
    steps: Annotated[int, typer.Option(help="Optimizer steps to compare.", min=1)] = 1,
    dtype: Annotated[Precision, typer.Option(help="Precision of model and data on both sides.")] = Precision.float64,
    json_file: Annotated[Path | None, typer.Option("--json", help="Write the figures here.")] = None,
    accumulate: Annotated[
        bool,
        typer.Option(
            help="Compare with accumulation over the micro-batches on one rank, not with plain fairchem on their "
            "union, which may not fit in memory."
        ),
    ] = False,
) -> None:
    """Compare a job with plain fairchem: loss, gradient norm, every gradient, every parameter.

    Runs the job's model and data on its D x P x G ranks, on this machine, and the same global batches through
    fairchem's own training unit in one process. Hydra overrides follow the options, as for `fairchem -c`. Exits with 1
    if losses, norms or gradients differ by more than 1e-10 (float64) or 1e-4 (float32), relatively.
    """
    logging.disable(logging.INFO)
    import torch
    from fairchem.core._cli import get_hydra_config_from_yaml
    from rich.console import Console

    from fairchem_janus.parallel.launch import RankError
    from fairchem_janus.verify.compare import TOLERANCE
    from fairchem_janus.verify.run import verify_job

    job = get_hydra_config_from_yaml(str(config), context.args)
    world_size = job.job.scheduler.num_nodes * job.job.scheduler.ranks_per_node
    torch_dtype = getattr(torch, dtype.value)
    console = Console()
    try:
        result = verify_job(job, steps=steps, dtype=torch_dtype, world_size=world_size, accumulate_reference=accumulate)
    except RankError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    tolerance = TOLERANCE[torch_dtype]
    passed = result.passes(tolerance)
    _print_table(console, result, tolerance)
    figures = {
        "max_rel_loss_error": result.loss,
        "max_rel_grad_norm_error": result.grad_norm,
        "max_rel_grad_error": result.grad,
        "max_rel_param_error": result.param,
        "worst_tensor": result.worst_tensor,
        "steps": steps,
        "dtype": dtype.value,
        "world": world_size,
    }
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps(figures) + "\n")
    reference = "accumulation on one rank" if accumulate else "plain fairchem"
    verdict = "[green]exact[/]" if passed else "[red]NOT exact[/]"
    console.print(
        f"{verdict} within {tolerance:g} ({dtype.value}, {steps} step(s), {world_size} rank(s), against {reference}): "
        f"loss {result.loss:.1e}, gradient norm {result.grad_norm:.1e}, gradients {result.grad:.1e} "
        f"(worst: {result.worst_tensor}); parameters after the last step {result.param:.1e}",
        soft_wrap=True,
    )
    if not passed:
        raise typer.Exit(1)


def _print_table(console: object, result: Comparison, tolerance: float) -> None:
    from rich.console import Console
    from rich.table import Table

    assert isinstance(console, Console)
    table = Table("module", title="largest relative error", title_justify="left")
    for column in ("parameters", "gradient", "parameter after the last step"):
        table.add_column(column, justify="right")
    for module, (gradient, parameter, count) in result.by_module.items():
        style = "red" if gradient > tolerance else None
        table.add_row(module, f"{count:,}", f"{gradient:.1e}", f"{parameter:.1e}", style=style)
    console.print(table)
