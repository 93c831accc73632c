"""What makes a labelled structure unfit for training: one function per promise, each returning plain sentences.

A wrong label does not stop a training run, it spoils it. `frame_problems` looks at a frame alone; `energy_outliers` and
`digest` compare it with the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from ase import Atoms
from ase.stress import full_3x3_to_voigt_6_stress
from numpy.typing import NDArray

from fairchem_janus.data.edges import min_distance

LABELS = {"e": ("energy",), "ef": ("energy", "forces"), "efs": ("energy", "forces", "stress")}
"""fairchem's `--regression-tasks` -> the labels that every frame must have."""

MIN_ENERGY_DEVIATION = 0.1
"""eV/atom. Smaller residuals of the linear fit are never called wrong, however narrow the others are."""

MIN_VOLUME = 0.1
"""A^3; fairchem (`AtomicData.from_ase`) refuses periodic structures below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportConfig:
    """What the labels are called and what is accepted."""

    energy_key: str | None = None
    """Name in `atoms.info` or among the calculator's results; None: the energy that ASE finds. eV."""
    forces_key: str | None = None
    """Name in `atoms.arrays` or among the calculator's results; None: the forces that ASE finds. eV/A, [n, 3]."""
    stress_key: str | None = None
    """Name in `atoms.info` or among the calculator's results; None: the stress that ASE finds. eV/A^3, ASE's sign,
    [6] in Voigt order, [3, 3] or [9]."""
    labels: str = "auto"
    """What every frame must have and what is written; auto: energy and forces, and stress if the frames have it."""
    min_distance: float = 0.3
    """A; nearer atoms, periodic images included, are an error."""
    max_energy_sigma: float = 8.0
    """Robust standard deviations that the energy per atom may be off the linear fit by composition."""

    def __post_init__(self) -> None:
        if self.labels not in ("auto", *LABELS):
            raise ValueError(f"labels must be auto, e, ef or efs, not '{self.labels}'")
        if not (self.min_distance >= 0 and self.max_energy_sigma > 0):
            raise ValueError(f"min_distance must not be negative, max_energy_sigma must be positive: {self}")

    @property
    def wanted(self) -> tuple[str, ...]:
        """Labels to look for."""
        return LABELS["efs" if self.labels == "auto" else self.labels]

    @property
    def required(self) -> tuple[str, ...]:
        """Labels without which a frame is bad."""
        return LABELS["ef" if self.labels == "auto" else self.labels]


def find_labels(atoms: Atoms, config: ImportConfig) -> dict[str, Any]:
    """The labels of a frame as they stand in the file, unchecked; those that are missing are left out."""
    results = atoms.calc.results if atoms.calc is not None else {}
    found = {}
    for label in config.wanted:
        key = getattr(config, f"{label}_key") or label
        own = atoms.arrays if label == "forces" else atoms.info
        value = own.get(key, results.get(key))
        if value is not None:
            found[label] = value
    return found


def clean_labels(labels: dict[str, Any]) -> dict[str, Any]:
    """Checked labels as ASE keeps them: energy a float, forces [n, 3], stress [6] in Voigt order."""
    cleaned: dict[str, Any] = {"energy": float(np.asarray(labels["energy"]).item())}
    if "forces" in labels:
        cleaned["forces"] = np.asarray(labels["forces"], dtype=float)
    if "stress" in labels:
        stress = np.asarray(labels["stress"], dtype=float)
        cleaned["stress"] = stress if stress.shape == (6,) else full_3x3_to_voigt_6_stress(stress.reshape(3, 3))
    return cleaned


def frame_problems(atoms: Atoms, config: ImportConfig) -> list[str]:
    """Everything wrong with this frame on its own."""
    if len(atoms) == 0:
        return ["no atoms"]
    return [*_geometry_problems(atoms, config), *_label_problems(atoms, config)]


def _geometry_problems(atoms: Atoms, config: ImportConfig) -> Iterator[str]:
    if (atoms.numbers < 1).any():
        yield f"atom {np.argmax(atoms.numbers < 1)} is of no known element"
    if not np.isfinite(atoms.positions).all():
        yield f"position of atom {np.argmin(np.isfinite(atoms.positions).all(axis=1))} is NaN or infinite"
        return
    if not np.isfinite(atoms.cell.array).all():
        yield "the cell has NaN or infinite entries"
        return
    if atoms.pbc.any() and abs(np.linalg.det(atoms.cell.array)) < MIN_VOLUME:
        lengths = np.round(atoms.cell.lengths(), 6).tolist()
        yield f"periodic (pbc {atoms.pbc.tolist()}) but its cell has no volume (lengths {lengths} A)"
        return
    try:
        distance, first, second = min_distance(atoms, config.min_distance)
    except ValueError as error:
        yield str(error)
        return
    if distance < config.min_distance:
        pair = f"atoms {first} and {second}" if first != second else f"atom {first} and its own periodic image"
        yield f"{pair} are {distance:.3g} A apart, nearer than {config.min_distance:g} A"


