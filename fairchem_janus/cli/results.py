"""`fairchem-janus results`: runs side by side, from their run folders."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

WIDTH_OF_FILES = 200


def register(app: typer.Typer) -> None:
    app.command()(results)


def results(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that have run folders in them.")],
    csv_file: Annotated[Path | None, typer.Option("--csv", help="Write all columns here.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of the table.")] = False,
) -> None:
    """Show loss, throughput, bubble and memory of runs, and the settings in which they differ.

    Takes the run folders of sweeps, of shell loops over `fairchem -c JOB.yaml key=value`, and of plain fairchem jobs.

    Columns: the run and the settings that differ; status; step, steps done; loss, the mean over the last tenth of the
    reported steps; val loss, of the last evaluation; s/step, atoms/s and bubble, medians over the steps; memory GiB,
    the peak of the worst rank. A dash is what is not known, or a setting left at null.
    """
    from fairchem_janus.results.folder import find_runs
    from fairchem_janus.results.summary import summarize
    from fairchem_janus.results.table import json_rows, show, write_csv

    try:
        if csv_file is not None and not csv_file.parent.is_dir():
            raise ValueError(f"--csv {csv_file}: no such folder")
        runs = [summarize(folder) for folder in find_runs(folders)]
        if csv_file is not None:
            write_csv(runs, csv_file)
    except (ValueError, OSError) as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    if as_json:
        typer.echo(json.dumps(json_rows(runs), indent=1))
    else:
        show(runs, table_console())
    if csv_file is not None:
        typer.echo(f"written to {csv_file}", err=as_json)  # JSON has stdout to itself


def table_console() -> Console:
    """A console for wide tables: as wide as the terminal, or as a file may well be."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal else Console(width=WIDTH_OF_FILES)
