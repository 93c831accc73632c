"""What `data stats` counts, fits and prints: right by hand, equal to fairchem's, and usable in a job."""

from __future__ import annotations

import os
from pathlib import Path

import ase.io
import numpy as np
import pytest
import yaml
from ase import Atoms
from ase.build import bulk, molecule
from ase.calculators.singlepoint import SinglePointCalculator
from ase.constraints import FixAtoms
from ase.neighborlist import neighbor_list
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.data.aselmdb import write_aselmdb
from fairchem_janus.data.edges import column_name, count_edges, min_distance
from fairchem_janus.data.frames import FrameError, checked_frames, load_sizes, read_metadata
from fairchem_janus.data.stats import data_stats, default_name, force_rms, to_yaml, write_metadata

REAL_DATA = os.environ.get("JANUS_TEST_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="JANUS_TEST_DATA is not set to the folder with real data")


def frames(num_frames: int = 6, *, stress: bool = True) -> list[Atoms]:
    """Cu-Ni crystals of 4 and 8 atoms whose energy is exactly -3 per Cu and -5 per Ni."""
    rng = np.random.default_rng(0)
    made = []
    for index in range(num_frames):
        atoms = bulk("Cu", cubic=True) * (1 + index % 2, 1, 1)
        atoms.symbols[: 1 + index % 3] = "Ni"
        atoms.rattle(0.05, rng=rng)
        results = {
            "energy": float(np.where(atoms.numbers == 28, -5.0, -3.0).sum()),
            "forces": rng.normal(size=(len(atoms), 3)),
        }
        if stress:
            results["stress"] = rng.normal(size=6)
        atoms.calc = SinglePointCalculator(atoms, **results)
        made.append(atoms)
    return made


# ---- edges -----------------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    num_atoms=st.integers(1, 12),
    pbc=st.tuples(st.booleans(), st.booleans(), st.booleans()),
    cutoff=st.floats(1.0, 7.0),
)
def test_edges_are_those_of_ase(seed, num_atoms, pbc, cutoff):
    rng = np.random.default_rng(seed)
    cell = np.diag(rng.uniform(2.0, 6.0, 3)) + rng.uniform(-0.8, 0.8, (3, 3))
    atoms = Atoms("H" * num_atoms, positions=rng.uniform(-10, 10, (num_atoms, 3)), cell=cell, pbc=pbc)
    centers, distances = neighbor_list("id", atoms, cutoff)
    assert count_edges(atoms, cutoff) == len(centers)
    capped = np.minimum(np.bincount(centers, minlength=num_atoms), 5).sum()
    assert count_edges(atoms, cutoff, max_neighbors=5) == capped
    distance, first, second = min_distance(atoms, cutoff)
    if len(distances):
        assert distance == pytest.approx(distances.min())
        assert atoms.get_distance(first, second, mic=True) == pytest.approx(distance) or first == second
    else:
        assert distance == np.inf


def test_edges_are_those_of_fairchem():
    import torch
    from fairchem.core.datasets.atomic_data import AtomicData, atomicdata_list_to_batch
    from fairchem.core.graph.compute import generate_graph

    structures = [*(atoms.copy() for atoms in frames(3)), molecule("C2H6CHOH")]
    batch = atomicdata_list_to_batch([AtomicData.from_ase(a, target_dtype=torch.float64) for a in structures])
    graph = generate_graph(
        batch,
        cutoff=6.0,
        max_neighbors=300,
        enforce_max_neighbors_strictly=True,
        radius_pbc_version=2,
        pbc=batch.pbc,
    )
    assert graph["neighbors"].tolist() == [count_edges(a, 6.0) for a in structures]


def test_atoms_without_neighbours_have_no_edges():
    assert count_edges(Atoms("He"), 6.0) == 0
    assert count_edges(Atoms("He2", positions=[[0, 0, 0], [0, 0, 9]]), 6.0) == 0
    assert min_distance(Atoms("He"), 6.0) == (np.inf, -1, -1)
    assert count_edges(bulk("Cu"), 2.0) == 0


