"""GARS through the job's dataloader block: tags on batches, reports, bad data named, waiting measured."""

from __future__ import annotations

import json
import logging
import pickle
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from ase import Atoms
from ase.calculators.singlepoint import SinglePointCalculator
from ase.neighborlist import neighbor_list
from fairchem.core.datasets import atomic_data
from omegaconf import OmegaConf

from fairchem_janus.data.aselmdb import write_aselmdb
from fairchem_janus.data.edges import EdgeCounts, count_edges
from fairchem_janus.data.loader import MicroBatchDataset, StepItem, StepLoader, build_dataloader
from fairchem_janus.parallel.topology import Grid


def frame(num_atoms: int, *, labels: tuple[str, ...] = ("energy", "forces")) -> Atoms:
    rng = np.random.default_rng(num_atoms)
    edge = 2.5 * num_atoms ** (1 / 3) + 1
    atoms = Atoms(numbers=rng.integers(1, 10, num_atoms), positions=rng.uniform(0, edge, (num_atoms, 3)))
    atoms.set_cell([edge] * 3)
    atoms.set_pbc(True)
    values = {"energy": float(-num_atoms), "forces": rng.normal(size=(num_atoms, 3))}
    if labels:
        atoms.calc = SinglePointCalculator(atoms, **{label: values[label] for label in labels})
    return atoms


SAMPLERS = "fairchem.core.datasets.samplers"
SIZES = (5, 6, 7, 8, 9, 10, 11, 12, 30)


@pytest.fixture
def block(tmp_path: Path):
    """A dataloader block over one data set `demo` of frames with SIZES atoms; edge counts at 4 A in the metadata."""
    frames = [frame(size) for size in SIZES]
    write_aselmdb(tmp_path / "demo", frames, columns={"nedges_4": [count_edges(f, 4.0) for f in frames]})
    return loader_block(tmp_path / "demo")


def loader_block(source: Path, **a2g):
    common = {"level": "system", "datasets": ["demo"], "loss_fn": None, "normalizer": None}
    tasks = [
        {**common, "name": "demo_energy", "property": "energy", "out_spec": {"dim": [1], "dtype": "float32"}},
        {**common, "name": "demo_forces", "property": "forces", "out_spec": {"dim": [3], "dtype": "float32"}},
    ]
    tasks[1]["level"] = "atom"
    unit = "fairchem.core.units.mlip_unit.mlip_unit"
    return OmegaConf.create(
        {
            "_target_": "fairchem.core.components.common.dataloader_builder.get_dataloader",
            "dataset": {
                "_target_": "fairchem.core.datasets.mt_concat_dataset.create_concat_dataset",
                "dataset_configs": {
                    "demo": {
                        "splits": {"train": {"src": str(source)}},
                        "format": "ase_db",
                        "a2g_args": {"r_energy": True, "r_forces": True, "r_stress": False, **a2g},
                        "key_mapping": {"energy": "demo_energy", "forces": "demo_forces"},
                        "transforms": {"common_transform": {"dataset_name": "demo"}},
                    }
                },
                "combined_dataset_config": {"sampling": {"type": "temperature", "temperature": 1.0}},
            },
            "batch_sampler_fn": {
                "_target_": f"{SAMPLERS}.max_atom_distributed_sampler.MaxAtomDistributedBatchSampler",
                "_partial_": True,
                "max_atoms": 40,
                "shuffle": True,
                "seed": 0,
            },
            "num_workers": 0,
            "collate_fn": {
                "_target_": f"{unit}.mt_collater_adapter",
                "tasks": [{"_target_": f"{unit}.Task", **task} for task in tasks],
            },
        }
    )


def make_loader(
    block, folder: Path, *, N: int = 2, G: int = 1, g: int = 0, oversize: str = "warn", **arguments
) -> StepLoader:
    return build_dataloader(
        block,
        name="train",
        grid=Grid(D=1, P=1, G=G, rank=g),
        num_micro_batches=N,
        oversize=oversize,
        run_folder=folder / "run",
        pin_memory=False,
        edge_counts=EdgeCounts.of_backbone({"cutoff": 4.0, "max_neighbors": 20}),
        **arguments,
    )


def report_of(folder: Path):
    return json.loads((folder / "run" / "data_report.json").read_text())["train"]


def test_batches_carry_their_tags_and_edge_counts(block, tmp_path):
    loader = make_loader(block, tmp_path, gars={"graphs_per_step": 9, "cost": "edges"})
    (item,) = loader
    assert isinstance(item, StepItem)
    numbers = []
    for batch in item:
        assert batch["natoms"].tolist() == [loader.dataset.sizes[n] for n in batch["graph_numbers"]]
        assert len(batch["graph_ids"]) == len(batch["natoms"])
        assert batch["gars_num_edges"] == sum(loader.batch_sampler.edges[n] for n in batch["graph_numbers"])
        moved = batch.to("cpu", non_blocking=True)
        assert moved["gars_tag"] == batch["gars_tag"] == "comm-free"
        numbers += batch["graph_numbers"].tolist()
    assert sorted(numbers) == list(range(9))


