"""What a training job wants to know of its data, and the YAML that tells it.

Sizes, edges at the model's cutoff, atoms per element, the RMS of the force components and linear element references,
one pass over each source. The references and the RMS are those of fairchem's `create_finetune_dataset.py`: references
by least squares of the total energy, the RMS over free atoms.

`to_yaml` gives a summary as comments, then `dataset_configs` and `tasks` as in `hydra_configs/quickstart.yaml`. As in
UMA, one RMS scales energies, forces and stresses of all data sets; references are fitted per data set, since energies
of different methods share no zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from ase.constraints import FixAtoms
from ase.data import chemical_symbols
from numpy.typing import NDArray

from fairchem_janus.data.aselmdb import NUM_ELEMENTS, linear_references
from fairchem_janus.data.balance import histogram
from fairchem_janus.data.edges import column_name
from fairchem_janus.data.frames import (
    DATABASE_SUFFIXES,
    Frame,
    FrameError,
    checked_frames,
    find_files,
    frame_edges,
    read_frames,
    read_metadata,
)

LABELS = ("energy", "forces", "stress")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataStats:
    """One source, M frames."""

    name: str
    """Name of the data set, for the job's YAML."""
    source: str
    cutoff: float
    natoms: NDArray
    """Atoms per frame [M]."""
    nedges: NDArray
    """Edges per frame at the cutoff [M]."""
    element_counts: dict[str, int]
    """Symbol -> atoms."""
    num_labelled: dict[str, int]
    """Label -> frames that have it."""
    num_periodic: int
    """Frames that are periodic in some direction."""
    squared_forces: float
    """Sum of the squared force components of free atoms, (eV/A)^2."""
    num_force_components: int
    references: list[float] | None
    """eV by atomic number [100]; None without energies."""
    residual_rms: float | None
    """RMS of the energy minus its references, eV/atom."""

    @property
    def force_rms(self) -> float | None:
        """RMS of the force components of free atoms, eV/A."""
        return force_rms([self])

    @property
    def common_labels(self) -> tuple[str, ...]:
        """Labels that every frame has."""
        return tuple(label for label in LABELS if self.num_labelled[label] == len(self.natoms))


def force_rms(stats: Sequence[DataStats]) -> float | None:
    """RMS over the force components of several data sets, eV/A; None if there are none."""
    total = sum(s.num_force_components for s in stats)
    return float(np.sqrt(sum(s.squared_forces for s in stats) / total)) if total else None


def data_stats(
    source: str | Path,
    cutoff: float = 6.0,
    *,
    max_neighbors: int | None = None,
    name: str | None = None,
    trust_metadata: bool = True,
) -> DataStats:
    """Read a source once.

    Args:
        source: see `frames`.
        cutoff: A, for the edges.
        max_neighbors: edges that an atom keeps, as in the job's backbone; None: all.
        name: of the data set; default: the file or folder name, without a split such as `train`.
        trust_metadata: False when the metadata are about to be rewritten; else they must agree with the frames.

    Raises ValueError for an empty source, for metadata that disagree with the data, and FrameError for labels that are
    not finite (`fairchem-janus data import` finds all of them).
    """
    natoms, nedges, counts, energies, energy_counts = [], [], np.zeros(NUM_ELEMENTS + 20, dtype=np.int64), [], []
    num_labelled = dict.fromkeys(LABELS, 0)
    num_periodic = num_components = 0
    squared = 0.0
    for frame in checked_frames(source) if trust_metadata else read_frames(source):
        atoms = frame.atoms
        natoms.append(len(atoms))
        nedges.append(frame_edges(frame, cutoff, max_neighbors=max_neighbors))
        composition = np.bincount(atoms.numbers, minlength=len(counts))
        counts += composition
        num_periodic += bool(atoms.pbc.any())
        labels = _labels(frame)
        for label in labels:
            num_labelled[label] += 1
        if "energy" in labels:
            energies.append(float(labels["energy"]))
            energy_counts.append(composition[:NUM_ELEMENTS])
        if "forces" in labels:
            free = np.ones(len(atoms), dtype=bool)
            for constraint in atoms.constraints:
                if isinstance(constraint, FixAtoms):
                    free[constraint.index] = False
            squared += float(np.square(labels["forces"][free]).sum())
            num_components += 3 * int(free.sum())

    if not natoms:
        raise ValueError(f"no frames in {source}")
    references = residual = None
    if energies:
        references = linear_references(np.array(energy_counts, dtype=float), np.array(energies))
        errors = np.array(energies) - np.array(energy_counts) @ np.array(references)
        residual = float(np.sqrt(np.mean((errors / np.sum(energy_counts, axis=1)) ** 2)))
    return DataStats(
        name=name or default_name(source),
        source=str(source),
        cutoff=cutoff,
        natoms=np.array(natoms, dtype=np.int64),
        nedges=np.array(nedges, dtype=np.int64),
        element_counts={chemical_symbols[z]: int(counts[z]) for z in np.flatnonzero(counts)},
        num_labelled=num_labelled,
        num_periodic=num_periodic,
        squared_forces=squared,
        num_force_components=num_components,
        references=references,
        residual_rms=residual,
    )


