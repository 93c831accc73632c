"""`fairchem-janus data demo OUT_DIR`: write the embedded demo data set (see `fairchem_janus.data.demo`)."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Add the command `demo` to `app`."""

    @app.command()
    def demo(
        out_dir: Annotated[Path, typer.Argument(help="Folder for the data; made here, must be empty if it exists.")],
        num_train: Annotated[int, typer.Option(min=2, help="Training frames of both data sets together.")] = 200,
        num_val: Annotated[int, typer.Option(min=2, help="Validation frames of both data sets together.")] = 40,
        seed: Annotated[int, typer.Option(min=0, help="The same seed gives the same frames.")] = 0,
    ) -> None:
        """Write a small training set: metals and alloys labelled with ASE's EMT potential, as fairchem aselmdb."""
        import numpy as np
        from rich.console import Console
        from rich.table import Table

        from fairchem_janus.data.demo import write_demo

        try:
            summary = write_demo(out_dir, num_train=num_train, num_val=num_val, seed=seed)
        except FileExistsError as error:
            raise typer.BadParameter(str(error), param_hint="OUT_DIR") from error
        table = Table("data set", "split", "frames", "atoms", "median", "largest")
        for dataset, splits in summary.num_atoms.items():
            for split, sizes in splits.items():
                table.add_row(
                    dataset, split, str(len(sizes)), str(sum(sizes)), f"{np.median(sizes):g}", str(max(sizes))
                )
        console = Console(soft_wrap=True)
        console.print(table)
        done = "is already there" if summary.reused else "written"
        console.print(f"{summary.root / 'demo.yaml'} {done}; force RMS {summary.force_rms:.3f} eV/A", highlight=False)
