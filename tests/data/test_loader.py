"""A job's dataloader block, regrouped: what a step's batches carry, and what becomes of graphs over the budget."""

from __future__ import annotations

import csv
import functools
import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairchem.core.common import distutils
from fairchem.core.common.data_parallel import BalancedBatchSampler
from fairchem.core.datasets.samplers.max_atom_distributed_sampler import MaxAtomDistributedBatchSampler
from fairchem.core.units.mlip_unit.mlip_unit import mt_collater_adapter
from torch.utils.data import DataLoader

from fairchem_janus.data.loader import build_dataloader
from fairchem_janus.data.sampler import ReplicaBalancedBatchSampler
from fairchem_janus.parallel.topology import Grid
from tests.builders import DATASETS, TinyDataset, tiny_tasks
from tests.integration.variants import stock_config

GET_DATALOADER = "fairchem.core.components.common.dataloader_builder.get_dataloader"
SIZES = [3, 4, 2, 5, 3, 9, 2, 4, 12, 3]


def block(sizes: list[int], sampler: Any = None, **settings: Any) -> dict[str, Any]:
    """A dataloader block over `TinyDataset(sizes)`."""
    arguments = {"max_atoms": 8, "seed": 0, **settings}
    return {
        "_target_": GET_DATALOADER,
        "dataset": {"_target_": "tests.builders.TinyDataset", "sizes": sizes},
        "batch_sampler_fn": sampler or functools.partial(MaxAtomDistributedBatchSampler, **arguments),
        "collate_fn": mt_collater_adapter(tiny_tasks()),
        "num_workers": 0,
    }


def build(
    config: Any, tmp_path: Path, *, N: int = 2, grid: Grid | None = None, oversize: str = "warn"
) -> DataLoader[list[Any]]:
    return build_dataloader(
        config,
        name="train",
        grid=grid or Grid(D=1, P=1, G=1, rank=0),
        num_micro_batches=N,
        oversize=oversize,
        run_folder=tmp_path / "run",
        pin_memory=False,
    )


def left_out(tmp_path: Path) -> list[tuple[str, str, str]]:
    """Rows of the report, largest graph first."""
    with (tmp_path / "run" / "left_out_train.csv").open() as file:
        rows = [(row["graph"], row["natoms"], row["reason"]) for row in csv.DictReader(file)]
    return sorted(rows, key=lambda row: -int(row[1]))


# ---------------------------------------------------------------- what a step carries


