"""The embedded demo data: seven metals and their alloys, labelled with ASE's EMT potential.

EMT (effective medium theory, Jacobsen et al., Surf. Sci. 366, 394 (1996)) is real many-body physics that takes
milliseconds, so a first training run needs no download. Two data sets with different labels, as in a UMA job:

| data set      | frames                                             | labels                    |
|---------------|----------------------------------------------------|---------------------------|
| `emt_bulk`    | strained, rattled supercells; periodic in 3D       | energy, forces, stress    |
| `emt_surface` | slabs (periodic in 2D) and clusters (not periodic) | energy, forces            |

Sizes run from 2 to about 100 atoms with a long tail: most frames are small, a few are large, which is what makes
packing graphs into micro-batches worth thinking about. A frame depends on (seed, data set, split, index) only: asking
for more frames never changes the ones there were.

    write_demo(Path("demo"), num_train=200, num_val=40, seed=0)

writes `demo/emt_bulk/train/*.aselmdb` and so on, and `demo/demo.yaml` with what a job file wants to know of the data.
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.build import bulk, fcc100, fcc110, fcc111
from ase.calculators.emt import EMT
from ase.calculators.singlepoint import SinglePointCalculator
from ase.data import atomic_numbers, reference_states
from omegaconf import OmegaConf

from fairchem_janus.data.aselmdb import fit_element_references, force_rms, write_split

METALS = ("Ag", "Al", "Au", "Cu", "Ni", "Pd", "Pt")
"""What EMT describes well; all of them fcc."""

LATTICE = {metal: reference_states[atomic_numbers[metal]]["a"] for metal in METALS}
"""Experimental lattice constants in A, close to EMT's own."""

MIN_ATOMS, MAX_ATOMS = 2, 100
MEDIAN_ATOMS, SIZE_SPREAD = 10.0, 0.9
"""Sizes are log-normal, clipped to [MIN_ATOMS, MAX_ATOMS]: mean about 15, one frame in twenty above 44."""

MAX_FORCE = 8.0
"""Frames with a larger force on an atom (eV/A) are drawn again: two atoms came too close for EMT to mean anything."""

VACUUM = 8.0
"""Empty space on each side of a slab in A; the potential ends below 6 A."""


@dataclass(kw_only=True, slots=True)
class DemoSummary:
    """What `write_demo` wrote; `demo.yaml` holds the same."""

    root: Path
    """The folder, absolute."""

    force_rms: float
    """RMS of the training forces of both data sets in eV/A, the job's normaliser."""

    num_atoms: dict[str, dict[str, list[int]]]
    """Data set -> split -> atoms per frame."""

    reused: bool
    """Whether the folder held the very same data already and nothing was written."""


def draw_size(rng: np.random.Generator) -> int:
    """How many atoms the next frame should have; see MEDIAN_ATOMS."""
    return int(np.clip(round(MEDIAN_ATOMS * np.exp(SIZE_SPREAD * rng.standard_normal())), MIN_ATOMS, MAX_ATOMS))


def draw_alloy(rng: np.random.Generator, num_atoms: int) -> tuple[list[str], float]:
    """One to three metals mixed at random: the symbol of each atom, and Vegard's lattice constant in A."""
    metals = rng.choice(METALS, size=rng.integers(1, 4), replace=False)
    symbols = [str(s) for s in rng.choice(metals, size=num_atoms, p=rng.dirichlet(np.ones(len(metals))))]
    return symbols, float(np.mean([LATTICE[s] for s in symbols]))


def _closest(options: list[tuple[int, int, int]], sizes: list[int], target: int, rng: np.random.Generator) -> int:
    """Index of an option whose size is nearest to `target`, ties at random."""
    distance = np.abs(np.array(sizes) - target)
    return int(rng.choice(np.flatnonzero(distance == distance.min())))


