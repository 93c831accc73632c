"""The embedded demo data: sound physics, readable by fairchem, the same for the same seed."""

from pathlib import Path

import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.db import connect
from ase.geometry import get_distances
from omegaconf import OmegaConf

from fairchem_janus.data.demo import DATASETS, MAX_ATOMS, MAX_FORCE, METALS, demo_frame, draw_size, label, write_demo

NUM_TRAIN, NUM_VAL = 13, 4


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_demo(tmp_path_factory.mktemp("demo") / "data", num_train=NUM_TRAIN, num_val=NUM_VAL).root


def read(root: Path, dataset: str, split: str) -> list[Atoms]:
    with connect(str(root / dataset / split / "data.0000.aselmdb"), readonly=True, use_lock_file=False) as db:
        return [row.toatoms() for row in db.select()]


@pytest.mark.parametrize("dataset", sorted(DATASETS))
def test_frames_are_small_labelled_metals(dataset: str) -> None:
    for index in range(20):
        atoms = demo_frame(dataset, "train", index, seed=0)
        assert 2 <= len(atoms) <= MAX_ATOMS
        assert set(atoms.symbols) <= set(METALS)
        assert np.abs(atoms.get_forces()).max() <= MAX_FORCE
        assert np.isfinite(atoms.get_potential_energy())
        assert ("stress" in atoms.calc.results) == (dataset == "emt_bulk") == bool(atoms.pbc.all())


def test_surface_frames_are_slabs_and_clusters() -> None:
    periodicity = {tuple(demo_frame("emt_surface", "train", i, seed=0).pbc) for i in range(4)}
    assert periodicity == {(True, True, False), (False, False, False)}


def test_clusters_hold_together() -> None:
    for index in range(0, 20, 2):
        atoms = demo_frame("emt_surface", "train", index, seed=0)
        distances = get_distances(atoms.positions)[1] + 99 * np.eye(len(atoms))
        assert distances.min(axis=1).max() < 4.5  # A; every atom has a neighbour


def test_sizes_have_a_long_tail() -> None:
    rng = np.random.default_rng(0)
    sizes = [draw_size(rng) for _ in range(2000)]
    assert min(sizes) == 2
    assert max(sizes) == MAX_ATOMS
    assert np.median(sizes) < np.mean(sizes) < 25 < np.percentile(sizes, 90)


def test_labels_of_a_two_atom_cell_are_those_of_its_supercell() -> None:
    """A cell much smaller than the potential's range: every atom interacts with many images, of itself too."""
    cell = bulk("Cu", "fcc", a=3.5) * (2, 1, 1)
    cell.symbols[1] = "Pt"
    cell.positions[1] += (0.1, -0.05, 0.07)
    small, large = label(cell), label(cell * (3, 2, 3))
    assert large.get_potential_energy() == pytest.approx(18 * small.get_potential_energy(), abs=1e-9)
    np.testing.assert_allclose(large.get_forces(), np.tile(small.get_forces(), (18, 1)), atol=1e-9)
    np.testing.assert_allclose(large.get_stress(), small.get_stress(), atol=1e-9)


def test_forces_and_stress_are_derivatives_of_the_energy() -> None:
    atoms = demo_frame("emt_bulk", "train", 3, seed=0)
    step = 1e-4  # central differences: error of order step^2 times a third derivative

    def energy(shift: float, strain: float) -> float:
        moved = Atoms(atoms.numbers, atoms.positions, cell=atoms.cell, pbc=True)
        moved.positions[0, 1] += shift
        moved.set_cell(moved.cell @ (np.eye(3) + strain * np.diag([0.0, 0.0, 1.0])), scale_atoms=True)
        return label(moved).get_potential_energy()

    force = -(energy(step, 0) - energy(-step, 0)) / (2 * step)
    stress = (energy(0, step) - energy(0, -step)) / (2 * step) / atoms.get_volume()
    assert atoms.get_forces()[0, 1] == pytest.approx(force, abs=1e-5)
    assert atoms.get_stress()[2] == pytest.approx(stress, abs=1e-6)


