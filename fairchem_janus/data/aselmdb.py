"""Frames to fairchem's `ase_db` format, and the two fits that a training job wants from them.

A fairchem data set is a folder per split: `data.NNNN.aselmdb` files (an LMDB behind ASE's database interface) and
`metadata.npz` with `natoms`, one entry per frame, from which the samplers pack batches without opening the frames. This
is the layout of fairchem's `scripts/create_finetune_dataset.py`, and so are the element references and the force RMS::

    write_aselmdb(Path("data/train"), frames)        # any number of frames, streamed
    write_split(frames, Path("data/train"), sids=[f"train-{i:05d}" for i in range(len(frames))])
    references = fit_element_references(frames)      # energy ~ sum_i references[Z_i]
    rmsd = force_rms(frames)                         # one scale for energies, forces and stresses, as in UMA

fairchem looks for `metadata.npz` in the folder of the database and assigns its entries by position, so a second data
set in the same folder would read the first one's sizes: the writer refuses that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.db import connect
from numpy.typing import ArrayLike

NUM_ELEMENTS = 100
"""Length of an element-reference list: fairchem's `max_num_elements`, index = atomic number."""

FRAMES_PER_FILE = 20_000
"""Rows per file of a folder: on every write the LMDB backend searches its list of ids, quadratic in the rows."""


def write_aselmdb(
    path: str | Path, atoms_list: Iterable[Atoms], *, columns: Mapping[str, ArrayLike] | None = None
) -> list[Path]:
    """Write frames and their `metadata.npz` so that fairchem's `ase_db` data set reads them in this order.

    Args:
        path: a new folder (`data/train`, gets `data.0000.aselmdb`, ...), or one file in a folder of its own
            (`data/train/data.aselmdb`).
        atoms_list: frames; a `SinglePointCalculator` holds the labels (energy eV, forces eV/A, stress eV/A^3),
            `atoms.info` becomes the data of the row, its `sid` the id that later messages use.
        columns: further metadata, name -> one entry per frame, such as edge counts; a mapping filled while
            `atoms_list` is consumed is fine.

    Returns the database files. On an error nothing is left behind.

    Raises:
        FileExistsError: the folder holds a database or metadata already (LMDB would append).
        ValueError: no frames, a frame without atoms, labels that belong to other positions (ASE would drop them
            without a word), or a column of the wrong length.
    """
    path = Path(path)
    single = path.suffix == ".aselmdb"
    folder = path.parent if single else path
    folder.mkdir(parents=True, exist_ok=True)
    if present := sorted([*folder.glob("*.aselmdb"), *folder.glob("metadata.npz")]):
        raise FileExistsError(f"{present[0]} exists; delete it or choose another folder, one for every data set")

    files: list[Path] = []
    natoms: list[int] = []
    database = None
    try:
        for index, atoms in enumerate(atoms_list):
            _check_writable(atoms, index)
            if database is None or (not single and index % FRAMES_PER_FILE == 0):
                if database is not None:
                    database.__exit__(None, None, None)
                files.append(path if single else path / f"data.{len(files):04d}.aselmdb")
                database = connect(str(files[-1]), type="aselmdb", use_lock_file=False).__enter__()
            database.write(atoms, data=dict(atoms.info))
            natoms.append(len(atoms))
        if database is None:
            raise ValueError(f"no frames to write into {path}")
        metadata: dict[str, Any] = {"natoms": np.array(natoms, dtype=np.int64)}
        for name, values in (columns or {}).items():
            metadata[name] = np.asarray(values)
            if len(metadata[name]) != len(natoms):
                raise ValueError(f"column '{name}' has {len(metadata[name])} entries for {len(natoms)} frames")
        database.__exit__(None, None, None)
        np.savez_compressed(folder / "metadata.npz", **metadata)
    except BaseException:
        for file in files:
            file.unlink(missing_ok=True)
        raise
    finally:
        # LMDB's reader table, useless once written: fairchem opens its files read-only and without locks
        for file in files:
            file.with_name(f"{file.name}-lock").unlink(missing_ok=True)
    return files


def _check_writable(atoms: Atoms, index: int) -> None:
    if len(atoms) == 0:
        raise ValueError(f"frame {index} has no atoms")
    if atoms.calc is not None and (changed := atoms.calc.check_state(atoms)):
        raise ValueError(
            f"frame {index}: its labels belong to another state ({', '.join(changed)} changed since), so ASE would "
            f"not write them; attach a SinglePointCalculator with labels for this state"
        )


def write_split(frames: Sequence[Atoms], folder: Path, *, sids: Sequence[str]) -> None:
    """Write labelled frames into `folder/data.0000.aselmdb` and their sizes into `folder/metadata.npz`.

    Args:
        frames: structures with a `SinglePointCalculator`: energy in eV, forces in eV/A, stress (if any) in eV/A^3.
        folder: made here; must not hold an `.aselmdb` yet, since LMDB would append to it.
        sids: one id per frame. fairchem keeps only ids that are strings, so the row number it falls back on is lost,
            and with it the name of a frame in every later message.

    Raises:
        ValueError: no frames, a frame without energy and forces, or as many sids as frames are not given.
        FileExistsError: `folder` holds a data set already.
    """
    if not frames:
        raise ValueError(f"no frames to write into {folder}")
    if len(sids) != len(frames):
        raise ValueError(f"{len(frames)} frames but {len(sids)} sids for {folder}")
    for sid, atoms in zip(sids, frames, strict=True):
        if atoms.calc is None or not {"energy", "forces"} <= set(atoms.calc.results):
            raise ValueError(f"frame {sid} has no energy and forces; attach a SinglePointCalculator with both")
    write_aselmdb(folder, (_with_sid(atoms, sid) for sid, atoms in zip(sids, frames, strict=True)))


def _with_sid(atoms: Atoms, sid: str) -> Atoms:
    named = atoms.copy()
    named.info["sid"] = sid
    named.calc = atoms.calc
    return named


def fit_element_references(frames: Sequence[Atoms]) -> list[float]:
    """Per-element energies in eV by linear least squares over `frames`; 0 for elements that do not occur.

    `energy ~ sum_i references[Z_i]`. Where compositions do not determine it, the solution of smallest norm.
    """
    counts = np.array([np.bincount(atoms.numbers, minlength=NUM_ELEMENTS) for atoms in frames], dtype=np.float64)
    energies = np.array([atoms.get_potential_energy() for atoms in frames])
    return linear_references(counts, energies)


def linear_references(counts: np.ndarray, energies: np.ndarray) -> list[float]:
    """`fit_element_references` from the number of atoms of each element [M, 100] and the energies [M]."""
    present = counts.any(axis=0)
    references = np.zeros(NUM_ELEMENTS)
    references[present] = np.linalg.lstsq(counts[:, present], energies, rcond=None)[0]
    return references.tolist()


def force_rms(frames: Sequence[Atoms]) -> float:
    """Root mean square of all force components of `frames` in eV/A."""
    return float(np.sqrt(np.mean(np.concatenate([atoms.get_forces().ravel() for atoms in frames]) ** 2)))
