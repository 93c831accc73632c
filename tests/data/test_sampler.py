"""Stock samplers, regrouped: N batches make a step, resuming included, and replicas balance without messages."""

from __future__ import annotations

import functools
import threading
from typing import Any

import numpy as np
import pytest
import torch
from fairchem.core.common import distutils
from fairchem.core.common.data_parallel import BalancedBatchSampler
from fairchem.core.datasets.samplers.max_atom_distributed_sampler import MaxAtomDistributedBatchSampler

from fairchem_janus.data.sampler import MicroBatchSampler, ReplicaBalancedBatchSampler, replica_sampler_fn
from tests.builders import TinyDataset

SIZES = np.random.default_rng(0).integers(1, 30, 121).tolist()


def stock(*, num_replicas: int = 1, rank: int = 0, **settings: Any) -> MaxAtomDistributedBatchSampler:
    arguments = {"max_atoms": 40, "seed": 3, **settings}
    return MaxAtomDistributedBatchSampler(TinyDataset(SIZES), num_replicas=num_replicas, rank=rank, **arguments)


def balanced(*, num_replicas: int, rank: int, **settings: Any) -> ReplicaBalancedBatchSampler:
    return ReplicaBalancedBatchSampler(
        dataset=TinyDataset(SIZES), num_replicas=num_replicas, rank=rank, batch_size=4, seed=3, **settings
    )


def graphs(micro_batch: Any) -> list[int]:
    """Indices of a plan, or of the bare list that does for one."""
    return list(getattr(micro_batch, "graphs", micro_batch))


# ---------------------------------------------------------------- N batches make a step


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 5, 100])
def test_consecutive_batches_make_a_step_and_the_last_step_takes_what_is_left(num_micro_batches: int) -> None:
    batches = list(stock())
    steps = list(MicroBatchSampler(stock(), num_micro_batches))
    assert [graphs(micro_batch) for step in steps for micro_batch in step] == batches
    assert all(len(step) == num_micro_batches for step in steps[:-1])
    assert len(steps[-1]) == len(batches) - num_micro_batches * (len(steps) - 1) > 0


@pytest.mark.parametrize("num_micro_batches", [1, 2, 3, 100])
def test_its_length_is_the_number_of_steps(num_micro_batches: int) -> None:
    sampler = MicroBatchSampler(stock(), num_micro_batches)
    assert len(sampler) == len(list(sampler))


@pytest.mark.parametrize("start", [0, 1, 4])
@pytest.mark.parametrize("make", [stock, balanced])
def test_resuming_at_a_step_goes_on_with_what_would_have_come(make: Any, start: int) -> None:
    sampler = MicroBatchSampler(make(num_replicas=2, rank=1), 2)
    sampler.set_epoch_and_start_iteration(5, 0)
    whole = list(sampler)
    assert len(whole) > 4
    resumed = MicroBatchSampler(make(num_replicas=2, rank=1), 2)
    resumed.set_epoch_and_start_iteration(5, start)
    assert list(resumed) == whole[start:]


@pytest.mark.parametrize("make", [stock, balanced])
def test_another_epoch_is_shuffled_otherwise(make: Any) -> None:
    sampler = MicroBatchSampler(make(num_replicas=2, rank=0), 2)
    epochs = []
    for epoch in (0, 1, 0):
        sampler.set_epoch_and_start_iteration(epoch, 0)
        epochs.append(list(sampler))
    assert epochs[0] == epochs[2] != epochs[1]


def test_indices_are_plain_numbers() -> None:
    """Data sets index files with them, and stages compare them."""
    (first, *_) = MicroBatchSampler(stock(), 2)
    assert {type(index) for micro_batch in first for index in graphs(micro_batch)} == {int}


# ---------------------------------------------------------------- balanced batches


