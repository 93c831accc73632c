"""How often graph-parallel ranks talk: counted at torch.distributed itself, phase by phase."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from fairchem.core.launchers.slurm_launch import _set_seeds
from omegaconf import DictConfig, open_dict
from torch.utils._python_dispatch import TorchDispatchMode

from fairchem_janus.parallel import graph
from fairchem_janus.parallel.launch import run_on_ranks
from fairchem_janus.runner import JanusRunner
from fairchem_janus.schedule import Phase
from fairchem_janus.verify.janus_side import steps_of
from tests.integration.options import backbone
from tests.integration.test_graph_parallel import MODES, Case, graph_parallel_job

NUM_BLOCKS = 4

Counts = dict[tuple[str, int], int]
"""(phase, micro-batch) -> collectives."""


class CountCollectives(TorchDispatchMode):
    """Counts what reaches torch.distributed, whoever calls it."""

    number = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional", "_c10d_functional_autograd"):
            self.number += "wait" not in func.__name__
        return func(*args, **(kwargs or {}))


def count(config: DictConfig, *, fairchems: bool = False) -> tuple[Counts, list[bool], float]:
    """Run one step on this rank. Returns the collectives of every phase, which micro-batches are dist, and the loss.

    Args:
        fairchems: leave fairchem's own collectives in place.
    """
    with fairchem_collectives() if fairchems else nothing():
        _set_seeds(config.job.seed)
        runner = JanusRunner(**{key: value for key, value in config.runner.items() if not key.startswith("_")})
        try:
            unit = runner.train_eval_unit
            unit.load_scheduler(len(runner.train_dataloader))
            unit.reporter.active = False
            found: Counter[tuple[str, int]] = Counter()
            execute = unit.runtime._execute

            def counting(action: Any, batches: Any, result: Any) -> None:
                with CountCollectives() as mode:
                    execute(action, batches, result)
                found[str(action.phase), action.micro_batch] += mode.number

            unit.runtime._execute = counting
            (data,) = steps_of(runner.train_dataloader, 1)
            dist_ones = [batch is not None and batch["gars_tag"] == graph.DIST for batch in data]
            unit.train_step(None, data)
            return dict(found), dist_ones, unit.last_loss
        finally:
            runner.close()


@contextmanager
def nothing() -> Iterator[None]:
    yield


@contextmanager
def fairchem_collectives() -> Iterator[None]:
    """`GraphParallel.exchanging` as it would be without this package's collectives."""
    keep = {"_GRAPH_PARALLEL_GROUP", "_GP_CONFIG"}
    attributes = graph._attributes
    graph._attributes = lambda values: attributes([value for value in values if value[1] in keep])
    try:
        yield
    finally:
        graph._attributes = attributes


def count_all(jobs: list[tuple[DictConfig, bool]]) -> list[tuple[Counts, list[bool], float]]:
    return [count(config, fairchems=fairchems) for config, fairchems in jobs]


@pytest.fixture(scope="module")
def counts(fake_job: list[str]) -> dict[str, tuple[Counts, list[bool], float]]:
    """Rank 0's counts at P = 1, G = 2, where phases exchange nothing but halos."""
    jobs = {
        f"{mode} {tags}": (graph_parallel_job(Case(mode, tags, "mole-efs"), fake_job, P=1, G=2), False)
        for mode in MODES
        for tags in ("dist", "comm-free", "mixed")
    }
    jobs["fairchem's"] = (graph_parallel_job(Case(MODES[0], "dist", "mole-efs"), fake_job, P=1, G=2), True)
    balanced = graph_parallel_job(Case(MODES[0], "dist", "mole-efs"), fake_job, P=1, G=2)
    with open_dict(balanced):
        backbone(charge_balanced_channels=[0])(balanced)
    jobs["balanced"] = (balanced, False)
    results = run_on_ranks(count_all, list(jobs.values()), world_size=2, timeout_seconds=300.0)[0]
    return dict(zip(jobs, results, strict=True))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("tags", ["dist", "comm-free", "mixed"])
def test_a_dist_micro_batch_exchanges_once_a_block_and_phase_and_a_comm_free_one_never(
    counts: dict[str, tuple[Counts, list[bool], float]], mode: str, tags: str
) -> None:
    found, dist_ones, _ = counts[f"{mode} {tags}"]
    assert set(dist_ones) <= {"dist": {True}, "comm-free": {False}, "mixed": {True, False}}[tags]
    for (phase, index), number in found.items():
        if not dist_ones[index]:
            assert number == 0, f"comm-free micro-batch {index} issued {number} collectives in {phase}"
            continue
        extra = 0
        if phase == Phase.FF:
            extra = 3  # the gate: energies, forces, stress
        elif phase == Phase.FE and mode.startswith("ALL_TO_ALL"):
            extra = 2  # who needs which atoms: counts and indices
        assert number == NUM_BLOCKS + extra, f"{phase} of micro-batch {index}"


def test_balanced_channels_cost_one_sum_a_block_and_phase(counts: dict[str, tuple[Counts, list[bool], float]]) -> None:
    found, _, _ = counts["balanced"]
    assert {phase: n for (phase, index), n in found.items() if index == 0} == {
        "FE": 2 * NUM_BLOCKS,
        "FF": 2 * NUM_BLOCKS + 3,
        "BF": 2 * NUM_BLOCKS,
        "BE": 2 * NUM_BLOCKS,
    }


def test_fairchems_own_collectives_would_double_the_traffic_of_bf(
    counts: dict[str, tuple[Counts, list[bool], float]],
) -> None:
    """They turn undefined gradients into zeros and send these: why this package has its own."""
    theirs, _, their_loss = counts["fairchem's"]
    ours, _, our_loss = counts[f"{MODES[0]} dist"]
    assert theirs["BF", 0] == 2 * ours["BF", 0]
    assert theirs["BE", 0] == ours["BE", 0]
    assert their_loss == pytest.approx(our_loss, rel=1e-6)