def test_an_item_is_a_list_of_micro_batches_of_the_jobs_own_collater(tmp_path: Path) -> None:
    loader = build(block(SIZES), tmp_path)
    items = list(loader)
    batches = list(MaxAtomDistributedBatchSampler(TinyDataset(SIZES), max_atoms=8, num_replicas=1, rank=0, seed=0))
    assert len(loader) == len(items) == -(-len(batches) // 2)
    assert [len(item) for item in items[:-1]] == [2] * (len(items) - 1)
    for batch, indices in zip([batch for item in items for batch in item], batches, strict=True):
        assert batch["natoms"].tolist() == [SIZES[i] for i in indices]
        expected = mt_collater_adapter(tiny_tasks())([TinyDataset(SIZES)[i] for i in indices])
        for key in ("pos", "batch", "omat_energy", "omat_forces", "omol_energy"):
            assert torch.equal(batch[key], expected[key]), key


def test_every_graph_carries_its_number_and_its_name(tmp_path: Path) -> None:
    for item in build(block(SIZES), tmp_path):
        for batch in item:
            numbers = batch["graph_numbers"]
            assert numbers.dtype == torch.int64
            assert batch["graph_ids"] == [f"[{number}]" for number in numbers.tolist()]
            assert [SIZES[number] for number in numbers] == batch["natoms"].tolist()


def test_names_tell_the_data_set_and_the_row_in_its_files(fake_job: list[str], tmp_path: Path) -> None:
    """Through fairchem's combined data set, whose rows are shuffled and repeated by the sampling ratio."""
    config = stock_config(fake_job)
    loader = build(config.runner.train_dataloader, tmp_path, N=3)
    parts = dict(zip(loader.dataset.dataset_names, loader.dataset.dataset.datasets, strict=True))
    seen = set()
    for item in loader:
        for batch in item:
            starts = np.cumsum([0, *batch["natoms"].tolist()])
            for graph, (name, label) in enumerate(zip(batch["graph_ids"], batch["dataset"], strict=True)):
                split, _, row = name.removesuffix("]").partition("[")
                assert split == f"{label}.train"
                original = parts[split].dataset[int(row)]
                assert torch.equal(original["pos"], batch["pos"][starts[graph] : starts[graph + 1]])
                seen.add(split)
    assert seen == {f"{name}.train" for name in DATASETS}


def test_replicas_share_an_epoch_and_stages_of_a_replica_load_the_same(tmp_path: Path) -> None:
    sizes = [3] * 24
    epochs = []
    for rank in range(4):
        grid = Grid(D=2, P=2, G=1, rank=rank)
        epochs.append(
            [[b["graph_numbers"].tolist() for b in item] for item in build(block(sizes), tmp_path, grid=grid)]
        )
    assert epochs[0] == epochs[1]
    assert epochs[2] == epochs[3]
    first, second = ({i for item in epochs[rank] for batch in item for i in batch} for rank in (0, 2))
    assert not first & second
    assert first | second == set(range(24))


def test_fairchems_balanced_sampler_is_replaced_by_one_that_sends_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(distutils.CURRENT_DEVICE_TYPE_STR, "cpu")
    sampler = functools.partial(BalancedBatchSampler, batch_size=2, seed=0)
    loader = build(block(SIZES, sampler), tmp_path, grid=Grid(D=2, P=1, G=1, rank=1))
    assert isinstance(loader.batch_sampler.batches, ReplicaBalancedBatchSampler)  # type: ignore[union-attr]
    assert [len(item) for item in loader] == [2, 1]
    assert not (tmp_path / "run").exists()  # it has no budget that could leave a graph out


# ---------------------------------------------------------------- graphs that are left out


def test_nothing_left_out_is_not_worth_a_word(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        build(block(SIZES, max_atoms=12), tmp_path)
    assert not caplog.records
    assert not (tmp_path / "run").exists()


def test_graphs_over_the_budget_are_counted_and_listed(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        loader = build(block(SIZES), tmp_path)
    assert {n for item in loader for batch in item for n in batch["graph_numbers"].tolist()} == {0, 1, 2, 3, 4, 6, 7, 9}
    assert left_out(tmp_path) == [("[8]", "12", "max_atoms"), ("[5]", "9", "max_atoms")]
    (record,) = caplog.records
    text = record.getMessage()
    assert "2 of 10 graphs are never used: 2 above max_atoms=8, 0 for min_atoms; the largest has 12 atoms" in text
    assert str(tmp_path / "run" / "left_out_train.csv") in text
    assert "Raise max_atoms to 12" in text


def test_graphs_that_min_atoms_drops_are_listed_with_that_reason(tmp_path: Path) -> None:
    """fairchem counts them as used."""
    loader = build(block(SIZES, min_atoms=8), tmp_path)
    used = {n for item in loader for batch in item for n in batch["graph_numbers"].tolist()}
    rows = left_out(tmp_path)
    assert {row[2] for row in rows} == {"max_atoms", "min_atoms"}
    for name, natoms, reason in rows:
        assert (reason == "max_atoms") == (int(natoms) > 8)
        assert int(name.strip("[]")) not in used
    assert len(rows) + len(used) == len(SIZES)


@pytest.mark.parametrize("rank", [0, 1])
def test_as_an_error_a_graph_over_the_budget_ends_the_job_on_every_rank(tmp_path: Path, rank: int) -> None:
    with pytest.raises(ValueError) as caught:
        build(block(SIZES), tmp_path, oversize="error", grid=Grid(D=1, P=2, G=1, rank=rank))
    assert "2 above max_atoms=8" in str(caught.value)
    assert "set runner.janus.oversize=warn to train without them" in str(caught.value)
    assert (tmp_path / "run").exists() == (rank == 0)


def test_what_min_atoms_drops_is_no_error(tmp_path: Path) -> None:
    sizes = [3, 3, 3, 3, 2]  # the last batch is too small
    build(block(sizes, max_atoms=6, min_atoms=5), tmp_path, oversize="error")
    assert {row[2] for row in left_out(tmp_path)} == {"min_atoms"}


@pytest.mark.parametrize("oversize", ["warn", "error"])
def test_every_graph_over_the_budget_is_an_error(tmp_path: Path, oversize: str) -> None:
    """fairchem would train on one empty batch."""
    with pytest.raises(ValueError) as caught:
        build(block([9, 10]), tmp_path, oversize=oversize)
    assert "no graph is left to train on: 2 of 2 graphs are never used" in str(caught.value)
    assert "Raise max_atoms to 10" in str(caught.value)


def test_min_atoms_that_leaves_no_batch_is_an_error(tmp_path: Path) -> None:
    """fairchem fails with `max() arg is an empty sequence`."""
    with pytest.raises(ValueError) as caught:
        build(block([2, 2], min_atoms=7), tmp_path)
    assert "the sampler could not make batches for 1 replica(s)" in str(caught.value)
    assert "Check max_atoms and min_atoms" in str(caught.value)


def test_fewer_batches_than_replicas_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError) as caught:
        build(block([3, 3]), tmp_path, grid=Grid(D=2, P=1, G=1, rank=0))
    assert "for 2 replica(s): there are less batches than ranks!" in str(caught.value)


def test_an_empty_data_set_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the data set of a dataloader is empty; check its src paths"):
        build(block([]), tmp_path)


def test_another_builder_of_dataloaders_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"built by torch\.utils\.data\.DataLoader; janus regroups"):
        build({**block(SIZES), "_target_": "torch.utils.data.DataLoader"}, tmp_path)