def _labels_there(atoms: Atoms) -> list[str]:
    """Names under which a frame has anything that may be a label."""
    results = {} if atoms.calc is None else getattr(atoms.calc, "results", {})
    return sorted({*atoms.info, *results, *(set(atoms.arrays) - {"numbers", "positions"})})


def _label_problems(atoms: Atoms, config: ImportConfig) -> Iterator[str]:
    labels = find_labels(atoms, config)
    shapes = {"energy": ((), (1,)), "forces": ((len(atoms), 3),), "stress": ((6,), (3, 3), (9,))}
    for label in config.wanted:
        key = getattr(config, f"{label}_key") or label
        name = label if key == label else f"{label} ('{key}')"
        if label not in labels:
            if label in config.required:
                yield f"{name} is missing; the frame has {', '.join(_labels_there(atoms)) or 'no labels at all'}"
            continue
        try:
            value = np.asarray(labels[label], dtype=float)
        except (TypeError, ValueError):
            yield f"{name} is not numeric: {str(labels[label])[:40]!r}"
            continue
        if value.shape not in shapes[label]:
            wanted = " or ".join(str(shape) for shape in shapes[label])
            yield f"{name} has shape {value.shape} instead of {wanted}"
        elif not np.isfinite(value).all():
            where = f" of atom {np.argmin(np.isfinite(value).all(axis=1))}" if label == "forces" else ""
            yield f"{name}{where} is NaN or infinite"


def digest(atoms: Atoms) -> bytes:
    """Equal for the same structure in the same state: elements, positions to 1e-6 A, cell, charge and spin."""
    parts = [atoms.numbers, np.round(atoms.positions, 6) + 0.0, atoms.pbc]
    if atoms.pbc.any():
        parts.append(np.round(atoms.cell.array, 6) + 0.0)
    state = repr((atoms.info.get("charge", 0), atoms.info.get("spin", 0)))
    return hashlib.sha1(b"|".join(part.tobytes() for part in parts) + state.encode(), usedforsecurity=False).digest()


def composition_residuals(compositions: Sequence[tuple[NDArray, NDArray]], energies: NDArray) -> NDArray:
    """Energy per atom minus what a linear fit by composition explains, in eV/atom [M].

    The fit minimises absolute deviations (reweighted least squares), so that a few wrong energies do not bend it.

    Args:
        compositions: per frame the elements that occur and how often.
        energies: eV [M].
    """
    elements = np.unique(np.concatenate([numbers for numbers, _ in compositions]))
    counts = np.zeros((len(compositions), len(elements)))
    for row, (numbers, occurrences) in enumerate(compositions):
        counts[row, np.searchsorted(elements, numbers)] = occurrences
    natoms = counts.sum(axis=1)
    counts, energies = counts / natoms[:, None], np.asarray(energies) / natoms
    weights = np.ones(len(energies))
    residuals = energies
    for _ in range(30):
        scaled = np.linalg.lstsq(counts * weights[:, None], energies * weights, rcond=None)[0]
        residuals = energies - counts @ scaled
        weights = 1 / np.sqrt(np.maximum(np.abs(residuals), 1e-6))
    return residuals


def energy_outliers(
    compositions: Sequence[tuple[NDArray, NDArray]], energies: Sequence[float], config: ImportConfig
) -> dict[int, str]:
    """Frames whose energy is far off the linear fit -> what is wrong with it.

    Far means more than `max_energy_sigma` robust standard deviations (1.4826 median absolute deviations) and more than
    MIN_ENERGY_DEVIATION. With fewer than 4 frames more than elements there is nothing to compare with, and no outlier.
    """
    num_elements = len({number for numbers, _ in compositions for number in numbers.tolist()})
    if len(energies) < num_elements + 4:
        return {}
    residuals = composition_residuals(compositions, np.asarray(energies, dtype=float))
    residuals = residuals - np.median(residuals)
    sigma = 1.4826 * np.median(np.abs(residuals))
    limit = max(config.max_energy_sigma * sigma, MIN_ENERGY_DEVIATION)
    return {
        index: f"energy {energies[index]:.6g} eV is {residuals[index]:+.3g} eV/atom off the linear fit by "
        f"composition, the limit is {limit:.3g} (max_energy_sigma {config.max_energy_sigma:g})"
        for index in np.flatnonzero(np.abs(residuals) > limit).tolist()
    }
