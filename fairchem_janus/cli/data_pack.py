"""`fairchem-janus data pack DB ...`: dry run of GARS on a data set, beside sequential packing."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fairchem_janus.data.balance import Comparison


def register(app: typer.Typer) -> None:
    """Add the command `pack` to `app`."""

    @app.command()
    def pack(
        sources: Annotated[
            list[str], typer.Argument(help="Data sets: folders or files, .aselmdb or any that ASE reads.")
        ],
        num_micro_batches: Annotated[int, typer.Option(min=1, help="Micro-batches per replica and step.")],
        graphs_per_step: Annotated[int, typer.Option(min=1, help="Graphs of a step, over all replicas.")],
        num_replicas: Annotated[int, typer.Option(min=1, help="Data-parallel size.")] = 1,
        gp_size: Annotated[int, typer.Option(min=1, help="Graph-parallel size.")] = 1,
        cutoff: Annotated[float, typer.Option(help="A, for the edges.")] = 6.0,
        max_neighbors: Annotated[int | None, typer.Option(help="Edges that an atom keeps; default all.")] = None,
        seed: Annotated[int, typer.Option(min=0, help="Of the order of the graphs.")] = 0,
        as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
    ) -> None:
        """Show how even micro-batches get: sequential packing, GARS, GARS without shuffle, GARS by edges.

        Ratios and coefficients of variation are within a step, averaged over the steps of one epoch.
        """
        import numpy as np

        from fairchem_janus.data.balance import compare
        from fairchem_janus.data.frames import load_sizes

        try:
            columns = [load_sizes(source, cutoff, max_neighbors=max_neighbors) for source in sources]
            sizes, edges = (np.concatenate(values) for values in zip(*columns, strict=True))
            result = compare(
                sizes,
                edges,
                num_micro_batches=num_micro_batches,
                graphs_per_step=graphs_per_step,
                num_replicas=num_replicas,
                gp_size=gp_size,
                seed=seed,
            )
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        if as_json:
            typer.echo(json.dumps({name: comparison.mean for name, comparison in result.items()}, indent=2))
            return
        num_steps = len(next(iter(result.values())).per_step)
        used = min(num_steps * graphs_per_step, len(sizes))
        typer.echo(
            f"{len(sizes)} graphs of {sizes.min()} to {sizes.max()} atoms and {edges.min()} to {edges.max()} edges; "
            f"{num_steps} steps of {min(graphs_per_step, len(sizes))} graphs in {num_micro_batches} x {num_replicas} "
            f"micro-batches" + (f"; the last {len(sizes) - used} graphs make no full step" if used < len(sizes) else "")
        )
        _print_tables(result, gp_size)


def _print_tables(result: dict[str, Comparison], gp_size: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from fairchem_janus.data.balance import histogram

    table = Table()
    for heading in ("packing", "load", "max/mean", "worst", "floor", "CV"):
        table.add_column(heading, no_wrap=True)
    if gp_size > 1:
        table.add_column("comm-free")
        table.add_column(f"edges over {gp_size} ranks")
    for name, comparison in result.items():
        for load in ("atoms", "edges"):
            mean = comparison.mean
            first = load == "atoms"
            shared = [
                f"{mean['comm_free_share']:.0%}" if first else "",
                "" if first else f"{sum(comparison.over_ranks) / len(comparison.over_ranks):.3f}",
            ]
            table.add_row(
                name if first else "",
                load,
                f"{mean[f'max_over_mean_{load}']:.3f}",
                f"{max(step[f'max_over_mean_{load}'] for step in comparison.per_step):.3f}",
                f"{mean[f'floor_{load}']:.3f}",
                f"{mean[f'cv_{load}']:.4f}",
                *(shared if gp_size > 1 else []),
                end_section=not first,
            )
    Console(soft_wrap=True).print(table)
    for load, after in (("atoms", "gars"), ("edges", "gars_edges")):
        before = getattr(result["sequential"], load)
        both = [*before, *getattr(result[after], load)]
        limits = (min(both), max(both) + 1)
        for name in ("sequential", after):
            typer.echo(f"\n{load} per micro-batch, {name}")
            typer.echo(histogram(getattr(result[name], load), limits=limits))
