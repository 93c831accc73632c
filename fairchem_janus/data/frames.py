"""Structures from files, each with the name by which an error can point at it: file and frame index.

A *source* is what a fairchem data set takes as `src` (an `.aselmdb` file, a folder of them, a glob) or any file that
ASE reads: extxyz, `.traj`, ASE databases (`.db`, `.json`). Nothing here imports torch, and one frame is in memory at a
time.

fairchem and its samplers trust `metadata.npz`; `checked_frames` compares it with the frames that are really there.
"""

from __future__ import annotations

import glob
import io
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import ase.db
import ase.io
import numpy as np
from ase import Atoms
from numpy.typing import NDArray

from fairchem_janus.data.edges import column_name, count_edges

XYZ_SUFFIXES = (".xyz", ".extxyz")
DATABASE_SUFFIXES = (".aselmdb", ".db", ".json")
FOLDER_SUFFIXES = (*XYZ_SUFFIXES, ".traj", ".db", ".json")
"""What is taken from a folder without `.aselmdb` files; a file given by name may have any format that ASE reads."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A structure and where it came from."""

    path: Path
    index: int
    """Position in the file, from 0."""
    atoms: Atoms

    def __str__(self) -> str:
        return f"{self.path} frame {self.index}"


class FrameError(ValueError):
    """A frame that cannot be used; says which and why."""

    def __init__(self, path: Path, index: int, problem: str) -> None:
        super().__init__(f"{path} frame {index}: {problem}")
        self.path, self.index, self.problem = path, index, problem


def find_files(source: str | Path) -> list[Path]:
    """The files of a source, sorted as fairchem sorts them. FileNotFoundError if there are none."""
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        files = [file for file in sorted(path.iterdir()) if file.is_file()]
        found = [f for f in files if f.suffix == ".aselmdb"] or [f for f in files if f.suffix in FOLDER_SUFFIXES]
    else:
        found = [Path(name) for name in sorted(glob.glob(str(source)))]
    if not found:
        raise FileNotFoundError(f"no structures in '{source}': give a file, a folder with .aselmdb files, or a glob")
    return found


def read_frames(source: str | Path, on_error: Callable[[FrameError], None] | None = None) -> Iterator[Frame]:
    """All frames of a source in order.

    A frame that cannot be read raises FrameError, or is passed to `on_error` and skipped; after it an extxyz file is
    read on as long as its frame headers can be followed, any other file is given up.
    """

    def failed(path: Path, index: int, problem: str) -> None:
        error = FrameError(path, index, problem)
        if on_error is None:
            raise error
        on_error(error)

    for path in find_files(source):
        index = 0
        try:
            for item in _read_file(path):
                if isinstance(item, Atoms):
                    yield Frame(path, index, item)
                else:
                    failed(path, index, item)
                index += 1
        except FrameError:
            raise
        except Exception as error:  # readers raise anything
            failed(path, index, f"cannot be read ({type(error).__name__}: {error})")


def _read_file(path: Path) -> Iterator[Atoms | str]:
    """Atoms, or the text of a problem with one frame."""
    if path.suffix in XYZ_SUFFIXES:
        with path.open() as file:
            yield from _read_xyz(file)
    elif path.suffix in DATABASE_SUFFIXES:
        options = {"readonly": True} if path.suffix == ".aselmdb" else {}
        database = ase.db.connect(str(path), use_lock_file=False, **options)
        for row in database.select():
            atoms = row.toatoms()
            # not row.key_value_pairs: there `charge` is ASE's own property, the sum of initial charges
            atoms.info.update({key: vars(row)[key] for key in row.key_value_pairs})
            atoms.info.update(row.data if isinstance(row.data, dict) else {})
            yield atoms
    else:
        yield from ase.io.iread(path, index=":")


def _read_xyz(file: TextIO) -> Iterator[Atoms | str]:
    """Frame by frame, so that one broken frame does not hide the others (ASE scans the whole file first)."""
    while header := file.readline():
        if not header.strip():
            continue
        try:
            natoms = int(header)
        except ValueError:
            yield f"expected the number of atoms, found {header.strip()[:60]!r}; the rest of the file is not read"
            return
        lines = [header, *(file.readline() for _ in range(natoms + 1))]
        if not lines[-1]:
            yield f"the file ends inside this frame of {natoms} atoms"
            return
        try:
            yield ase.io.read(io.StringIO("".join(lines)), format="extxyz", index=0)
        except Exception as error:
            yield f"cannot be read ({type(error).__name__}: {error})"


def read_metadata(source: str | Path) -> tuple[Path, dict[str, NDArray]] | None:
    """The `metadata.npz` that fairchem would use for this source and its columns; None if there is none."""
    path = Path(source)
    file = (path.parent if path.is_file() else path) / "metadata.npz"
    if path.suffix in (*XYZ_SUFFIXES, ".traj") or not file.is_file():
        return None
    with np.load(file, allow_pickle=False) as columns:
        return file, dict(columns)


def checked_frames(source: str | Path) -> Iterator[Frame]:
    """`read_frames`, with `natoms` of the metadata, if there are any, compared with every frame.

    Raises ValueError that names the entry and both sizes, and the command that puts it right.
    """
    metadata = read_metadata(source)
    if metadata is None:
        yield from read_frames(source)
        return
    file, columns = metadata
    natoms = columns.get("natoms", np.zeros(0, dtype=np.int64))
    repair = f"rewrite it: fairchem-janus data stats {source} --write-metadata"
    count = 0
    for frame in read_frames(source):
        if count == len(natoms):
            raise ValueError(f"{file} has {count} entries of natoms, but {source} has more frames; {repair}")
        if natoms[count] != len(frame.atoms):
            raise ValueError(
                f"{file} says {natoms[count]} atoms for entry {count}, but {frame} has {len(frame.atoms)}; {repair}"
            )
        count += 1
        yield frame
    if count != len(natoms):
        raise ValueError(f"{file} has {len(natoms)} entries of natoms, but {source} has only {count} frames; {repair}")


def load_sizes(source: str | Path, cutoff: float, *, max_neighbors: int | None = None) -> tuple[NDArray, NDArray]:
    """Atoms [M] and edges [M] of every frame: from the metadata if they hold both, else by reading the frames."""
    metadata = read_metadata(source)
    column = column_name(cutoff, max_neighbors)
    if metadata is not None and {"natoms", column} <= set(metadata[1]):
        return metadata[1]["natoms"], metadata[1][column]
    sizes = [
        (len(frame.atoms), frame_edges(frame, cutoff, max_neighbors=max_neighbors)) for frame in checked_frames(source)
    ]
    if not sizes:
        raise ValueError(f"no frames in {source}")
    natoms, nedges = np.array(sizes, dtype=np.int64).T
    return natoms, nedges


def frame_edges(frame: Frame, cutoff: float, *, max_neighbors: int | None = None) -> int:
    """`count_edges`, with the frame's name on its errors."""
    try:
        return count_edges(frame.atoms, cutoff, max_neighbors=max_neighbors)
    except ValueError as error:
        raise FrameError(frame.path, frame.index, str(error)) from error
