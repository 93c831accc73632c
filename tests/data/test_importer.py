"""Import: fairchem reads back what was imported, and every kind of bad frame is named by file and index."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable
from pathlib import Path

import ase.db
import ase.io
import numpy as np
import pytest
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms

from fairchem_janus.data.aselmdb import write_aselmdb
from fairchem_janus.data.checks import ImportConfig, energy_outliers
from fairchem_janus.data.frames import find_files, read_frames, read_metadata
from fairchem_janus.data.importer import BadFramesError, import_frames

REAL_DATA = os.environ.get("JANUS_TEST_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="JANUS_TEST_DATA is not set to the folder with real data")

REFERENCES = {"Cu": -3.0, "Ni": -5.0}


def labelled(atoms: Atoms, rng: np.random.Generator, *, stress: bool = True) -> Atoms:
    """Labels that look like real ones: energies near a sum of element references."""
    results = {
        "energy": sum(REFERENCES.get(symbol, -1.0) for symbol in atoms.symbols) + 0.01 * len(atoms) * rng.normal(),
        "forces": rng.normal(size=(len(atoms), 3)),
    }
    if stress:
        results["stress"] = 0.01 * rng.normal(size=6)
    atoms.calc = SinglePointCalculator(atoms, **results)
    return atoms


def crystals(num_frames: int = 12, *, stress: bool = True) -> list[Atoms]:
    rng = np.random.default_rng(0)
    frames = []
    for index in range(num_frames):
        atoms = bulk("Cu", cubic=True) * (1 + index % 2, 1, 1)
        atoms.symbols[: index % 4] = "Ni"
        atoms.rattle(0.05, rng=rng)
        frames.append(labelled(atoms, rng, stress=stress))
    return frames


def relabel(atoms: Atoms, **changes) -> None:
    """Replace labels; None takes one away."""
    results = {**atoms.calc.results, **changes}
    atoms.calc = SinglePointCalculator(atoms, **{name: value for name, value in results.items() if value is not None})


def write_xyz(path: Path, frames: list[Atoms]) -> Path:
    ase.io.write(path, frames, format="extxyz")
    return path


# ---- good data -------------------------------------------------------------------------------------------------------


def fairchem_dataset(folder: Path):
    from fairchem.core.datasets import AseDBDataset

    return AseDBDataset({"src": str(folder)})


def test_fairchem_reads_what_was_written(tmp_path):
    frames = crystals()
    frames[3].info["charge"] = 2
    frames[3].set_constraint(FixAtoms([1]))
    report = import_frames([write_xyz(tmp_path / "a.extxyz", frames)], tmp_path / "train")
    assert (report.num_read, report.num_written, report.problems) == (12, 12, [])
    assert report.labels == ("energy", "forces", "stress")

    dataset = fairchem_dataset(tmp_path / "train")
    assert len(dataset) == 12
    assert list(dataset.get_metadata("natoms", list(range(12)))) == [len(frame) for frame in frames]
    for index, frame in enumerate(frames):
        data = dataset[index]
        # AtomicData is in float32; extxyz keeps 8 decimals
        np.testing.assert_allclose(data.energy.item(), frame.calc.results["energy"], rtol=1e-6)
        np.testing.assert_allclose(data.forces.numpy(), frame.calc.results["forces"], atol=1e-6)
        full = data.stress.numpy()[0]
        np.testing.assert_allclose(
            full[[0, 1, 2, 1, 0, 0], [0, 1, 2, 2, 2, 1]], frame.calc.results["stress"], atol=1e-7
        )
        assert data.sid == [f"a.extxyz:{index}"]
    assert dataset.get_atoms(3).info["charge"] == 2
    assert dataset[3].fixed.tolist() == [0, 1, *[0] * (len(frames[3]) - 2)]


def test_edge_counts_go_to_the_metadata(tmp_path):
    source = write_xyz(tmp_path / "a.extxyz", crystals())
    import_frames([source], tmp_path / "with", cutoff=4.0)
    assert set(read_metadata(tmp_path / "with")[1]) == {"natoms", "nedges_4"}
    import_frames([source], tmp_path / "without", cutoff=None)
    assert set(read_metadata(tmp_path / "without")[1]) == {"natoms"}


@pytest.mark.parametrize("suffix", [".extxyz", ".xyz", ".traj", ".db", ".json", ".aselmdb"])
def test_all_formats_give_the_same_data(tmp_path, suffix):
    frames = crystals()
    for index, frame in enumerate(frames):
        frame.info["sid"] = f"frame-{index}"
    source = tmp_path / f"in{suffix}"
    if suffix in (".db", ".json", ".aselmdb"):
        with ase.db.connect(str(source), use_lock_file=False) as database:
            for frame in frames:
                database.write(frame, charge=1, data=dict(frame.info))
    else:
        ase.io.write(source, frames, format="extxyz" if "xyz" in suffix else None)
    import_frames([source], tmp_path / "out")
    for index, (frame, read) in enumerate(zip(frames, read_frames(tmp_path / "out"), strict=True)):
        np.testing.assert_allclose(read.atoms.positions, frame.positions, atol=1e-7)
        np.testing.assert_allclose(read.atoms.calc.results["forces"], frame.calc.results["forces"], atol=1e-7)
        np.testing.assert_allclose(read.atoms.calc.results["stress"], frame.calc.results["stress"], atol=1e-7)
        if suffix != ".traj":  # which keeps no info
            assert read.atoms.info["sid"] == f"frame-{index}"
        if suffix in (".db", ".json", ".aselmdb"):
            assert read.atoms.info["charge"] == 1


def test_labels_under_other_names(tmp_path):
    frames = crystals()
    expected = [dict(frame.calc.results) for frame in frames]
    for frame, results in zip(frames, expected, strict=True):
        frame.calc = None
        frame.info["REF_energy"] = results["energy"]
        frame.arrays["REF_forces"] = results["forces"]
        frame.info["REF_stress"] = results["stress"][[0, 5, 4, 5, 1, 3, 4, 3, 2]]
        frame.info["energy"] = 1e6  # of another method: fairchem would prefer it to the calculator's
    source = write_xyz(tmp_path / "a.xyz", frames)
    config = ImportConfig(energy_key="REF_energy", forces_key="REF_forces", stress_key="REF_stress")
    import_frames([source], tmp_path / "out", config)
    for results, read in zip(expected, read_frames(tmp_path / "out"), strict=True):
        for label, value in results.items():
            np.testing.assert_allclose(read.atoms.calc.results[label], value, atol=1e-7)
        assert set(read.atoms.info) == {"sid"}
    # the calculator of ASE drops labels of moved atoms, so a wrong name must not fall back on another energy
    with pytest.raises(BadFramesError, match=r"energy \('typo'\) is missing"):
        import_frames([source], tmp_path / "other", ImportConfig(energy_key="typo", labels="e"))


def test_several_sources_folders_and_globs_are_written_in_order(tmp_path):
    frames = crystals()
    (tmp_path / "in").mkdir()
    write_xyz(tmp_path / "in/b.xyz", frames[4:8])
    write_xyz(tmp_path / "in/a.xyz", frames[:4])
    write_xyz(tmp_path / "last.xyz", frames[8:])
    import_frames([tmp_path / "in", str(tmp_path / "las*.xyz")], tmp_path / "out")
    sids = [frame.atoms.info["sid"] for frame in read_frames(tmp_path / "out")]
    assert sids == [f"{name}.xyz:{index}" for name in ("a", "b", "last") for index in range(4)]


def test_frames_without_stress_and_without_forces(tmp_path):
    source = write_xyz(tmp_path / "a.xyz", crystals(stress=False))
    assert import_frames([source], tmp_path / "ef").labels == ("energy", "forces")
    assert import_frames([source], tmp_path / "e", ImportConfig(labels="e")).labels == ("energy",)
    assert all("forces" not in frame.atoms.calc.results for frame in read_frames(tmp_path / "e"))
    with pytest.raises(BadFramesError, match="12 of 12 frames are bad"):
        import_frames([source], tmp_path / "efs", ImportConfig(labels="efs"))


def test_stress_of_some_frames_only_needs_a_decision(tmp_path):
    frames = crystals()
    relabel(frames[5], stress=None)
    source = write_xyz(tmp_path / "a.xyz", frames)
    with pytest.raises(ValueError, match=r"11 of 12 frames have a stress, .*a.xyz frame 5 is the first without"):
        import_frames([source], tmp_path / "auto", skip_bad=True)
    assert import_frames([source], tmp_path / "ef", ImportConfig(labels="ef")).num_written == 12
    assert import_frames([source], tmp_path / "efs", ImportConfig(labels="efs"), skip_bad=True).num_written == 11


def test_the_same_structure_in_another_charge_is_no_duplicate(tmp_path):
    frames = crystals(6)
    frames.append(frames[2].copy())
    frames[-1].info["charge"] = 1
    labelled(frames[-1], np.random.default_rng(1))
    assert import_frames([write_xyz(tmp_path / "a.xyz", frames)], tmp_path / "out").num_written == 7


@needs_real_data
@pytest.mark.parametrize(
    ("name", "num_frames"), [("crystals_si_mo", 408), ("crystals_li_no_stress", 241), ("molecules", 560)]
)
def test_real_data_pass_every_check(tmp_path, name, num_frames):
    report = import_frames([Path(REAL_DATA) / f"{name}.extxyz"], tmp_path / "out")
    assert (report.num_written, report.problems) == (num_frames, [])


# ---- bad frames ------------------------------------------------------------------------------------------------------


def nan_energy(atoms):
    relabel(atoms, energy=np.nan)


def nan_force(atoms):
    forces = atoms.calc.results["forces"].copy()
    forces[2, 1] = np.inf
    relabel(atoms, forces=forces)


def nan_stress(atoms):
    relabel(atoms, stress=np.full(6, np.nan))


def nan_position(atoms):
    results = atoms.calc.results
    atoms.positions[1, 0] = np.nan
    atoms.calc = SinglePointCalculator(atoms, **results)


def missing_energy(atoms):
    relabel(atoms, energy=None)


def missing_forces(atoms):
    relabel(atoms, forces=None)


def forces_of_two_components(atoms):
    atoms.calc.results["forces"] = atoms.calc.results["forces"][:, :2]


def stress_of_four_components(atoms):
    atoms.calc.results["stress"] = np.zeros(4)


def energy_per_atom(atoms):
    atoms.calc.results["energy"] = np.zeros(len(atoms))


def energy_in_words(atoms):
    atoms.calc.results["energy"] = "low"


def zero_cell(atoms):
    atoms.cell = np.zeros((3, 3))


def flat_cell(atoms):
    atoms.cell[2] = atoms.cell[0] + atoms.cell[1]


def surface_without_height(atoms):
    atoms.pbc = (True, True, False)
    atoms.cell[2] = 0


def close_atoms(atoms):
    atoms.positions[1] = atoms.positions[0] + [0.0, 0.2, 0.0]


def close_images(atoms):
    atoms.positions[1] = atoms.positions[0] + atoms.cell[2] - [0.0, 0.0, 0.1]


def same_place(atoms):
    atoms.positions[1] = atoms.positions[0]


def ghost(atoms):
    atoms.numbers[0] = 0


def far_energy(atoms):
    atoms.calc.results["energy"] += 5.0 * len(atoms)


BAD: list[tuple[Callable[[Atoms], None], str]] = [
    (nan_energy, "energy is NaN or infinite"),
    (nan_force, "forces of atom 2 is NaN or infinite"),
    (nan_stress, "stress is NaN or infinite"),
    (nan_position, "position of atom 1 is NaN or infinite"),
    (missing_energy, "energy is missing"),
    (missing_forces, "forces is missing"),
    (forces_of_two_components, r"forces has shape \(8, 2\) instead of \(8, 3\)"),
    (stress_of_four_components, r"stress has shape \(4,\) instead of \(6,\) or \(3, 3\) or \(9,\)"),
    (energy_per_atom, r"energy has shape \(8,\) instead of \(\) or \(1,\)"),
    (energy_in_words, "energy is not numeric: 'low'"),
    (zero_cell, r"periodic \(pbc \[True, True, True\]\) but its cell has no volume"),
    (flat_cell, "its cell has no volume"),
    (surface_without_height, r"periodic \(pbc \[True, True, False\]\) but its cell has no volume"),
    (close_atoms, "atoms 0 and 1 are 0.2 A apart, nearer than 0.3 A"),
    (close_images, "atoms 0 and 1 are 0.1 A apart"),
    (same_place, "atoms 0 and 1 are 0 A apart"),
    (ghost, "atom 0 is of no known element"),
    (far_energy, r"is \+[45]\.\d+ eV/atom off the linear fit by composition"),
]


@pytest.mark.parametrize(("spoil", "message"), BAD, ids=[spoil.__name__ for spoil, _ in BAD])
def test_a_bad_frame_is_named_and_can_be_skipped(tmp_path, monkeypatch, spoil, message):
    frames = crystals()
    spoil(frames[7])
    frames[7].calc.atoms = frames[7].copy()  # the labels belong to the spoilt frame
    source = tmp_path / "a.traj"
    source.touch()
    # past the file formats, some of which refuse to write such frames
    monkeypatch.setattr("fairchem_janus.data.frames._read_file", lambda path: iter(frames))

    with pytest.raises(
        BadFramesError, match=rf"1 of 12 frames are bad(.|\n)*a\.traj frame 7: .*{message}(.|\n)*--skip-bad"
    ):
        import_frames([source], tmp_path / "out")
    assert not (tmp_path / "out").exists()

    report = import_frames([source], tmp_path / "out", skip_bad=True)
    assert report.num_written == 11
    assert [(problem.path, problem.index) for problem in report.problems] == [(source, 7)]
    with (tmp_path / "out/skipped.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["file"], row["frame"]) for row in rows] == [(str(source), "7")]
    assert len(fairchem_dataset(tmp_path / "out")) == 11  # which looks into every file of the folder


def test_a_frame_without_atoms_is_bad(tmp_path):
    frames = [*crystals(3), Atoms()]
    source = write_xyz(tmp_path / "a.xyz", frames[:3])
    with source.open("a") as file:
        file.write("0\n\n")
    with pytest.raises(BadFramesError, match=r"a\.xyz frame 3: no atoms"):
        import_frames([source], tmp_path / "out")


@pytest.mark.parametrize("other_energy", [False, True])
def test_duplicates_are_named_with_the_first_one_even_in_another_file(tmp_path, other_energy):
    frames = crystals()
    copy = frames[2].copy()
    copy.calc = SinglePointCalculator(copy, **frames[2].calc.results)
    if other_energy:
        copy.calc.results["energy"] += 0.01
    first, second = write_xyz(tmp_path / "a.xyz", frames), write_xyz(tmp_path / "b.xyz", [copy])
    with pytest.raises(BadFramesError) as caught:
        import_frames([first, second], tmp_path / "out")
    (problem,) = caught.value.problems
    assert (problem.path, problem.index) == (second, 0)
    assert problem.problem.startswith(f"duplicate of {first} frame 2")
    assert ("with energy" in problem.problem) == other_energy


def test_a_file_given_twice_is_written_once(tmp_path):
    source = write_xyz(tmp_path / "a.xyz", crystals())
    report = import_frames([source, source], tmp_path / "out", skip_bad=True)
    assert (report.num_read, report.num_written, len(report.problems)) == (24, 12, 12)
    assert len(list(read_frames(tmp_path / "out"))) == 12


def test_broken_text_is_named_and_the_frames_after_it_are_still_read(tmp_path):
    source = write_xyz(tmp_path / "a.xyz", crystals())
    lines = source.read_text().splitlines()
    start = sum(len(frame) + 2 for frame in crystals()[:4])
    lines[start + 3] = "Cu 0.0 zero 0.0 0 0 0"
    source.write_text("\n".join(lines[:-1]) + "\n")  # and the last frame is cut short
    with pytest.raises(BadFramesError) as caught:
        import_frames([source], tmp_path / "out")
    assert [(problem.index, problem.problem[:14]) for problem in caught.value.problems] == [
        (4, "cannot be read"),
        (11, "the file ends "),
    ]
    assert import_frames([source], tmp_path / "out", skip_bad=True).num_written == 10


def test_a_lost_frame_header_ends_the_file_with_a_message(tmp_path):
    source = write_xyz(tmp_path / "a.xyz", crystals())
    lines = source.read_text().splitlines()
    del lines[len(crystals()[0]) + 2]
    source.write_text("\n".join(lines) + "\n")
    with pytest.raises(BadFramesError, match=r"a.xyz frame 1: expected the number of atoms, found 'Lattice"):
        import_frames([source], tmp_path / "out")


def test_a_file_that_ase_cannot_read_is_named(tmp_path):
    (tmp_path / "a.traj").write_text("nonsense")
    with pytest.raises(BadFramesError, match=r"a.traj frame 0: cannot be read"):
        import_frames([tmp_path / "a.traj"], tmp_path / "out")


def test_many_problems_are_counted_and_the_first_twenty_shown(tmp_path):
    frames = crystals(30)
    for frame in frames:
        relabel(frame, forces=None)
    with pytest.raises(BadFramesError, match=r"30 of 30 frames are bad(.|\n)*frame 19(.|\n)*and 10 more") as caught:
        import_frames([write_xyz(tmp_path / "a.xyz", frames)], tmp_path / "out")
    assert len(caught.value.problems) == 30


def test_nothing_good_is_an_error_even_when_skipping(tmp_path):
    frames = crystals(2)
    for frame in frames:
        relabel(frame, energy=None)
    with pytest.raises(ValueError, match="all 2 frames are bad, so nothing was written"):
        import_frames([write_xyz(tmp_path / "a.xyz", frames)], tmp_path / "out", skip_bad=True)


def test_empty_and_absent_sources(tmp_path):
    (tmp_path / "empty.xyz").touch()
    with pytest.raises(ValueError, match=r"no frames in .*empty.xyz"):
        import_frames([tmp_path / "empty.xyz"], tmp_path / "out")
    with pytest.raises(FileNotFoundError, match="no structures in 'nowhere'"):
        import_frames(["nowhere"], tmp_path / "out")
    (tmp_path / "bare").mkdir()
    with pytest.raises(FileNotFoundError, match="no structures in"):
        find_files(tmp_path / "bare")
    assert not (tmp_path / "out").exists()


def test_an_existing_data_set_is_not_touched(tmp_path):
    source = write_xyz(tmp_path / "a.xyz", crystals())
    import_frames([source], tmp_path / "out")
    before = sorted((file.name, file.stat().st_size) for file in (tmp_path / "out").iterdir())
    with pytest.raises(FileExistsError, match=r"data.0000.aselmdb exists"):
        import_frames([source], tmp_path / "out")
    assert sorted((file.name, file.stat().st_size) for file in (tmp_path / "out").iterdir()) == before


def test_an_unknown_set_of_labels_is_refused():
    with pytest.raises(ValueError, match="labels must be auto, e, ef or efs, not 'fs'"):
        ImportConfig(labels="fs")
    with pytest.raises(ValueError, match="min_distance must not be negative"):
        ImportConfig(min_distance=-1)


# ---- the linear fit --------------------------------------------------------------------------------------------------


def compositions(num_frames: int) -> tuple[list[tuple[np.ndarray, np.ndarray]], np.ndarray]:
    rng = np.random.default_rng(0)
    counts = rng.integers(1, 20, (num_frames, 2))
    energies = counts @ [-3.0, -5.0] + 0.02 * counts.sum(axis=1) * rng.normal(size=num_frames)
    return [(np.array([28, 29]), row) for row in counts], energies


def test_a_tenth_of_wrong_energies_does_not_bend_the_fit():
    found, energies = compositions(100)
    energies[::10] *= 27.2114  # Hartree taken for eV
    assert sorted(energy_outliers(found, energies, ImportConfig())) == list(range(0, 100, 10))


def test_the_threshold_is_an_option():
    found, energies = compositions(100)
    natoms = found[5][1].sum()
    energies[5] += 0.3 * natoms
    assert list(energy_outliers(found, energies, ImportConfig())) == [5]
    assert energy_outliers(found, energies, ImportConfig(max_energy_sigma=50)) == {}


def test_few_or_identical_frames_have_no_outliers():
    found, energies = compositions(5)
    energies[2] += 1000
    assert energy_outliers(found, energies, ImportConfig()) == {}
    assert energy_outliers([found[0]] * 50, np.full(50, -7.0), ImportConfig()) == {}
    # noise of 1 meV/atom about identical energies: narrow, but nothing is wrong
    noise = 1e-5 * np.arange(50)
    noise[-1] = 0.02
    assert energy_outliers([found[0]] * 50, -7.0 + noise * found[0][1].sum(), ImportConfig()) == {}


# ---- the writer ------------------------------------------------------------------------------------------------------


def test_the_writer_accepts_one_file_and_any_iterable(tmp_path):
    frames = crystals(3)
    assert write_aselmdb(tmp_path / "one/train.aselmdb", iter(frames)) == [tmp_path / "one/train.aselmdb"]
    assert sorted(file.name for file in (tmp_path / "one").iterdir()) == ["metadata.npz", "train.aselmdb"]


def test_large_data_sets_are_split_over_files_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr("fairchem_janus.data.aselmdb.FRAMES_PER_FILE", 5)
    frames = crystals(12)
    assert len(write_aselmdb(tmp_path / "out", frames)) == 3
    dataset = fairchem_dataset(tmp_path / "out")
    assert [len(dataset.get_atoms(i)) for i in range(12)] == [len(frame) for frame in frames]
    assert list(dataset.get_metadata("natoms", list(range(12)))) == [len(frame) for frame in frames]


def test_the_writer_leaves_nothing_behind_on_an_error(tmp_path):
    moved = crystals(3)
    moved[2].positions += 0.1
    with pytest.raises(ValueError, match=r"frame 2: its labels belong to another state \(positions changed since\)"):
        write_aselmdb(tmp_path / "out", moved)
    with pytest.raises(ValueError, match="column 'nedges_6' has 2 entries for 3 frames"):
        write_aselmdb(tmp_path / "out", crystals(3), columns={"nedges_6": [1, 2]})
    with pytest.raises(ValueError, match="no frames to write"):
        write_aselmdb(tmp_path / "out", [])
    with pytest.raises(ValueError, match="frame 0 has no atoms"):
        write_aselmdb(tmp_path / "out", [Atoms()])
    assert list((tmp_path / "out").iterdir()) == []
