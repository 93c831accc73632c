#!/usr/bin/env python
"""Data for hydra_configs/uma_like.yaml: crystals with stress and molecules without, from extxyz files.

    scripts/prepare_uma_like.py --crystals crystals.extxyz --molecules molecules.extxyz runs/uma_like/data

Every sixth frame is for validation. Element references are fitted for each data set on its training frames. Writes
`crystals/{train,val}`, `molecules/{train,val}` and `uma_like_data.yaml`, which the job includes.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
import yaml
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.io import read

from fairchem_janus.data.aselmdb import fit_element_references, force_rms, write_split

VALIDATION_EVERY = 6


def main(
    folder: Annotated[Path, typer.Argument(help="A new folder.")],
    crystals: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="extxyz with E, F and stress.")],
    molecules: Annotated[Path, typer.Option(exists=True, dir_okay=False, help="extxyz with E and F.")],
) -> None:
    """Write both data sets and what the job needs to know of them."""
    references: dict[str, list[float]] = {}
    training: list[Atoms] = []
    for name, path in (("crystals", crystals), ("molecules", molecules)):
        frames = read(path, ":")
        if name == "molecules":
            frames = [_without_cell(atoms) for atoms in frames]
        splits = {
            "train": [atoms for i, atoms in enumerate(frames) if i % VALIDATION_EVERY],
            "val": frames[::VALIDATION_EVERY],
        }
        for split, part in splits.items():
            write_split(part, folder / name / split, sids=_names(name, split, part))
        references[name] = fit_element_references(splits["train"])
        training += splits["train"]
    job_data = {
        "root": str(folder.resolve()),
        "element_references": references,
        "force_rms": force_rms(training),
    }
    (folder / "uma_like_data.yaml").write_text(
        "# @package uma_like_data\n" + yaml.safe_dump(job_data, default_flow_style=None, sort_keys=False)
    )
    typer.echo(f"{len(training)} training frames; force RMS {job_data['force_rms']:.3f} eV/A; {folder}")


def _names(name: str, split: str, frames: Sequence[Atoms]) -> list[str]:
    return [f"{name}-{split}-{i:05d}" for i in range(len(frames))]


def _without_cell(atoms: Atoms) -> Atoms:
    molecule = Atoms(atoms.numbers, atoms.positions)
    results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    molecule.calc = SinglePointCalculator(molecule, **results)
    return molecule


if __name__ == "__main__":
    typer.run(main)