def _labels(frame: Frame) -> dict[str, NDArray]:
    results = frame.atoms.calc.results if frame.atoms.calc is not None else {}
    labels = {label: np.asarray(results[label]) for label in LABELS if results.get(label) is not None}
    for label, value in labels.items():
        if not np.isfinite(value).all():
            problem = f"{label} is NaN or infinite; fairchem-janus data import --skip-bad leaves such frames out"
            raise FrameError(frame.path, frame.index, problem)
    return labels


def default_name(source: str | Path) -> str:
    """Name of the data set at a path: `demo/metals/train` and `metals/train/data.0000.aselmdb` are `metals`."""
    path = Path(source).resolve()
    parts = [path.stem if path.suffix else path.name, *(parent.name for parent in path.parents)]
    names = [part for part in parts if part.split(".")[0] not in ("train", "val", "valid", "test", "data", "")]
    return names[0] if names else "data"


def write_metadata(source: str | Path, stats: DataStats, *, max_neighbors: int | None = None) -> Path:
    """Write `metadata.npz` (natoms, and edges at the cutoff) for a database that lacks it or has a wrong one.

    Other columns of an old file stay if its natoms were right. Raises ValueError where fairchem would read the file for
    other databases too, or not at all.
    """
    files = find_files(source)
    folder = files[0].parent
    others = sorted({*folder.glob("*.aselmdb")} - {*files})
    if any(file.suffix != ".aselmdb" for file in files):
        raise ValueError(
            f"{files[0]} is no .aselmdb file; write one with: fairchem-janus data import {source} --out ..."
        )
    if others:
        raise ValueError(
            f"{others[0]} in the same folder would use the metadata too; give every data set its own folder"
        )
    columns: dict[str, Any] = {"natoms": stats.natoms, column_name(stats.cutoff, max_neighbors): stats.nedges}
    old = read_metadata(folder)
    if old is not None and np.array_equal(old[1].get("natoms", ()), stats.natoms):
        columns = {**old[1], **columns}
    np.savez_compressed(folder / "metadata.npz", **columns)
    return folder / "metadata.npz"


def to_yaml(stats: Sequence[DataStats]) -> str:
    """Summary in comments, then the job's `dataset_configs` and `tasks` for these data sets."""
    names = [s.name for s in stats]
    if twice := {name for name in names if names.count(name) > 1}:
        raise ValueError(f"several data sets are called {', '.join(sorted(twice))}; name each with --name")
    rms = force_rms(stats)
    lines = [f"# {line}".rstrip() for s in stats for line in [*summary(s).splitlines(), ""]]
    if rms is not None:
        lines.append(f"# RMS of the force components of all of them: {rms:.6g} eV/A, the normalizer's rmsd below")
    lines.append(
        "# the model: names of tasks are DATASET_PROPERTY, as DatasetSpecificSingleHeadWrapper calls its outputs"
    )
    block = {
        "dataset_configs": {s.name: _dataset_config(s) for s in stats},
        "tasks": [_task(s, label, 1.0 if rms is None else rms) for s in stats for label in s.common_labels],
    }
    return "\n".join(lines) + "\n" + yaml.safe_dump(block, sort_keys=False, default_flow_style=None, width=110)