def test_frame_depends_on_its_own_index_only(demo: Path) -> None:
    frames = read(demo, "emt_bulk", "train")
    again = demo_frame("emt_bulk", "train", 5, seed=0)
    assert frames[5].positions == pytest.approx(again.positions)
    assert frames[5].get_potential_energy() == pytest.approx(again.get_potential_energy())
    other = demo_frame("emt_bulk", "train", 5, seed=1)
    assert len(other) != len(again) or not np.allclose(other.positions, again.positions)


def test_files_and_metadata_agree(demo: Path) -> None:
    counts = {("emt_bulk", "train"): 7, ("emt_surface", "train"): 6, ("emt_bulk", "val"): 2, ("emt_surface", "val"): 2}
    for (dataset, split), count in counts.items():
        frames = read(demo, dataset, split)
        natoms = np.load(demo / dataset / split / "metadata.npz")["natoms"]
        assert natoms.tolist() == [len(atoms) for atoms in frames]
        assert len(frames) == count
    assert not list(demo.rglob("*-lock"))


def test_references_and_rms_fit_the_training_frames(demo: Path) -> None:
    fitted = OmegaConf.load(demo / "demo.yaml").demo
    assert fitted.root == str(demo)
    forces = []
    for dataset, references in fitted.element_references.items():
        assert len(references) == 100
        frames = read(demo, str(dataset), "train")
        counts = np.array([np.bincount(a.numbers, minlength=100) for a in frames])
        energies = np.array([a.get_potential_energy() for a in frames])
        residual = energies - counts @ np.array(references)
        np.testing.assert_allclose(counts.T @ residual, 0, atol=1e-8)  # the normal equations of least squares
        assert np.flatnonzero(references).tolist() == np.flatnonzero(counts.any(axis=0)).tolist()
        forces += [a.get_forces() for a in frames]
    assert fitted.force_rms == pytest.approx(np.sqrt(np.mean(np.concatenate(forces) ** 2)))


def test_fairchem_reads_it_with_names(demo: Path) -> None:
    from fairchem.core.datasets import AseDBDataset

    dataset = AseDBDataset({"src": str(demo / "emt_bulk" / "train"), "a2g_args": {"r_edges": False}})
    assert len(dataset) == 7
    assert dataset.metadata_hasattr("natoms")
    sample = dataset[2]
    assert sample.sid == ["emt_bulk-train-00002"]  # fairchem drops ids that are not strings
    assert {"energy", "forces", "stress"} <= set(sample.keys())
    surface = AseDBDataset({"src": str(demo / "emt_surface" / "val"), "a2g_args": {"r_edges": False}})
    assert "stress" not in surface[0].keys()  # noqa: SIM118  not a dict


def test_same_request_is_left_alone_and_another_refused(demo: Path) -> None:
    before = (demo / "demo.yaml").stat().st_mtime_ns
    assert write_demo(demo, num_train=NUM_TRAIN, num_val=NUM_VAL).reused
    assert (demo / "demo.yaml").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="is not empty and does not hold this demo data"):
        write_demo(demo, num_train=NUM_TRAIN, num_val=NUM_VAL, seed=1)


def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: object) -> None:
        raise RuntimeError("disk full")

    monkeypatch.setattr("fairchem_janus.data.demo.fit_element_references", fail)
    with pytest.raises(RuntimeError, match="disk full"):
        write_demo(tmp_path / "data", num_train=2, num_val=2)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "text"),
    [({"num_train": 1}, "at least 2 frames"), ({"num_val": 0}, "at least 2 frames"), ({"seed": -1}, "negative")],
)
def test_bad_request(tmp_path: Path, arguments: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        write_demo(tmp_path / "data", **arguments)
