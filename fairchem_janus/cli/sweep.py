"""`fairchem-janus sweep`: a job file in many variants, one after another or a few at a time, and a table at the end."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    app.command()(sweep)


def sweep(
    config: Annotated[Path, typer.Option("-c", "--config", help="The job file.")],
    overrides: Annotated[
        list[str] | None, typer.Argument(help="Hydra overrides; with several values (a,b or range(1,4)) they vary.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time; they share this machine's devices.")] = 1,
    sweep_dir: Annotated[
        Path | None, typer.Option(help="Folder for the run folders; default sweeps/NAME_OF_THE_JOB_FILE.")
    ] = None,
) -> None:
    """Run a job through fairchem with every combination of the given values, and show what came out.

    An example: fairchem-janus sweep -c JOB.yaml runner.janus.wave_size=2,4,8 lr=1e-4,4e-4 --jobs 2

    Run again, it leaves finished runs alone, resumes interrupted ones from their last checkpoint, and starts failed
    ones again. Ctrl-C ends all. Exits with 1 if a run did not finish, with 2 if nothing was started, and with 130
    after Ctrl-C.

    The table has this command's runs. Columns: the overrides that vary; status; step, steps done; loss, the mean over
    the last tenth of the reported steps; val loss, of the last evaluation; s/step, atoms/s and bubble, medians over
    the steps; memory GiB, the peak of the worst rank.
    """
    logging.disable(logging.INFO)
    from rich.console import Console
    from rich.markup import escape

    from fairchem_janus.cli.results import table_console
    from fairchem_janus.results.summary import summarize
    from fairchem_janus.results.table import show, write_csv
    from fairchem_janus.sweep import launch
    from fairchem_janus.sweep.expand import Member, expand

    folder = sweep_dir or Path("sweeps") / config.stem
    console = Console(soft_wrap=True, highlight=False)

    def report(member: Member, what: str) -> None:
        place = f"{members.index(member) + 1}/{len(members)}"
        console.print(f"{place} {escape(str(member))}: {escape(what)}")

    try:
        if not config.is_file():
            raise ValueError(f"{config}: no such job file")
        members = expand(overrides or [])
        variants = launch.Sweep(config, members, folder, launch.fairchem_command(), report)
        refused = variants.refused()
        if len(refused) == len(members):
            raise ValueError(refused[members[0]])
        launch.make_folder(folder)
    except ValueError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error
    completed = variants.run(jobs, refused=refused)
    runs = [summarize(run) for run in (member.folder_in(folder) for member in members) if run.is_dir()]
    if runs:
        show(runs, table_console())
        write_csv(runs, folder / "results.csv")
        where = f"written to {folder / 'results.csv'}; fairchem-janus results {folder} shows all runs of the folder"
        console.print(where, markup=False)
    if not completed:
        raise typer.Exit(130)
    if any(run.status not in launch.STAYS for run in runs):
        raise typer.Exit(1)