def test_a_cell_without_volume_or_much_too_small_is_refused():
    with pytest.raises(ValueError, match="has no volume"):
        count_edges(Atoms("He", cell=[[1, 0, 0], [1, 0, 0], [0, 0, 1]], pbc=True), 6.0)
    with pytest.raises(ValueError, match=r"copies of the cell within 6\.0 A"):
        count_edges(Atoms("He", cell=[0.01, 0.01, 10], pbc=True), 6.0)


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_counts_references_and_rms_are_right_by_hand(tmp_path):
    made = frames()
    made[1].set_constraint(FixAtoms([0, 1]))
    write_aselmdb(tmp_path / "metals/train", made)
    stats = data_stats(tmp_path / "metals/train", 4.0)
    assert stats.name == "metals"
    assert stats.natoms.tolist() == [4, 8, 4, 8, 4, 8]
    assert stats.nedges.tolist() == [count_edges(atoms, 4.0) for atoms in made]
    assert stats.element_counts == {"Ni": 12, "Cu": 24}
    assert stats.num_labelled == {"energy": 6, "forces": 6, "stress": 6}
    assert stats.num_periodic == 6
    assert len(stats.references) == 100
    assert stats.references[28] == pytest.approx(-5)
    assert stats.references[29] == pytest.approx(-3)
    assert np.count_nonzero(stats.references) == 2
    assert stats.residual_rms == pytest.approx(0, abs=1e-9)
    free = np.concatenate([a.calc.results["forces"][2 * (i == 1) :] for i, a in enumerate(made)])
    assert stats.force_rms == pytest.approx(np.sqrt(np.mean(free**2)))


def test_references_and_rms_are_those_of_fairchems_fine_tuning_script(tmp_path):
    from fairchem.core.scripts.create_finetune_dataset import compute_normalizer_and_linear_reference

    write_aselmdb(tmp_path / "train", frames())
    rms, references = compute_normalizer_and_linear_reference(tmp_path / "train", 1)
    stats = data_stats(tmp_path / "train")
    assert stats.force_rms == pytest.approx(rms)
    np.testing.assert_allclose(stats.references, references, atol=1e-9)


def test_the_common_rms_is_over_components_of_all_data_sets(tmp_path):
    made = frames()
    write_aselmdb(tmp_path / "a", made[:1])
    write_aselmdb(tmp_path / "b", made[1:])
    write_aselmdb(tmp_path / "all", made)
    stats = [data_stats(tmp_path / name) for name in ("a", "b", "all")]
    assert force_rms(stats[:2]) == pytest.approx(stats[2].force_rms)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("demo/emt_bulk/train", "emt_bulk"),
        ("metals/val/data.0000.aselmdb", "metals"),
        ("molecules.extxyz", "molecules"),
        ("metals", "metals"),
    ],
)
def test_the_name_of_a_data_set_comes_from_its_path(path, name):
    assert default_name(path) == name


@needs_real_data
def test_real_data_have_the_sizes_they_should():
    stats = data_stats(Path(REAL_DATA) / "crystals_si_mo.extxyz")
    assert (stats.natoms.min(), stats.natoms.max()) == (2, 96)
    assert (stats.nedges.min(), stats.nedges.max()) == (116, 3920)
    assert set(stats.element_counts) == {"Si", "Mo"}
    assert stats.common_labels == ("energy", "forces", "stress")
    assert data_stats(Path(REAL_DATA) / "crystals_li_no_stress.extxyz").common_labels == ("energy", "forces")


# ---- the YAML --------------------------------------------------------------------------------------------------------


