"""Data for `stock_uma.yaml`: two data sets on disk and the overrides that point the job at them.

overrides = prepare(omat=frames_with_stress, omol=frames_without, folder=tmp_path)
config = get_hydra_config_from_yaml(str(STOCK_JOB), [*overrides, "steps=2"])
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.io import read

from fairchem_janus.data.aselmdb import fit_element_references, force_rms, write_split
from fairchem_janus.data.demo import demo_frame

STOCK_JOB = Path(__file__).with_name("stock_uma.yaml")


def prepare(*, omat: Sequence[Atoms], omol: Sequence[Atoms], folder: Path) -> list[str]:
    """Write both data sets (the last fifth of each is for validation) and fitted references under `folder`."""
    references: dict[str, list[float]] = {}
    training: list[Atoms] = []
    for name, frames in (("omat", list(omat)), ("omol", [_without_cell(atoms) for atoms in omol])):
        cut = len(frames) - max(1, len(frames) // 5)
        for split, part in (("train", frames[:cut]), ("val", frames[cut:])):
            write_split(part, folder / name / split, sids=[f"{name}-{split}-{i}" for i in range(len(part))])
        references[f"{name}_elem_refs"] = fit_element_references(frames[:cut])
        training += frames[:cut]
    (folder / "element_refs").mkdir()
    lines = [f"{name}: {json.dumps(values)}" for name, values in references.items()]
    (folder / "element_refs" / "fitted.yaml").write_text("\n".join(lines) + "\n")
    return [
        f"hydra.searchpath=['{folder}']",
        "element_refs=fitted",
        f"data_root='{folder}'",
        f"job.run_dir='{folder / 'runs'}'",
        f"normalizer_rmsd={force_rms(training)}",
    ]


def prepare_real(data: Path, folder: Path, *, num_frames: int = 60) -> list[str]:
    """`prepare` with every n-th frame of the real data: crystals with stress, and molecules."""
    omat, omol = (read(data / name, ":") for name in ("crystals_si_mo.extxyz", "molecules.extxyz"))
    return prepare(
        omat=omat[:: max(1, len(omat) // num_frames)], omol=omol[:: max(1, len(omol) // num_frames)], folder=folder
    )


def prepare_demo(folder: Path, *, num_frames: int = 20) -> list[str]:
    """`prepare` with EMT frames: bulk, and the clusters among the surface frames."""
    omat = [demo_frame("emt_bulk", "train", i, seed=1) for i in range(num_frames)]
    surface = [demo_frame("emt_surface", "train", i, seed=1) for i in range(2 * num_frames)]
    return prepare(omat=omat, omol=[a for a in surface if not a.pbc.any()], folder=folder)


def _fake_dataset_module() -> ModuleType:
    """fairchem's `components/benchmark/fake_dataset.py` alone: its package imports what fairchem does not install."""
    package = find_spec("fairchem.core.components")
    assert package is not None and package.submodule_search_locations
    path = Path(package.submodule_search_locations[0]) / "benchmark" / "fake_dataset.py"
    spec = spec_from_file_location("fairchem_fake_dataset", path)
    assert spec is not None and spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _without_cell(atoms: Atoms) -> Atoms:
    """As UMA's molecules come: no cell (the job's `molecule_cell_size` makes one), a charge and a spin."""
    info = {"charge": atoms.info.get("charge", 0), "spin": atoms.info.get("spin", 1)}
    molecule = Atoms(atoms.numbers, atoms.positions, info=info, constraint=atoms.constraints)
    results = {"energy": atoms.get_potential_energy(), "forces": atoms.get_forces()}
    molecule.calc = SinglePointCalculator(molecule, **results)
    return molecule


def prepare_fake(
    folder: Path, *, num_frames: int = 60, sizes: tuple[int, int] = (2, 20), fix_atoms: bool = False
) -> list[str]:
    """`prepare` with fairchem's own fake structures: random atoms, random labels with stress on all of them.

    Args:
        sizes: atoms of the smallest and of the largest structure.
        fix_atoms: hold about a third of the atoms of every third structure, and all atoms of one.
    """
    fake = _fake_dataset_module()

    def frames(name: str, seed: int, *, pbc: bool) -> list[Atoms]:
        config = fake.FakeDatasetConfig(
            name=name,
            n_systems=num_frames,
            system_size_range=sizes,
            energy_std=2.0,
            energy_mean=0.0,
            forces_std=1.0,
            src="",
            seed=seed,
            pbc=pbc,
        )
        structures = fake.generate_structures(config)
        if fix_atoms:
            for index in range(0, num_frames, 3):
                structures[index].set_constraint(FixAtoms(range(0, len(structures[index]), 3 if index else 1)))
        return structures

    return prepare(omat=frames("omat", 0, pbc=True), omol=frames("omol", 1, pbc=False), folder=folder)
