"""`fairchem-janus simulate`: how long a step takes on paper, and where it waits, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from fairchem_janus.schedule import Phase, Schedule, Simulation


def register(app: typer.Typer) -> None:
    """Add the command `simulate` to `app`."""

    @app.command()
    def simulate(
        stages: Annotated[int, typer.Option(help="Pipeline stages, P.")],
        micro_batches: Annotated[int, typer.Option(help="Micro-batches per step and replica, N.")],
        phase_times: Annotated[
            str, typer.Option(help="Times of FE,FF,BF,BE of a micro-batch on a stage, any unit.")
        ] = ("1,1.9,3.6,2.6"),
        schedule: Annotated[str, typer.Option(help="A family by name, or a path to a .csv file.")] = "auto",
        wave_size: Annotated[int | None, typer.Option(help="k of wavek; default P.")] = None,
        max_in_flight: Annotated[
            int | None, typer.Option(help="Most micro-batches with a live graph on a rank; default no limit.")
        ] = None,
        max_ff_graphs: Annotated[
            int | None, typer.Option(help="Most live FF graphs on a rank; default no limit.")
        ] = None,
        split_weight_grad: Annotated[
            bool, typer.Option("--split-weight-grad", help="Parameter gradients, half of BF and of BE, may run later.")
        ] = False,
        gp_size: Annotated[
            int, typer.Option(min=1, help="Graph-parallel size, G: ranks that share each micro-batch.")
        ] = 1,
        comm_free_share: Annotated[
            float, typer.Option(min=0, max=1, help="Share of the micro-batches that need no halo exchange.")
        ] = 0.0,
        halo_share: Annotated[
            float, typer.Option(min=0, help="Time of halo exchange in a phase of the others, over its computing time.")
        ] = 0.0,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Simulate one training step: makespan, bubble, what is in flight, and a picture of the schedule.

        With --gp-size G, phase times are those of a whole micro-batch on one rank; each of G takes 1/G of it, and
        the halo exchange of micro-batches that are not comm-free comes on top.

        An example: fairchem-janus simulate --stages 4 --micro-batches 12 --schedule auto --max-in-flight 8
        """
        from fairchem_janus.schedule import DEFERRABLE_SHARE, Caps, Costs, make_schedule
        from fairchem_janus.schedule import simulate as run

        try:
            costs = Costs(
                num_stages=stages,
                num_micro_batches=micro_batches,
                phase_times=parse_phase_times(phase_times),
                micro_batch_scale=graph_parallel_scales(micro_batches, gp_size, comm_free_share, halo_share),
                deferrable_share=DEFERRABLE_SHARE if split_weight_grad else 0.0,
            )
            caps = Caps(max_in_flight=max_in_flight, max_ff_graphs=max_ff_graphs)
            planned = make_schedule(
                schedule,
                num_stages=stages,
                num_micro_batches=micro_batches,
                wave_size=wave_size,
                costs=costs,
                caps=caps,
            )
            result = run(planned, costs, caps)
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        if as_json:
            typer.echo(json.dumps(to_json(result)))
        else:
            show(planned, result)


def parse_phase_times(text: str) -> dict[Phase, float | Sequence[float]]:
    """Read `FE,FF,BF,BE` times such as `1,1.9,3.6,2.6`. Raises ValueError unless these are four numbers."""
    from fairchem_janus.schedule import TRAINING_PHASES

    try:
        times = [float(part) for part in text.split(",")]
        return dict(zip(TRAINING_PHASES, times, strict=True))
    except ValueError:
        raise ValueError(
            f"--phase-times {text!r}: expected four numbers separated by commas, the times of FE, FF, BF and BE, "
            "such as 1,1.9,3.6,2.6"
        ) from None


def graph_parallel_scales(
    num_micro_batches: int, gp_size: int, comm_free_share: float, halo_share: float
) -> list[float]:
    """Time of each micro-batch over that of a whole one on one rank; the comm-free ones are spread evenly."""
    comm_free = [
        int((i + 1) * comm_free_share + 1e-9) > int(i * comm_free_share + 1e-9) for i in range(num_micro_batches)
    ]
    halo = halo_share if gp_size > 1 else 0.0
    return [1 / gp_size if free else (1 + halo) / gp_size for free in comm_free]


def to_json(result: Simulation) -> dict[str, Any]:
    """Return what `--json` prints; times are in the unit of `--phase-times`."""
    return {
        "makespan": result.makespan,
        "bubble_ratio": result.bubble_ratio,
        "lower_bound": result.lower_bound,
        "bubble_lower_bound": result.bubble_lower_bound,
        "peak_in_flight": max(result.peak_in_flight),
        "peak_ff_graphs": max(result.peak_ff_graphs),
        "per_stage": [
            {
                "stage": stage,
                "busy": busy,
                "idle": result.makespan - busy,
                "peak_in_flight": result.peak_in_flight[stage],
                "peak_ff_graphs": result.peak_ff_graphs[stage],
            }
            for stage, busy in enumerate(result.busy)
        ],
    }


def show(schedule: Schedule, result: Simulation) -> None:
    """Print the numbers as a table and the step as a picture."""
    from rich.console import Console
    from rich.table import Table

    from fairchem_janus.schedule.draw import draw, draw_rich, lanes_of

    console = Console()
    console.print(f"schedule {schedule.name}: {schedule.num_stages} stages, {schedule.num_micro_batches} micro-batches")
    console.print(f"makespan      {result.makespan:10.4g}   lower bound {result.lower_bound:.4g}")
    console.print(f"bubble ratio  {result.bubble_ratio:10.2%}   lower bound {result.bubble_lower_bound:.2%}")
    table = Table("stage", "busy", "idle", "peak in flight", "peak FF graphs")
    for row in to_json(result)["per_stage"]:
        cells = [str(row["stage"]), f"{row['busy']:.4g}", f"{row['idle']:.4g}"]
        table.add_row(*cells, str(row["peak_in_flight"]), str(row["peak_ff_graphs"]))
    console.print(table)
    lanes, width = lanes_of(schedule, result), max(console.width - len("rank 00 |"), 20)
    if console.is_terminal:
        console.print(draw_rich(lanes, width))
    else:
        typer.echo(draw(lanes, width))