def draw_bulk(rng: np.random.Generator) -> Atoms:
    """An fcc supercell, strained by a few per cent in all six components and rattled."""
    repeats = [(i, j, k) for i in range(1, 5) for j in range(1, 5) for k in range(1, 5)]
    options = [(cubic, r) for cubic in (False, True) for r in repeats]
    sizes = [(4 if cubic else 1) * int(np.prod(r)) for cubic, r in options]
    allowed = [i for i, size in enumerate(sizes) if MIN_ATOMS <= size <= MAX_ATOMS]
    pick = allowed[_closest(repeats, [sizes[i] for i in allowed], draw_size(rng), rng)]
    cubic, repeat = options[pick]
    symbols, a = draw_alloy(rng, sizes[pick])
    atoms = bulk("Cu", "fcc", a=a, cubic=cubic) * repeat
    atoms.symbols[:] = symbols
    strain = 0.025 * rng.standard_normal((3, 3))
    atoms.set_cell(atoms.cell @ (np.eye(3) + (strain + strain.T) / 2), scale_atoms=True)
    return atoms


def draw_slab(rng: np.random.Generator) -> Atoms:
    """Two to five layers of a low-index surface, sometimes with a vacancy."""
    facet = (fcc100, fcc110, fcc111)[rng.integers(3)]
    options = [(i, j, layers) for i in range(1, 6) for j in range(1, 6) for layers in range(2, 6)]
    options = [o for o in options if np.prod(o) <= MAX_ATOMS]
    repeat = options[_closest(options, [int(np.prod(o)) for o in options], draw_size(rng), rng)]
    symbols, a = draw_alloy(rng, int(np.prod(repeat)))
    atoms = facet("Cu", size=repeat, a=a * rng.uniform(0.97, 1.03), vacuum=VACUUM)
    atoms.symbols[:] = symbols
    if len(atoms) > 8 and rng.random() < 0.3:
        del atoms[int(np.argmax(atoms.positions[:, 2]))]
    return Atoms(atoms.symbols, atoms.positions, cell=atoms.cell, pbc=atoms.pbc)  # without ASE's surface notes


def draw_cluster(rng: np.random.Generator) -> Atoms:
    """The atoms of an fcc crystal nearest to a random point, from a dimer up; no cell."""
    num_atoms = draw_size(rng)
    symbols, a = draw_alloy(rng, num_atoms)
    block = bulk("Cu", "fcc", a=a * rng.uniform(0.93, 1.04), cubic=True) * (6, 6, 6)
    centre = block.cell.sum(axis=0) / 2 + rng.uniform(0, a, size=3)
    nearest = np.argsort(np.linalg.norm(block.positions - centre, axis=1), kind="stable")[:num_atoms]
    return Atoms(symbols, block.positions[nearest] - centre, pbc=False)


DATASETS: dict[str, dict[str, Callable[[np.random.Generator], Atoms]]] = {
    "emt_bulk": {"bulk": draw_bulk},
    "emt_surface": {"slab": draw_slab, "cluster": draw_cluster},
}
"""Data set -> family -> how to draw a frame of it; families of a data set take turns."""

SPLITS = ("train", "val")


def label(atoms: Atoms) -> Atoms:
    """A copy with EMT's energy and forces attached, and the stress (ASE's sign) if it is periodic in 3D."""
    properties = ["energy", "forces", *(["stress"] if atoms.pbc.all() else [])]
    atoms = atoms.copy()
    atoms.calc = EMT()
    results = {name: atoms.calc.get_property(name, atoms) for name in properties}
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def demo_frame(dataset: str, split: str, index: int, seed: int) -> Atoms:
    """The labelled frame `index` of a split: a function of its arguments alone."""
    rng = np.random.default_rng([seed, sorted(DATASETS).index(dataset), SPLITS.index(split), index])
    families = sorted(DATASETS[dataset])
    family = families[index % len(families)]
    while True:
        atoms = DATASETS[dataset][family](rng)
        atoms.positions += rng.uniform(0.02, 0.15) * rng.standard_normal((len(atoms), 3))
        atoms.info = {"family": family}
        atoms = label(atoms)
        if np.abs(atoms.get_forces()).max() <= MAX_FORCE:
            return atoms