def summary(stats: DataStats) -> str:
    """What a person wants to see of a data set, as text."""
    frames, total = len(stats.natoms), int(stats.natoms.sum())
    lines = [
        f"{stats.name}: {stats.source}",
        f"  {frames} frames, {stats.num_periodic} of them periodic, {total} atoms",
    ]
    for title, values in (("atoms", stats.natoms), (f"edges at {stats.cutoff:g} A", stats.nedges)):
        low, median, high = np.percentile(values, (0, 50, 100))
        lines.append(f"  {title} per frame: {low:g} to {high:g}, median {median:g}, mean {values.mean():.4g}")
    lines.append(f"  edges per atom: {stats.nedges.sum() / total:.4g}")
    lines.append("  atoms per element: " + ", ".join(f"{symbol} {n}" for symbol, n in stats.element_counts.items()))
    lines.append("  labelled frames: " + ", ".join(f"{label} {n}" for label, n in stats.num_labelled.items()))
    if stats.force_rms is not None:
        lines.append(f"  RMS of the force components: {stats.force_rms:.6g} eV/A")
    if stats.residual_rms is not None:
        lines.append(f"  RMS of the energy off its element references: {stats.residual_rms:.4g} eV/atom")
    partial = [label for label in LABELS if 0 < stats.num_labelled[label] < frames]
    if not all(file.suffix in DATABASE_SUFFIXES for file in find_files(stats.source)):
        lines.append("  fairchem does not read this format, write one that it reads: fairchem-janus data import")
    if partial:
        lines.append(f"  not every frame has {', '.join(partial)}: no task is written for that")
    return "\n".join([*lines, "  atoms per frame", *("  " + line for line in histogram(stats.natoms).splitlines())])


def _dataset_config(stats: DataStats) -> dict[str, Any]:
    labels = stats.common_labels
    transforms: dict[str, Any] = {"common_transform": {"dataset_name": stats.name}}
    if "stress" in labels:
        transforms["stress_reshape_transform"] = {"dataset_name": stats.name}
    return {
        "splits": {"train": {"src": str(Path(stats.source).resolve())}},
        "format": "ase_db",
        "a2g_args": {**{f"r_{label}": label in labels for label in LABELS}, "r_edges": False},
        "key_mapping": {label: f"{stats.name}_{label}" for label in labels},
        "transforms": transforms,
    }


def _task(stats: DataStats, label: str, rmsd: float) -> dict[str, Any]:
    loss, coefficient = {
        "energy": ("PerAtomMAELoss", 20),
        "forces": ("L2NormLoss", 2),
        "stress": ("MAELoss", 1),
    }[label]  # the weights of fairchem's fine-tuning template
    loss_fn: dict[str, Any] = {
        "_target_": "fairchem.core.modules.loss.DDPMTLoss",
        "loss_fn": {"_target_": f"fairchem.core.modules.loss.{loss}"},
        "coefficient": coefficient,
    }
    task: dict[str, Any] = {
        "_target_": "fairchem.core.units.mlip_unit.mlip_unit.Task",
        "name": f"{stats.name}_{label}",
        "datasets": [stats.name],
        "level": "atom" if label == "forces" else "system",
        "property": label,
        "out_spec": {"dim": {"energy": [1], "forces": [3], "stress": [1, 9]}[label], "dtype": "float32"},
        "normalizer": {
            "_target_": "fairchem.core.modules.normalization.normalizer.Normalizer",
            "mean": 0.0,
            "rmsd": rmsd,
        },
        "loss_fn": loss_fn,
    }
    if label == "energy":
        task["metrics"] = ["mae", "per_atom_mae"]
        task["element_references"] = {
            "_target_": "fairchem.core.modules.normalization.element_references.ElementReferences",
            "element_references": {"_target_": "torch.DoubleTensor", "_args_": [stats.references]},
        }
    else:
        loss_fn["reduction"] = "mean"
        task["metrics"] = ["mae", "cosine_similarity", "magnitude_error"] if label == "forces" else ["mae"]
    if label == "forces":
        task |= {"train_on_free_atoms": True, "eval_on_free_atoms": True}
    return task
