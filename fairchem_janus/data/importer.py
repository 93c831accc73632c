"""Import of labelled structures into the format that fairchem trains on, with every frame checked first.

    import_frames(["run1.extxyz", "run2.traj"], "data/train", ImportConfig(energy_key="REF_energy"))

A frame with NaN, a missing label or one of the wrong shape, a periodic cell without volume, coinciding atoms, an energy
far off what its composition explains, or a frame that came before (see `checks`) is an error that names file and frame;
with `skip_bad` the others are written and `skipped.csv` lists what was left out.

Two passes over the files, so that structures are never all in memory: the first checks, and keeps composition, energy
and a digest of each frame; the second writes.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from ase import Atoms
from ase.calculators.calculator import all_properties
from ase.calculators.singlepoint import SinglePointCalculator
from numpy.typing import NDArray

from fairchem_janus.data.aselmdb import write_aselmdb
from fairchem_janus.data.checks import (
    LABELS,
    ImportConfig,
    clean_labels,
    digest,
    energy_outliers,
    find_labels,
    frame_problems,
)
from fairchem_janus.data.edges import column_name, count_edges
from fairchem_janus.data.frames import Frame, FrameError, read_frames

SKIPPED_FILE = "skipped.csv"


@dataclass(slots=True)
class ImportReport:
    """What an import read, found and wrote."""

    num_read: int = 0
    labels: tuple[str, ...] = ()
    """Labels of the good frames."""
    problems: list[FrameError] = field(default_factory=list)
    """In reading order; a frame may have several."""
    num_written: int = 0
    files: list[Path] = field(default_factory=list)


class BadFramesError(ValueError):
    """Frames failed the checks and nothing was written; `problems` has them all, the message the first 20."""

    def __init__(self, report: ImportReport) -> None:
        self.problems = report.problems
        shown = [str(problem) for problem in self.problems[:20]]
        if len(self.problems) > len(shown):
            shown.append(f"... and {len(self.problems) - len(shown)} more")
        num_bad = len({(problem.path, problem.index) for problem in self.problems})
        super().__init__(
            f"{num_bad} of {report.num_read} frames are bad, nothing was written:\n  "
            + "\n  ".join(shown)
            + f"\n--skip-bad writes the others, and a list of these ({SKIPPED_FILE})"
        )


@dataclass(frozen=True, slots=True)
class _Record:
    """What is kept of a good frame."""

    path: Path
    index: int
    position: int
    """In reading order."""
    composition: tuple[NDArray, NDArray]
    energy: float
    has_stress: bool


def import_frames(
    sources: Sequence[str | Path],
    out: str | Path,
    config: ImportConfig | None = None,
    *,
    skip_bad: bool = False,
    cutoff: float | None = 6.0,
) -> ImportReport:
    """Check all frames of the sources and write them as a new fairchem data set, folder `out`.

    Args:
        sources: files, folders or globs (see `frames`), written in this order. A frame without `sid` gets
            `file name:index`, so that messages of the training job name it.
        skip_bad: write the good frames instead of raising; `out/skipped.csv` lists the others.
        cutoff: A; the metadata get the edges of each frame at this cutoff (None: natoms only).

    Raises BadFramesError for bad frames, ValueError if no frame is left or only some have a stress, and FileExistsError
    if `out` holds a data set already; nothing is written then.
    """
    config = config or ImportConfig()
    out = Path(out)
    if present := [*sorted(out.glob("*.aselmdb")), *sorted(out.glob("metadata.npz"))]:
        raise FileExistsError(f"{present[0]} exists; delete it or choose another folder")
    report, records = check_frames(sources, config)
    if report.num_read == 0:
        raise ValueError(f"no frames in {', '.join(str(source) for source in sources)}")
    if report.problems and not skip_bad:
        raise BadFramesError(report)
    if not records:
        raise ValueError(
            f"all {report.num_read} frames are bad, so nothing was written; the first: {report.problems[0]}"
        )
    report.labels = _common_labels(records, config)

    good = {(record.path, record.index) for record in records}
    nedges: list[int] = []

    def frames() -> Iterator[Atoms]:
        for source in sources:
            for frame in read_frames(source, on_error=lambda _: None):
                if (frame.path, frame.index) in good:
                    good.remove((frame.path, frame.index))  # a file given twice is written once
                    if cutoff:
                        nedges.append(count_edges(frame.atoms, cutoff))
                    yield _labelled(frame, config, report.labels)

    report.files = write_aselmdb(out, frames(), columns={column_name(cutoff): nedges} if cutoff else None)
    report.num_written = len(records)
    if report.problems:
        with (out / SKIPPED_FILE).open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["file", "frame", "problem"])
            rows.writerows((problem.path, problem.index, problem.problem) for problem in report.problems)
    return report


def check_frames(sources: Sequence[str | Path], config: ImportConfig) -> tuple[ImportReport, list[_Record]]:
    """The first pass: a report with every problem, and what is known of the good frames."""
    report = ImportReport()
    found: list[tuple[int, FrameError]] = []
    records: list[_Record] = []
    seen: dict[bytes, tuple[str, float]] = {}

    def unreadable(error: FrameError) -> None:
        found.append((report.num_read, error))
        report.num_read += 1

    for source in sources:
        for frame in read_frames(source, on_error=unreadable):
            position = report.num_read
            report.num_read += 1
            problems = frame_problems(frame.atoms, config)
            if not problems:
                labels = find_labels(frame.atoms, config)
                energy = float(np.asarray(labels["energy"]).item())
                key = digest(frame.atoms)
                if key in seen:
                    first, first_energy = seen[key]
                    other = "" if energy == first_energy else f", with energy {energy} eV instead of {first_energy} eV"
                    problems = [f"duplicate of {first}{other}"]
                else:
                    seen[key] = (str(frame), energy)
                    composition = np.unique(frame.atoms.numbers, return_counts=True)
                    records.append(_Record(frame.path, frame.index, position, composition, energy, "stress" in labels))
            found += [(position, FrameError(frame.path, frame.index, text)) for text in problems]

    outliers = energy_outliers([r.composition for r in records], [r.energy for r in records], config)
    found += [(records[i].position, FrameError(records[i].path, records[i].index, t)) for i, t in outliers.items()]
    report.problems = [error for _, error in sorted(found, key=lambda entry: entry[0])]
    return report, [record for i, record in enumerate(records) if i not in outliers]


def _common_labels(records: list[_Record], config: ImportConfig) -> tuple[str, ...]:
    if config.labels != "auto":
        return config.required
    num_stress = sum(record.has_stress for record in records)
    if 0 < num_stress < len(records):
        without = next(record for record in records if not record.has_stress)
        raise ValueError(
            f"{num_stress} of {len(records)} frames have a stress, {without.path} frame {without.index} is the first "
            f"without: leave it out of all with --labels ef, or ask for it with --labels efs"
        )
    return LABELS["efs" if num_stress else "ef"]


def _labelled(frame: Frame, config: ImportConfig, labels: tuple[str, ...]) -> Atoms:
    """The frame as it is written: its labels in a calculator, under their usual names and nowhere else.

    fairchem prefers `info["energy"]` and the like to the calculator's results, so none may stay there.
    """
    found = clean_labels({name: value for name, value in find_labels(frame.atoms, config).items() if name in labels})
    atoms = frame.atoms.copy()
    for label in LABELS["efs"]:
        for name in (label, getattr(config, f"{label}_key")):
            atoms.info.pop(name, None)
            atoms.arrays.pop(name, None)
    atoms.info["sid"] = str(atoms.info.get("sid", f"{frame.path.name}:{frame.index}"))
    others = frame.atoms.calc.results if frame.atoms.calc is not None else {}
    kept = {name: value for name, value in others.items() if name in all_properties and name not in LABELS["efs"]}
    atoms.calc = SinglePointCalculator(atoms, **kept, **found)
    return atoms
