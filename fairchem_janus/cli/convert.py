"""`fairchem-janus convert`: the janus version of a stock fairchem training job."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(convert)


def convert(
    job_file: Annotated[Path, typer.Argument(metavar="IN.yaml", help="A fairchem training job.")],
    pipeline: Annotated[int, typer.Option(help="P, pipeline stages.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides that the job needs to be composed; for the checks only.")
    ] = None,
    graph: Annotated[int | None, typer.Option(help="G, graph-parallel size; default as in the job.")] = None,
    data: Annotated[int | None, typer.Option(help="D, replicas; default as many as the job's ranks give.")] = None,
    micro_batches: Annotated[
        int | None, typer.Option(help="N; default: the global batch as it was, but at least 2 P micro-batches.")
    ] = None,
    output: Annotated[Path | None, typer.Option("-o", "--output", help="The new job file; default: print it.")] = None,
) -> None:
    """Write the janus version of a fairchem training job, with comments that say what changed.

    Everything else in the file stays as it is: comments, order, defaults lists, interpolations. Exits with 2 and the
    reason if the job cannot be converted.
    """
    logging.disable(logging.INFO)
    try:
        if not job_file.is_file():
            raise ValueError(f"{job_file}: no such job file")
        if output is not None and output.exists() and output.samefile(job_file):
            raise ValueError(f"-o {output} is the job file itself, which is never overwritten; choose another name")
        if output is not None and not output.parent.is_dir():
            raise ValueError(f"-o {output}: no such folder")

        from fairchem_janus.convert.convert import convert as run

        result = run(
            job_file,
            pipeline_size=pipeline,
            gp_size=graph,
            num_replicas=data,
            num_micro_batches=micro_batches,
            overrides=overrides or [],
        )
    except (ValueError, OSError) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error
    for note in result.notes:
        typer.echo(note, err=True)
    if output is None:
        typer.echo(result.text, nl=False)
        return
    with open(output, "w", newline="") as file:
        file.write(result.text)
    layout = result.layout
    typer.echo(
        f"{output}: D x P x G = {layout.D} x {layout.P} x {layout.G}, N = {layout.N}. Run it: fairchem -c {output}",
        err=True,
    )
    if result.has_defaults and output.resolve().parent != job_file.resolve().parent:
        typer.echo(
            "its defaults list names files beside the original: add "
            f"\"hydra.searchpath=['{job_file.resolve().parent}']\"",
            err=True,
        )
