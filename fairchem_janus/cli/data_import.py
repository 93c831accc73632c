"""`fairchem-janus data import FILE ... --out FOLDER`: check labelled structures and write what fairchem reads."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command `import` to `app`."""

    @app.command("import")
    def import_(
        sources: Annotated[
            list[str], typer.Argument(help="extxyz, .traj, ASE .db or .json, .aselmdb, folders, globs.")
        ],
        out: Annotated[Path, typer.Option(help="Folder of the new data set.")],
        energy_key: Annotated[str | None, typer.Option(help="Name of the energy (eV) in the files.")] = None,
        forces_key: Annotated[str | None, typer.Option(help="Name of the forces (eV/A).")] = None,
        stress_key: Annotated[str | None, typer.Option(help="Name of the stress (eV/A^3, ASE's sign).")] = None,
        labels: Annotated[
            str, typer.Option(help="Labels that every frame must have: e, ef, efs; auto: ef, and s if all have it.")
        ] = "auto",
        skip_bad: Annotated[bool, typer.Option("--skip-bad", help="Leave bad frames out, list them.")] = False,
        min_distance: Annotated[float, typer.Option(help="A; nearer atoms are an error.")] = 0.3,
        max_energy_sigma: Annotated[
            float, typer.Option(help="Standard deviations that the energy may be off a linear fit by composition.")
        ] = 8.0,
        cutoff: Annotated[float, typer.Option(help="A; edge counts at it go to the metadata, 0: none.")] = 6.0,
    ) -> None:
        """Import labelled structures as a fairchem data set (aselmdb with metadata), every frame checked."""
        from fairchem_janus.data.checks import ImportConfig
        from fairchem_janus.data.importer import SKIPPED_FILE, import_frames

        try:
            config = ImportConfig(
                energy_key=energy_key,
                forces_key=forces_key,
                stress_key=stress_key,
                labels=labels,
                min_distance=min_distance,
                max_energy_sigma=max_energy_sigma,
            )
            report = import_frames(sources, out, config, skip_bad=skip_bad, cutoff=cutoff or None)
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
        typer.echo(f"{report.num_written} of {report.num_read} frames with {', '.join(report.labels)} written to {out}")
        if report.problems:
            typer.echo(f"{report.num_read - report.num_written} left out, see {out / SKIPPED_FILE}")