def test_the_yaml_makes_the_tasks_and_data_sets_of_a_fairchem_job(tmp_path):
    from fairchem.core.datasets.mt_concat_dataset import create_concat_dataset
    from fairchem.core.units.mlip_unit.mlip_unit import Task, mt_collater_adapter
    from hydra.utils import instantiate
    from omegaconf import OmegaConf

    write_aselmdb(tmp_path / "bulk/train", frames())
    write_aselmdb(tmp_path / "surface/train", frames(4, stress=False))
    stats = [data_stats(tmp_path / name / "train") for name in ("bulk", "surface")]
    text = to_yaml(stats)
    block = OmegaConf.create(yaml.safe_load(text))
    tasks = [instantiate(task) for task in block.tasks]
    assert all(isinstance(task, Task) for task in tasks)
    assert [task.name for task in tasks] == [
        "bulk_energy",
        "bulk_forces",
        "bulk_stress",
        "surface_energy",
        "surface_forces",
    ]
    assert [float(task.normalizer.rmsd) for task in tasks] == pytest.approx([force_rms(stats)] * 5)
    assert tasks[0].element_references.element_references[28].item() == pytest.approx(-5)

    sampling = OmegaConf.create({"sampling": {"type": "temperature", "temperature": 1.0}})
    dataset = create_concat_dataset(block.dataset_configs, sampling)
    batch = mt_collater_adapter(tasks)([dataset[i] for i in range(len(dataset))])
    assert len(dataset) == 10
    assert batch.bulk_stress.isfinite().all(dim=1).sum() == 6
    assert batch.surface_forces.shape == (len(batch.pos), 3)
    assert "  6 frames, 6 of them periodic, 36 atoms" in text


def test_labels_that_only_some_frames_have_get_no_task(tmp_path):
    made = frames()
    results = {name: value for name, value in made[2].calc.results.items() if name != "stress"}
    made[2].calc = SinglePointCalculator(made[2], **results)
    write_aselmdb(tmp_path / "out", made)
    text = to_yaml([data_stats(tmp_path / "out")])
    assert "not every frame has stress: no task is written for that" in text
    assert [task["property"] for task in yaml.safe_load(text)["tasks"]] == ["energy", "forces"]


def test_structures_without_labels_have_sizes_only(tmp_path):
    ase.io.write(tmp_path / "a.xyz", [molecule("H2O"), Atoms("He")], format="extxyz")
    stats = data_stats(tmp_path / "a.xyz")
    assert (stats.force_rms, stats.references, stats.nedges.tolist()) == (None, None, [6, 0])
    text = to_yaml([stats])
    assert yaml.safe_load(text)["tasks"] == []
    assert "fairchem does not read this format" in text


def test_two_data_sets_of_one_name_are_refused(tmp_path):
    write_aselmdb(tmp_path / "a/train", frames())
    stats = data_stats(tmp_path / "a/train")
    with pytest.raises(ValueError, match="several data sets are called a; name each with --name"):
        to_yaml([stats, stats])


# ---- metadata --------------------------------------------------------------------------------------------------------


def spoil_metadata(folder: Path, **columns) -> None:
    np.savez(folder / "metadata.npz", **columns)


def test_a_wrong_size_in_the_metadata_is_detected_and_named(tmp_path):
    write_aselmdb(tmp_path / "out", frames())
    spoil_metadata(tmp_path / "out", natoms=np.array([4, 8, 4, 7, 4, 8]))
    message = (
        r"metadata.npz says 7 atoms for entry 3, but .*data.0000.aselmdb frame 3 has 8; .*data stats .*--write-metadata"
    )
    with pytest.raises(ValueError, match=message):
        data_stats(tmp_path / "out")
    with pytest.raises(ValueError, match=message):
        load_sizes(tmp_path / "out", 6.0)


@pytest.mark.parametrize(
    ("natoms", "message"),
    [
        ([4, 8, 4, 8, 4, 8, 4], "has 7 entries of natoms, but .* has only 6 frames"),
        ([4, 8, 4], "has 3 entries of natoms, but .* has more frames"),
    ],
)
def test_metadata_of_the_wrong_length_are_detected(tmp_path, natoms, message):
    write_aselmdb(tmp_path / "out", frames())
    spoil_metadata(tmp_path / "out", natoms=np.array(natoms))
    with pytest.raises(ValueError, match=message):
        list(checked_frames(tmp_path / "out"))


