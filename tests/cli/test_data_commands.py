"""`fairchem-janus data import`, `stats` and `pack` from the outside: what they print, write and refuse."""

from __future__ import annotations

import json
import os
from pathlib import Path

import ase.io
import numpy as np
import pytest
import typer
import yaml
from ase import Atoms
from ase.build import bulk
from ase.calculators.singlepoint import SinglePointCalculator
from typer.testing import CliRunner

from fairchem_janus.cli import data_import, data_pack, data_stats
from fairchem_janus.data.aselmdb import write_aselmdb

REAL_DATA = os.environ.get("JANUS_TEST_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="JANUS_TEST_DATA is not set to the folder with real data")

PACKINGS = ["sequential", "gars", "gars_no_shuffle", "gars_edges"]
NUMBERS = [
    "max_over_mean_atoms",
    "floor_atoms",
    "cv_atoms",
    "max_over_mean_edges",
    "floor_edges",
    "cv_edges",
    "comm_free_share",
]

app = typer.Typer(pretty_exceptions_enable=False)
for command in (data_import, data_stats, data_pack):
    command.register(app)


def run(*arguments: object, exit_code: int = 0) -> str:
    """Run a sub-command of `data`; return what it printed, errors included."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == exit_code, result.output
    return result.output


def frames(num_frames: int = 40, seed: int = 0) -> list[Atoms]:
    """Copper crystals of 1 to 36 atoms."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(num_frames):
        atoms = bulk("Cu") * tuple(rng.integers(1, 4, 3))
        atoms.rattle(0.05, rng=rng)
        atoms.calc = SinglePointCalculator(atoms, energy=-3.0 * len(atoms), forces=rng.normal(size=(len(atoms), 3)))
        made.append(atoms)
    return made


# ---- import ----------------------------------------------------------------------------------------------------------


def test_import_writes_a_data_set_that_stats_and_pack_read(tmp_path):
    ase.io.write(tmp_path / "a.extxyz", frames(), format="extxyz")
    printed = run("import", tmp_path / "a.extxyz", "--out", tmp_path / "train")
    assert printed.strip() == f"40 of 40 frames with energy, forces written to {tmp_path / 'train'}"
    assert "40 frames, 40 of them periodic" in run("stats", tmp_path / "train")
    run("pack", tmp_path / "train", "--num-micro-batches", 2, "--graphs-per-step", 20)


def test_import_fails_with_the_bad_frames_and_skips_them_when_told_to(tmp_path):
    made = frames()
    made[7].calc.results["energy"] = np.nan
    ase.io.write(tmp_path / "a.extxyz", made, format="extxyz")
    arguments = ["import", tmp_path / "a.extxyz", "--out", tmp_path / "train"]
    printed = run(*arguments, exit_code=1)
    assert "error: 1 of 40 frames are bad, nothing was written" in printed
    assert f"{tmp_path / 'a.extxyz'} frame 7: energy is NaN or infinite" in printed
    assert "Traceback" not in printed
    printed = run(*arguments, "--skip-bad")
    assert "39 of 40 frames" in printed
    assert f"1 left out, see {tmp_path / 'train/skipped.csv'}" in printed


def test_import_takes_names_of_labels_and_limits(tmp_path):
    made = frames()
    for atoms in made:
        atoms.info["E"], atoms.arrays["F"] = atoms.calc.results["energy"], atoms.calc.results["forces"]
        atoms.info["S"] = np.zeros(9)
        atoms.calc = None
    ase.io.write(tmp_path / "a.extxyz", made, format="extxyz")
    arguments = ["import", tmp_path / "a.extxyz", "--energy-key", "E", "--forces-key", "F", "--stress-key", "S"]
    printed = run(*arguments, "--labels", "efs", "--cutoff", 0, "--out", tmp_path / "train")
    assert "with energy, forces, stress" in printed
    assert list(np.load(tmp_path / "train/metadata.npz")) == ["natoms"]
    assert "nearer than 3 A" in run(*arguments, "--min-distance", 3, "--out", tmp_path / "b", exit_code=1)
    assert "max_energy_sigma must be positive" in run(
        *arguments, "--max-energy-sigma", 0, "--out", tmp_path / "b", exit_code=1
    )
    assert "labels must be auto" in run(*arguments, "--labels", "x", "--out", tmp_path / "b", exit_code=1)


def test_missing_files_are_an_error_without_traceback(tmp_path):
    for arguments in (
        ["import", tmp_path / "no.xyz", "--out", tmp_path / "train"],
        ["stats", tmp_path / "no.xyz"],
        ["pack", tmp_path / "no.xyz", "--num-micro-batches", 2, "--graphs-per-step", 4],
    ):
        printed = run(*arguments, exit_code=1)
        assert printed.startswith("error: no structures in")
        assert "Traceback" not in printed


# ---- stats -----------------------------------------------------------------------------------------------------------


def test_stats_print_yaml_for_every_data_set_by_name(tmp_path):
    write_aselmdb(tmp_path / "a/train", frames())
    write_aselmdb(tmp_path / "b/train", frames(seed=1))
    printed = run("stats", tmp_path / "a/train", tmp_path / "b/train", "--name", "first", "--name", "second")
    block = yaml.safe_load(printed)
    assert list(block["dataset_configs"]) == ["first", "second"]
    assert [task["name"] for task in block["tasks"]] == [
        "first_energy",
        "first_forces",
        "second_energy",
        "second_forces",
    ]
    printed = run("stats", tmp_path / "a/train", tmp_path / "b/train", "--name", "first", exit_code=1)
    assert "1 names (--name) for 2 data sets" in printed


def test_stats_write_the_metadata_that_are_missing_or_wrong(tmp_path):
    write_aselmdb(tmp_path / "train", frames(), columns={"nedges_6": np.zeros(40)})
    np.savez(tmp_path / "train/metadata.npz", natoms=np.ones(40, dtype=int))
    assert "--write-metadata" in run("stats", tmp_path / "train", exit_code=1)
    printed = run("stats", tmp_path / "train", "--write-metadata", "--cutoff", 5, "--max-neighbors", 10)
    assert printed.rstrip().endswith(f"# written: {tmp_path / 'train/metadata.npz'}")
    yaml.safe_load(printed)
    with np.load(tmp_path / "train/metadata.npz") as columns:
        assert set(columns) == {"natoms", "nedges_5_max10"}
        assert columns["natoms"].tolist() == [len(atoms) for atoms in frames()]
    run("stats", tmp_path / "train")


# ---- pack ------------------------------------------------------------------------------------------------------------


def test_pack_prints_exactly_one_json_object(tmp_path):
    write_aselmdb(tmp_path / "a", frames(40))
    ase.io.write(tmp_path / "b.extxyz", frames(24, seed=1), format="extxyz")
    arguments = ["pack", tmp_path / "a", tmp_path / "b.extxyz", "--num-micro-batches", 3, "--graphs-per-step", 16]
    result = json.loads(run(*arguments, "--gp-size", 2, "--cutoff", 6, "--json"))
    assert list(result) == PACKINGS
    for numbers in result.values():
        assert list(numbers) == NUMBERS
        assert all(np.isfinite(value) for value in numbers.values())
        for load in ("atoms", "edges"):
            assert numbers[f"max_over_mean_{load}"] >= numbers[f"floor_{load}"] - 1e-12 >= 1 - 1e-9
        assert 0 <= numbers["comm_free_share"] <= 1
    assert result["gars"]["cv_atoms"] < result["sequential"]["cv_atoms"]
    assert result["gars_edges"]["cv_edges"] < result["sequential"]["cv_edges"]
    assert result == json.loads(run(*arguments, "--gp-size", 2, "--json"))
    other = json.loads(run(*arguments, "--gp-size", 2, "--json", "--seed", 1))
    assert other != result


def test_without_a_gp_group_every_micro_batch_is_comm_free(tmp_path):
    write_aselmdb(tmp_path / "a", frames())
    result = json.loads(run("pack", tmp_path / "a", "--num-micro-batches", 3, "--graphs-per-step", 16, "--json"))
    assert {numbers["comm_free_share"] for numbers in result.values()} == {1.0}


def test_pack_prints_a_table_and_histograms(tmp_path):
    write_aselmdb(tmp_path / "a", frames(50))
    arguments = ["--num-micro-batches", 2, "--num-replicas", 2, "--graphs-per-step", 16, "--max-neighbors", 20]
    printed = run("pack", tmp_path / "a", *arguments)
    assert "50 graphs of 1 to " in printed
    assert "3 steps of 16 graphs in 2 x 2 micro-batches; the last 2 graphs make no full step" in printed
    for title in ("atoms", "edges"):
        assert f"{title} per micro-batch, sequential" in printed
    assert "atoms per micro-batch, gars\n" in printed
    assert "edges per micro-batch, gars_edges\n" in printed
    assert "###" in printed


def test_fewer_graphs_than_a_step_make_one_step(tmp_path):
    write_aselmdb(tmp_path / "a", frames(5))
    assert "1 steps of 5 graphs" in run("pack", tmp_path / "a", "--num-micro-batches", 8, "--graphs-per-step", 16)


def test_pack_names_metadata_that_disagree_with_the_data(tmp_path):
    write_aselmdb(tmp_path / "a", frames())
    np.savez(tmp_path / "a/metadata.npz", natoms=np.full(40, 2))
    printed = run("pack", tmp_path / "a", "--num-micro-batches", 2, "--graphs-per-step", 16, exit_code=1)
    assert "metadata.npz says 2 atoms for entry" in printed
    assert "--write-metadata" in printed


@needs_real_data
def test_pack_of_crystals_with_molecules_reaches_the_floor():
    sources = sorted(Path(REAL_DATA).glob("*.extxyz"))
    arguments = ["--num-micro-batches", 8, "--graphs-per-step", 64, "--gp-size", 2, "--cutoff", 6, "--json"]
    result = json.loads(run("pack", *sources, *arguments))
    for name, load in (("gars", "atoms"), ("gars_no_shuffle", "atoms"), ("gars_edges", "edges")):
        assert result[name][f"max_over_mean_{load}"] <= 1.05
        assert result["sequential"][f"cv_{load}"] >= 5 * result[name][f"cv_{load}"]
