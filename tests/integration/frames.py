"""Small labelled structures for jobs whose batches a test wants to know: labels are random, and of order one."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms


def crystal(
    num_atoms: int, *, seed: int, spacing: float = 2.5, fixed: Iterable[int] = (), first: int | None = None
) -> Atoms:
    """A periodic structure, atoms about `spacing` (A) apart; one atom has edges to its own images.

    Args:
        first: atomic number of the first atom; those of the others are below 18.
    """
    rng = np.random.default_rng(seed)
    edge = spacing * num_atoms ** (1 / 3)
    numbers = rng.integers(3, 18, num_atoms)
    numbers[0] = first or numbers[0]
    atoms = Atoms(numbers, rng.uniform(0, edge, (num_atoms, 3)), cell=np.eye(3) * edge, pbc=True)
    return _labelled(atoms, rng, fixed)


def molecule(num_atoms: int, *, seed: int, spacing: float = 2.0, fixed: Iterable[int] = ()) -> Atoms:
    """An open structure."""
    rng = np.random.default_rng(seed)
    edge = spacing * num_atoms ** (1 / 3)
    return _labelled(Atoms(rng.integers(3, 18, num_atoms), rng.uniform(0, edge, (num_atoms, 3))), rng, fixed)


def apart(num_atoms: int, *, seed: int, periodic: bool) -> Atoms:
    """Atoms that no cutoff connects."""
    rng = np.random.default_rng(seed)
    atoms = Atoms(rng.integers(3, 18, num_atoms), [[20.0 * i, 0, 0] for i in range(num_atoms)])
    if periodic:
        atoms.set_cell([20.0 * num_atoms, 20.0, 20.0])
        atoms.set_pbc(True)
    return _labelled(atoms, rng, ())


def _labelled(atoms: Atoms, rng: np.random.Generator, fixed: Iterable[int]) -> Atoms:
    if indices := list(fixed):
        atoms.set_constraint(FixAtoms(indices))
    labels = {"energy": float(rng.normal()), "forces": rng.normal(size=(len(atoms), 3))}
    if atoms.pbc.any():
        labels["stress"] = rng.normal(size=6)
    atoms.calc = SinglePointCalculator(atoms, **labels)
    return atoms