def test_metadata_without_natoms_are_detected(tmp_path):
    write_aselmdb(tmp_path / "out", frames())
    spoil_metadata(tmp_path / "out", other=np.zeros(6))
    with pytest.raises(ValueError, match="has 0 entries of natoms"):
        list(checked_frames(tmp_path / "out"))


def test_metadata_can_be_rewritten(tmp_path):
    made = frames()
    write_aselmdb(tmp_path / "out", made, columns={"weight": np.arange(6)})
    stats = data_stats(tmp_path / "out", 5.0, max_neighbors=10, trust_metadata=False)
    write_metadata(tmp_path / "out", stats, max_neighbors=10)
    columns = read_metadata(tmp_path / "out")[1]
    assert columns["natoms"].tolist() == [len(atoms) for atoms in made]
    assert columns[column_name(5.0, 10)].tolist() == stats.nedges.tolist()
    assert columns["weight"].tolist() == list(range(6))

    spoil_metadata(tmp_path / "out", natoms=np.arange(6), weight=np.arange(6))
    write_metadata(tmp_path / "out", stats)
    assert set(read_metadata(tmp_path / "out")[1]) == {"natoms", "nedges_5"}  # other columns of wrong metadata go
    assert len(list(checked_frames(tmp_path / "out"))) == 6


def test_metadata_are_refused_where_fairchem_would_misread_them(tmp_path):
    ase.io.write(tmp_path / "a.xyz", frames(), format="extxyz")
    with pytest.raises(ValueError, match=r"a.xyz is no .aselmdb file"):
        write_metadata(tmp_path / "a.xyz", data_stats(tmp_path / "a.xyz"))
    (first,) = write_aselmdb(tmp_path / "out/first.aselmdb", frames())
    stats = data_stats(first)
    (tmp_path / "out/second.aselmdb").write_bytes(first.read_bytes())
    with pytest.raises(ValueError, match=r"second.aselmdb in the same folder would use the metadata too"):
        write_metadata(first, stats)


def test_sizes_come_from_the_metadata_without_opening_a_frame(tmp_path, monkeypatch):
    write_aselmdb(tmp_path / "out", frames(), columns={"nedges_6": np.arange(6)})
    monkeypatch.setattr("fairchem_janus.data.frames.read_frames", lambda *_, **__: pytest.fail("read"))
    natoms, nedges = load_sizes(tmp_path / "out", 6.0)
    assert (natoms.tolist(), nedges.tolist()) == ([4, 8, 4, 8, 4, 8], list(range(6)))


# ---- bad data --------------------------------------------------------------------------------------------------------


def test_an_empty_source_is_an_error(tmp_path):
    (tmp_path / "a.xyz").touch()
    for function in (data_stats, load_sizes):
        with pytest.raises(ValueError, match=r"no frames in .*a.xyz"):
            function(tmp_path / "a.xyz", 6.0)


def test_labels_that_are_not_finite_are_named(tmp_path):
    made = frames()
    made[4].calc.results["forces"][1, 1] = np.nan
    ase.io.write(tmp_path / "a.xyz", made, format="extxyz")
    with pytest.raises(FrameError, match=r"a.xyz frame 4: forces is NaN or infinite"):
        data_stats(tmp_path / "a.xyz")


def test_a_frame_whose_edges_cannot_be_counted_is_named(tmp_path):
    ase.io.write(tmp_path / "a.xyz", [*frames(2), Atoms("He", cell=[5, 5, 0], pbc=True)], format="extxyz")
    with pytest.raises(FrameError, match=r"a.xyz frame 2: .*has no volume"):
        load_sizes(tmp_path / "a.xyz", 6.0)