def write_demo(out_dir: Path, *, num_train: int = 200, num_val: int = 40, seed: int = 0) -> DemoSummary:
    """Write both data sets and `demo.yaml` into `out_dir`; half of the frames of a split go to each data set.

    The data is written beside `out_dir` first and moved there when complete, so an interrupted call leaves nothing
    that looks like a data set. A folder that holds the same data (same counts and seed) is left as it is.

    Raises:
        ValueError: fewer than two frames in a split (one per data set), or a negative seed.
        FileExistsError: `out_dir` exists with anything else in it.
    """
    if num_train < 2 or num_val < 2:
        raise ValueError(f"each split needs at least 2 frames, one per data set; got {num_train=}, {num_val=}")
    if seed < 0:
        raise ValueError(f"seed must not be negative, got {seed}")
    out_dir = out_dir.absolute()
    request = {"num_train": num_train, "num_val": num_val, "seed": seed}
    if _is_there(out_dir, request):
        return _summary(out_dir, reused=True)
    if out_dir.exists() and any(out_dir.iterdir()):
        raise FileExistsError(f"{out_dir} is not empty and does not hold this demo data; delete it or choose another")

    out_dir.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out_dir.name}-", dir=out_dir.parent))
    try:
        training_frames: list[Atoms] = []
        references: dict[str, list[float]] = {}
        for position, dataset in enumerate(sorted(DATASETS)):
            for split, total in (("train", num_train), ("val", num_val)):
                count = (total + 1 - position) // 2
                frames = [demo_frame(dataset, split, index, seed) for index in range(count)]
                sids = [f"{dataset}-{split}-{index:05d}" for index in range(count)]
                write_split(frames, partial / dataset / split, sids=sids)
                if split == "train":
                    references[dataset] = fit_element_references(frames)
                    training_frames += frames
        (partial / "demo.yaml").write_text(_demo_yaml(out_dir, request, force_rms(training_frames), references))
        partial.chmod(0o755)  # mkdtemp makes it private
        partial.rename(out_dir)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return _summary(out_dir, reused=False)


def _demo_yaml(root: Path, request: dict[str, int], rms: float, references: dict[str, list[float]]) -> str:
    """The config fragment for a job file: one top-level key, so that it can be a Hydra default."""
    lines = [
        "# Written by `fairchem-janus data demo`. A job file takes it in as a default, found through hydra.searchpath.",
        "demo:",
        "  # folder with DATASET/SPLIT/*.aselmdb and metadata.npz",
        f"  root: {json.dumps(str(root))}",
        f"  request: {json.dumps(request)}",
        "  # RMS of the training forces in eV/A: the normaliser of every task",
        f"  force_rms: {rms!r}",
        "  # eV by atomic number, fitted per data set: energy ~ sum over atoms",
        "  element_references:",
        *(f"    {dataset}: {json.dumps(values)}" for dataset, values in references.items()),
    ]
    return "\n".join(lines) + "\n"


def _is_there(root: Path, request: dict[str, int]) -> bool:
    """Whether `root` holds the very data that is asked for, and was not moved there."""
    if not (root / "demo.yaml").is_file():
        return False
    found = OmegaConf.load(root / "demo.yaml").demo
    return found.request == request and found.root == str(root)


def _summary(root: Path, *, reused: bool) -> DemoSummary:
    """Read back what is in `root`."""
    num_atoms = {
        dataset: {split: np.load(root / dataset / split / "metadata.npz")["natoms"].tolist() for split in SPLITS}
        for dataset in sorted(DATASETS)
    }
    rms = OmegaConf.load(root / "demo.yaml").demo.force_rms
    return DemoSummary(root=root, force_rms=rms, num_atoms=num_atoms, reused=reused)
