"""`fairchem-janus plan`: what a job's pipeline will look like, measured on its own model and data, without training."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from fairchem_janus.plan import Plan


def register(app: typer.Typer) -> None:
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(plan)


def plan(
    context: typer.Context,
    config: Annotated[Path, typer.Option("-c", "--config", help="The job file.", exists=True, dir_okay=False)],
    steps: Annotated[int, typer.Option(help="Steps to measure, after one to warm up.", min=1)] = 3,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    save: Annotated[
        Path | None,
        typer.Option(help="Write schedule.csv, plan.json, planned.png, recorded.png and plan.trace.json here."),
    ] = None,
) -> None:
    """Measure a job's phases on this machine and show the schedule, step time, bubble and memory that follow.

    Runs a few steps of one of the job's pipelines (P ranks) and throws the result away. Hydra overrides follow the
    options, as for `fairchem -c`. Exits with 2 if the job is refused or fails.
    """
    logging.disable(logging.INFO)
    from fairchem.core._cli import get_hydra_config_from_yaml
    from rich.console import Console

    from fairchem_janus.parallel.launch import RankError
    from fairchem_janus.plan import plan_job

    try:
        result = plan_job(get_hydra_config_from_yaml(str(config), context.args), steps=steps)
    except (RankError, ValueError) as error:
        Console(stderr=True).print(str(error), style="red", markup=False)
        raise typer.Exit(2) from None
    if save is not None:
        write_files(result, save)
    if as_json:
        typer.echo(json.dumps(result.to_json()))
    else:
        show(result, Console(), save)


def write_files(plan: Plan, folder: Path) -> None:
    """The schedule, the figures, and the step as planned and as recorded."""
    from fairchem_janus.schedule.export import save_png, save_trace

    folder.mkdir(parents=True, exist_ok=True)
    name, planned, recorded = plan.measured.schedule.name, _lanes(plan), plan.measured.recorded
    plan.measured.schedule.to_csv(folder / "schedule.csv")
    (folder / "plan.json").write_text(json.dumps(plan.to_json(), indent=1) + "\n")
    bubble, seconds = plan.expected.bubble_ratio, plan.expected.makespan
    save_png(planned, folder / "planned.png", title=f"{name}, planned: {1e3 * seconds:.4g} ms, bubble {bubble:.1%}")
    bubble, seconds = plan.measured.bubble, plan.measured.seconds
    save_png(recorded, folder / "recorded.png", title=f"{name}, recorded: {1e3 * seconds:.4g} ms, bubble {bubble:.1%}")
    ranks = [f"rank {rank}" for rank in range(len(planned))]
    save_trace({"planned": planned, "recorded": recorded}, folder / "plan.trace.json", names=ranks)


def show(plan: Plan, console: Console, save: Path | None) -> None:
    """Print the plan for people."""
    from fairchem_janus.schedule.draw import draw, draw_rich
    from fairchem_janus.summary import describe_stages

    measured, expected, grid = plan.measured, plan.expected, plan.grid
    console.print(f"ranks: {grid}")
    for p in range(grid.P):
        ranks = [(d * grid.P + p) * grid.G + g for d in range(grid.D) for g in range(grid.G)]
        console.print(f"  stage {p}: rank {', '.join(map(str, ranks))}")
    console.print(describe_stages(measured.stages), markup=False)
    _print_phases(plan, console)
    width = max(console.width - len("rank 00 |"), 20)
    for title, lanes in (("planned, one row a stage", _lanes(plan)), ("recorded", measured.recorded)):
        console.print(f"\n{measured.schedule.name}, {title}")
        if console.is_terminal:
            console.print(draw_rich(lanes, width))
        else:
            typer.echo(draw(lanes, width))
    console.print(
        f"\nexpected step: {1e3 * expected.makespan:.4g} ms, bubble {expected.bubble_ratio:.1%} (floor "
        f"{expected.bubble_lower_bound:.1%}); recorded: {1e3 * measured.seconds:.4g} ms, bubble {measured.bubble:.1%}, "
        f"and {1e3 * measured.other_seconds:.3g} ms for losses and gradient sums; optimizer and data come on top",
        soft_wrap=True,
    )
    if (halo := measured.halo) is not None:
        console.print(
            f"halo exchange in the recorded step: {halo.num_bytes / 1e6:.3g} MB, {1e3 * halo.seconds:.3g} ms of each "
            f"rank's time (part of the phases); {halo.comm_free_share:.0%} of the micro-batches are comm-free",
            soft_wrap=True,
        )
    _print_rivals(plan, console)
    _print_advice(plan, console)
    if (cost := measured.profile.graph_cost) is not None:
        console.print("a graph's time, for packing by it (with janus.gars):")
        typer.echo(
            f"    '++runner.janus.gars.cost={{per_atom: {cost['per_atom']:.3g}, per_edge: {cost['per_edge']:.3g}}}'"
        )
    if save is not None:
        console.print(f"written to {save}: schedule.csv, plan.json, planned.png, recorded.png, plan.trace.json")


def _lanes(plan: Plan) -> list:
    from fairchem_janus.schedule.draw import lanes_of

    return lanes_of(plan.measured.schedule, plan.expected)


def _print_phases(plan: Plan, console: Console) -> None:
    from rich.table import Table

    from fairchem_janus.plan import gib
    from fairchem_janus.schedule import TRAINING_PHASES

    title = "a micro-batch on each stage (ms), and memory of its rank at the schedule's peak (GiB)"
    table = Table("stage", title=title, title_justify="left")
    for column in (*map(str, TRAINING_PHASES), "states", "graphs", "workspace", "total"):
        table.add_column(column, justify="right")
    for index, (stage, memory) in enumerate(zip(plan.measured.profile.stages, plan.memory, strict=True)):
        times = [f"{1e3 * stage.phase_seconds[phase]:.4g}" for phase in TRAINING_PHASES]
        bytes_ = [*memory.values(), sum(memory.values())]
        table.add_row(str(index), *times, *(gib(value) for value in bytes_))
    console.print(table)


def _print_rivals(plan: Plan, console: Console) -> None:
    from rich.table import Table

    from fairchem_janus.plan import gib

    table = Table(title="all families on these costs", title_justify="left")
    table.add_column("schedule", no_wrap=True)
    for column in ("step (ms)", "bubble", "in flight", "GiB"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("remarks")
    for rival in plan.rivals:
        simulation = rival.simulation
        notes = [] if rival.fits else ["needs more"]
        if not rival.schedule.is_folded:
            notes.append("unfolded")
        table.add_row(
            rival.label,
            f"{1e3 * simulation.makespan:.4g}",
            f"{simulation.bubble_ratio:.1%}",
            str(max(simulation.peak_in_flight)),
            gib(max(simulation.peak_memory)),
            ", ".join(notes),
        )
    console.print(table)


def _print_advice(plan: Plan, console: Console) -> None:
    current, proposed = plan.stage_seconds
    if plan.proposed == plan.partition:
        console.print(f"partition {plan.partition} balances the stages as well as whole blocks can")
        return
    override = ",".join(map(str, plan.proposed))
    console.print(
        f"partition {plan.partition}: the slowest stage takes {1e3 * current:.4g} ms a micro-batch; "
        f"{plan.proposed} would take {1e3 * proposed:.4g} ms. Add:",
        soft_wrap=True,
    )
    typer.echo(f"    ++runner.janus.partition=[{override}]")