@pytest.mark.parametrize("settings", [{}, {"rank_budget": 1}, {"rank_budget": 1000}])
def test_graph_parallel_ranks_share_dist_micro_batches_and_load_their_own_graphs_of_others(block, tmp_path, settings):
    gars = {"graphs_per_step": 9, "cost": "edges", **settings}
    items = [next(iter(make_loader(block, tmp_path, N=3, G=2, g=g, gars=gars))) for g in range(2)]
    numbers = []
    for parts in zip(*items, strict=True):
        (tag,) = {part["gars_tag"] for part in parts if part is not None}
        own = [[] if part is None else part["graph_numbers"].tolist() for part in parts]
        if tag == "dist":
            assert own[0] == own[1]
            assert settings != {"rank_budget": 1000} or len(own[0]) == 1  # a single graph has nobody to share with
        else:
            assert settings != {"rank_budget": 1}
        numbers += own[0] if tag == "dist" else own[0] + own[1]
    assert sorted(numbers) == list(range(9))


def test_edge_counts_come_from_graphs_that_the_loader_built(block, tmp_path, monkeypatch):
    def neighbors(atoms, cutoff, max_neigh):  # fairchem's own needs pymatgen
        return neighbor_list("ijdS", atoms, cutoff)

    monkeypatch.setattr(atomic_data, "get_neighbors_pymatgen", neighbors)
    built = loader_block(tmp_path / "demo", r_edges=True, radius=4.0, max_neigh=300)
    loader = make_loader(built, tmp_path, gars={"graphs_per_step": 9})
    (item,) = loader
    assert loader.batch_sampler.edges is None
    counts = np.load(tmp_path / "demo" / "metadata.npz")["nedges_4"]
    assert sum(batch["gars_num_edges"] for batch in item) == counts.sum()
    assert all(batch["gars_num_edges"] == batch["nedges"].sum() for batch in item)


def test_a_stock_samplers_batches_carry_no_tags(block, tmp_path):
    for item in make_loader(block, tmp_path):
        assert all("gars_tag" not in batch and "graph_numbers" in batch for batch in item)
    assert not (tmp_path / "run" / "data_report.json").exists()


def test_the_sampler_can_stand_in_the_dataloader_block(block, tmp_path):
    block.batch_sampler_fn = {
        "_target_": "fairchem_janus.data.gars_sampler.GARSBatchSampler",
        "_partial_": True,
        "graphs_per_step": 4,
        "max_atoms": 20,
    }
    loader = make_loader(block, tmp_path, N=3)
    assert loader.batch_sampler.num_micro_batches == 3
    assert sorted(n for item in loader for batch in item for n in batch["graph_numbers"].tolist()) == sorted(
        set(range(9)) - set(loader.batch_sampler.over_budget.tolist())
    )


def test_workers_change_nothing(block, tmp_path):
    def seen(workers: int, prefetch: int | None) -> list:
        block.num_workers = workers
        loader = make_loader(block, tmp_path, gars={"graphs_per_step": 4, "cost": "edges"}, prefetch_steps=prefetch)
        assert loader.prefetch_factor == (prefetch if workers else None)
        epochs = []
        for epoch, start in ((0, 0), (1, 0), (1, 1)):
            loader.batch_sampler.set_epoch_and_start_iteration(epoch, start)
            epochs.append([[(b["graph_ids"], b["pos"].tolist(), b["gars_tag"]) for b in item] for item in loader])
        assert epochs[2] == epochs[1][1:]
        return epochs

    assert seen(0, 3) == seen(2, 3)


def test_a_graph_of_another_size_than_its_metadata_say_is_named(block, tmp_path):
    file = tmp_path / "demo" / "metadata.npz"
    columns = dict(np.load(file))
    columns["natoms"] = columns["natoms"] + (columns["natoms"] == 9)
    np.savez_compressed(file, **columns)
    loader = make_loader(block, tmp_path, gars={"graphs_per_step": 9})
    with pytest.raises(ValueError, match=r"metadata.npz says 10 atoms for demo.train\[4\], but it has 9") as caught:
        list(loader)
    assert f"fairchem-janus data stats {tmp_path / 'demo'} --write-metadata" in str(caught.value)


def test_metadata_of_another_length_name_the_data_set(block, tmp_path):
    file = tmp_path / "demo" / "metadata.npz"
    np.savez_compressed(file, natoms=np.array(SIZES[:-1]))
    with pytest.raises(ValueError, match="metadata size 8 and dataset size 9") as caught:
        make_loader(block, tmp_path, gars={"graphs_per_step": 9})
    assert "data set demo.train" in str(caught.value)
    assert f"fairchem-janus data stats {tmp_path / 'demo'} --write-metadata" in str(caught.value)


