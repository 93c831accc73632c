"""Packing changes the gradient by round-off only, and runs that GARS packs are as exact as any."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from omegaconf import DictConfig

from fairchem_janus.data.gars import pack
from fairchem_janus.verify.compare import compare, tensor_errors
from fairchem_janus.verify.run import pipeline_trace, reference_trace
from fairchem_janus.verify.trace import Named, Trace
from tests.integration.packings import Packing, gradients_of
from tests.integration.variants import adopt, make_variant

TOLERANCE = 1e-10
"""In float64, where another order of summation leaves about 1e-14."""

NUM_GRAPHS = 10
"""Of both data sets of the job, one of which has no stress."""

FEW = ["train_dataset.combined_dataset_config.sampling.ratios={omat.train: 0.1, omol.train: 0.1}"]
"""Four and four graphs."""


def global_batch(config: DictConfig) -> list[int]:
    """Some graphs of both data sets: omat.train comes first, with 48 graphs of its own, then omol.train twice."""
    return [int(graph) for graph in np.random.default_rng(0).permutation(96)[:NUM_GRAPHS]]


def random_packing(graphs: list[int], rng: np.random.Generator) -> Packing:
    """Any order, cut anywhere."""
    order = rng.permutation(graphs)
    cuts = rng.choice(np.arange(1, len(graphs)), size=rng.integers(0, 8), replace=False)
    return [part.tolist() for part in np.split(order, np.sort(cuts))]


def gars_packing(graphs: list[int], num_micro_batches: int) -> Packing:
    sizes = np.random.default_rng(num_micro_batches).integers(1, 20, len(graphs))
    micro_batches = pack(sizes, num_micro_batches, seed=num_micro_batches).micro_batches
    return [[graphs[place] for place in micro_batch.graphs] for micro_batch in micro_batches]


def worst(gradients: Named, reference: Named) -> float:
    return max(tensor_errors(gradients, reference).values())


@pytest.mark.parametrize("variant", [pytest.param("mole-efs", marks=pytest.mark.long), "mole-dropout-efs"])
def test_twenty_packings_of_a_global_batch_have_one_gradient(fake_job: list[str], variant: str) -> None:
    """Two data sets, stress on one of them; with dropout too, since masks belong to graphs."""
    config = make_variant(variant, fake_job, *adopt(P=1, N=1), "runner.train_eval_unit.clip_grad_norm=null")
    graphs = global_batch(config)
    rng = np.random.default_rng(1)
    packings = [random_packing(graphs, rng) for _ in range(17)] + [gars_packing(graphs, n) for n in (1, 3, 5)]
    assert len({tuple(map(tuple, packing)) for packing in packings}) == 20
    assert all(sorted(itertools.chain(*packing)) == sorted(graphs) for packing in packings)
    found = gradients_of(config, packings)
    union = Trace(batches=[[[graphs]]], steps_per_epoch=10)
    (reference,) = reference_trace(config, union, dtype=torch.float64, timeout_seconds=120.0).gradients
    for packing, gradients in zip(packings, found, strict=True):
        assert worst(gradients, reference) <= TOLERANCE, packing
        assert worst(gradients, found[0]) <= TOLERANCE, packing


@pytest.mark.parametrize(
    ("P", "D", "settings"),
    [
        (2, 1, ["graphs_per_step=10", "cost=atoms"]),
        (1, 2, ["atoms_per_step=150", "max_atoms=60"]),
        (2, 1, ["graphs_per_step=10", "method=sequential"]),
    ],
)
def test_a_run_packed_by_gars_equals_single_process(fake_job: list[str], P: int, D: int, settings: list[str]) -> None:
    gars = [f"+runner.janus.gars.{setting}" for setting in settings]
    config = make_variant("mole-efs", fake_job, *adopt(P=P, D=D, N=3), *gars)
    check(config, world_size=P * D, steps=1)


def test_a_step_with_fewer_graphs_than_replicas_equals_single_process(fake_job: list[str]) -> None:
    """The second step has one graph: one of the two replicas runs an empty schedule, on both of its stages."""
    gars = ["+runner.janus.gars.graphs_per_step=7", "+runner.janus.debug_checksums=true"]
    config = make_variant("mole-efs", fake_job, *adopt(P=2, D=2, N=2), *FEW, *gars)
    trace = check(config, world_size=4, steps=2)
    assert sorted(len(replica) for replica in trace.batches[1]) == [0, 1]


def check(config: DictConfig, *, world_size: int, steps: int) -> Trace:
    ours = pipeline_trace(config, steps=steps, dtype=torch.float64, world_size=world_size, timeout_seconds=120.0)
    reference = reference_trace(config, ours, dtype=torch.float64, timeout_seconds=120.0)
    result = compare(ours, reference)
    assert result.passes(TOLERANCE), result
    return ours
