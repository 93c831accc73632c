"""`fairchem-janus data stats DB ...`: sizes, edges, normalisers and element references, as YAML for a job."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command `stats` to `app`."""

    @app.command()
    def stats(
        sources: Annotated[
            list[str], typer.Argument(help="Data sets: folders or files, .aselmdb or any that ASE reads.")
        ],
        cutoff: Annotated[float, typer.Option(help="A, for the edges.")] = 6.0,
        max_neighbors: Annotated[int | None, typer.Option(help="Edges that an atom keeps; default all.")] = None,
        name: Annotated[list[str] | None, typer.Option(help="Name of each data set, in order.")] = None,
        write_metadata: Annotated[
            bool, typer.Option("--write-metadata", help="Write metadata.npz (natoms, edges) beside the databases.")
        ] = False,
    ) -> None:
        """Print what a training job wants to know of its data: a summary, then YAML ready to paste."""
        from fairchem_janus.data.stats import data_stats, to_yaml
        from fairchem_janus.data.stats import write_metadata as write

        try:
            if name and len(name) != len(sources):
                raise ValueError(f"{len(name)} names (--name) for {len(sources)} data sets")
            found = [
                data_stats(
                    source,
                    cutoff,
                    max_neighbors=max_neighbors,
                    name=name[position] if name else None,
                    trust_metadata=not write_metadata,
                )
                for position, source in enumerate(sources)
            ]
            typer.echo(to_yaml(found), nl=False)
            if write_metadata:
                for source, one in zip(sources, found, strict=True):
                    typer.echo(f"# written: {write(source, one, max_neighbors=max_neighbors)}")
        except (ValueError, OSError) as error:
            typer.echo(f"error: {error}", err=True)
            raise typer.Exit(1) from error