def fairchems(monkeypatch: pytest.MonkeyPatch, num_ranks: int, **settings: Any) -> list[list[list[int]]]:
    """What fairchem's sampler yields on each rank: its own code on one thread a rank, gathering through a list."""
    barrier, slots, results = threading.Barrier(num_ranks), [None] * num_ranks, [[] for _ in range(num_ranks)]
    own = threading.local()

    def all_gather(data: torch.Tensor, **_: Any) -> list[Any]:
        slots[own.rank] = data  # type: ignore[call-overload]
        barrier.wait(10)
        gathered = list(slots)
        barrier.wait(10)
        return gathered

    monkeypatch.setattr(distutils, "all_gather", all_gather)
    monkeypatch.setattr(BalancedBatchSampler, "_dist_enabled", staticmethod(lambda: True))
    monkeypatch.setenv(distutils.CURRENT_DEVICE_TYPE_STR, "cpu")

    def run(rank: int) -> None:
        own.rank = rank
        sampler = BalancedBatchSampler(
            TinyDataset(SIZES), num_replicas=num_ranks, rank=rank, batch_size=4, seed=3, **settings
        )
        sampler.set_epoch_and_start_iteration(2, 1)
        results[rank] = [np.asarray(batch).tolist() for batch in sampler]

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


@pytest.fixture
def cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(distutils.CURRENT_DEVICE_TYPE_STR, "cpu")


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("settings", [{}, {"shuffle": False}, {"drop_last": True}], ids=str)
@pytest.mark.parametrize("num_replicas", [2, 3])
def test_balanced_batches_are_those_of_fairchems_ranks(
    monkeypatch: pytest.MonkeyPatch, num_replicas: int, settings: dict[str, Any]
) -> None:
    expected = fairchems(monkeypatch, num_replicas, **settings)
    monkeypatch.undo()
    monkeypatch.setenv(distutils.CURRENT_DEVICE_TYPE_STR, "cpu")
    assert all(len(batches) > 5 for batches in expected)
    for rank in range(num_replicas):
        sampler = balanced(num_replicas=num_replicas, rank=rank, **settings)
        sampler.set_epoch_and_start_iteration(2, 1)
        assert list(sampler) == expected[rank]


@pytest.mark.usefixtures("cpu")
def test_replicas_get_about_the_same_number_of_atoms_and_share_nothing() -> None:
    samplers = [balanced(num_replicas=2, rank=rank) for rank in range(2)]
    steps = list(zip(*samplers, strict=True))
    assert sorted({index for step in steps for batch in step for index in batch}) == list(range(len(SIZES)))
    for step in steps[:-1]:  # the last is padded with repeats
        assert not set(step[0]) & set(step[1])
        first, second = (sum(SIZES[i] for i in batch) for batch in step)
        assert abs(first - second) <= max(SIZES[i] for batch in step for i in batch)


@pytest.mark.usefixtures("cpu")
@pytest.mark.parametrize("settings", [{"num_replicas": 1}, {"num_replicas": 2, "mode": False}])
def test_where_fairchem_does_not_balance_neither_do_we(settings: dict[str, Any]) -> None:
    own = list(balanced(rank=0, **settings))
    theirs = BalancedBatchSampler(TinyDataset(SIZES), rank=0, batch_size=4, seed=3, **settings)
    assert own == list(theirs)  # without torch.distributed, which is where fairchem would gather
    assert len(own) == len(theirs) == len(balanced(rank=0, **settings))


def test_only_fairchems_balanced_sampler_is_replaced() -> None:
    replaced = replica_sampler_fn(functools.partial(BalancedBatchSampler, batch_size=4, seed=0))
    assert replaced.func is ReplicaBalancedBatchSampler  # type: ignore[attr-defined]
    assert replaced.keywords == {"batch_size": 4, "seed": 0}  # type: ignore[attr-defined]
    other = functools.partial(MaxAtomDistributedBatchSampler, max_atoms=5)
    assert replica_sampler_fn(other) is other