def test_the_report_tells_counts_sizes_and_what_is_left_out(block, tmp_path, caplog):
    settings = {"graphs_per_step": 3, "incomplete": "drop", "max_atoms": 29}
    with caplog.at_level(logging.INFO):
        loader = make_loader(block, tmp_path, gars=settings)
        for epoch in (0, 2):
            loader.batch_sampler.set_epoch_and_start_iteration(epoch, 0)
            list(loader)
    report = report_of(tmp_path)
    assert report["graphs"] == 9
    assert report["datasets"] == {"demo.train": {"graphs": 9, "frames": 9}}
    assert (report["used_per_epoch"], report["steps_per_epoch"], report["micro_batches_per_step"]) == (6, 2, 2)
    assert (report["atoms"]["min"], report["atoms"]["max"], report["atoms"]["total"]) == (5, 30, sum(SIZES))
    assert sum(report["atoms"]["histogram"]["counts"]) == 9
    assert report["edges"] is None
    (over,) = report["left_out"]["over_budget"]
    assert over["natoms"] == 30
    incomplete = report["left_out"]["incomplete_step"]
    assert set(incomplete) == {"0", "2"}
    assert all(len(names) == 2 == report["left_out"]["incomplete_step_per_epoch"] for names in incomplete.values())
    assert incomplete["0"] != incomplete["2"]
    assert "1 of 9 graphs are never used: they exceed the budget of a micro-batch (29 atoms)" in caplog.text
    assert f"epoch 2: 2 graphs make no full step and are left out: {', '.join(incomplete['2'])}" in caplog.text


def test_a_graph_over_the_budget_can_be_an_error(block, tmp_path):
    with pytest.raises(ValueError, match=r"1 of 9 graphs are never used.*janus.oversize=warn"):
        make_loader(block, tmp_path, gars={"graphs_per_step": 3, "max_atoms": 29}, oversize="error")


def test_fewer_graphs_than_micro_batches_are_worth_a_warning(block, tmp_path, caplog):
    make_loader(block, tmp_path, N=16, gars={"graphs_per_step": 9, "cost": "edges"})
    assert "a step of the train loader has 9 graphs for 16 micro-batches: some stay empty" in caplog.text
    assert report_of(tmp_path)["edges"]["max"] > 0


def test_unlabelled_graphs_are_left_out_and_named_once(tmp_path, caplog):
    frames = [frame(size, labels=() if size in (6, 30) else ("energy", "forces")) for size in SIZES]
    write_aselmdb(tmp_path / "demo", frames)
    loader = make_loader(loader_block(tmp_path / "demo"), tmp_path, N=4, gars={"graphs_per_step": 9})
    for _ in range(2):
        (item,) = loader
        sizes = [size for batch in item for size in batch["natoms"].tolist()]
        assert sorted(sizes) == sorted(set(SIZES) - {6, 30})
        for batch in item:
            assert len(batch["graph_ids"]) == len(batch["graph_numbers"]) == len(batch["natoms"])
    messages = [m for m in caplog.messages if "have no label of any task" in m]
    assert len(messages) == 1
    rows = loader.dataset.dataset.datasets[0].indices
    for place in (1, 8):
        assert f"demo.train[{place}]" in messages[0]
        assert place in rows


def test_data_without_any_label_are_an_error(tmp_path):
    """Else a run whose task names are misspelt would train on nothing."""
    write_aselmdb(tmp_path / "demo", [frame(5, labels=()), frame(6, labels=())])
    loader = make_loader(loader_block(tmp_path / "demo"), tmp_path, gars={"graphs_per_step": 2})
    with pytest.raises(ValueError, match=r"none of the first 2 graphs has a label .* demo.train\[\d\]: the names of"):
        list(loader)


def test_a_graph_with_some_of_its_labels_is_an_error(tmp_path):
    write_aselmdb(tmp_path / "demo", [frame(5), frame(6, labels=("energy",))])
    loader = make_loader(loader_block(tmp_path / "demo"), tmp_path, gars={"graphs_per_step": 2})
    with pytest.raises(ValueError, match=r"demo.train\[1\] has a label for some tasks .* none for demo_forces"):
        list(loader)


def test_waiting_for_data_is_measured(block, tmp_path, monkeypatch):
    load = MicroBatchDataset.__getitem__

    def slow(self, plan):
        time.sleep(0.05)
        return load(self, plan)

    monkeypatch.setattr(MicroBatchDataset, "__getitem__", slow)
    loader = make_loader(block, tmp_path, N=2, gars={"graphs_per_step": 5})
    for _ in loader:
        time.sleep(0.2)  # the step itself does not count
    assert 0.2 <= loader.take_wait() < 0.4
    assert loader.take_wait() == 0.0


def test_an_item_pins_its_tensors(block, tmp_path, monkeypatch):
    (item,) = make_loader(block, tmp_path, gars={"graphs_per_step": 9})
    pinned = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: (pinned.append(tensor.shape), tensor)[1])
    copy = pickle.loads(pickle.dumps(item)).pin_memory()
    assert copy.unlabelled == []
    for batch in item:
        assert batch["pos"].shape in pinned
        assert batch["graph_numbers"].shape in pinned
    assert [batch["graph_ids"] for batch in copy] == [batch["graph_ids"] for batch in item]
