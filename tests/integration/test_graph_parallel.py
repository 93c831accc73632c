"""Graph parallelism inside the pipeline: every gradient equals plain fairchem's in one process, on the same graphs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import pytest
import torch
from fairchem.core.common.gp_utils import GPMode, GPPartition
from omegaconf import DictConfig, open_dict

from fairchem_janus.verify.compare import compare
from fairchem_janus.verify.trace import Trace
from tests.integration.frames import apart, crystal, molecule
from tests.integration.many import Job, traces_of
from tests.integration.options import (
    Change,
    backbone,
    datasets_of,
    energy_only,
    graph_arguments,
    together,
    unit,
)
from tests.integration.options import model as unit_model
from tests.integration.test_edge_cases import assert_metrics_equal, in_float64, make_job, plain
from tests.integration.train import fit_all
from tests.integration.variants import VARIANTS, adopt, make_variant

TOLERANCE = 1e-10
"""Relative, in float64; summation order alone leaves about 1e-14."""

SHAPES = [(1, 2, 1), (1, 3, 1), (2, 2, 1), (1, 2, 2), (2, 3, 1), (1, 3, 2), (2, 2, 2)]
"""P, G, D: up to eight ranks."""

MODES = ["ALLGATHER-INDEX_SPLIT", "ALL_TO_ALL-SPATIAL", "ALL_TO_ALL-INDEX_SPLIT"]

TAGS = {
    "stock": [],
    "dist": ["rank_budget=1"],
    "comm-free": ["rank_budget=100000"],
    "mixed": [],
}
"""How micro-batches are made, as settings of `janus.gars`; `stock` leaves them to fairchem's sampler."""

SHARES = {"stock": {0.0}, "dist": {0.0}, "comm-free": {1.0}}


@dataclass(frozen=True)
class Case:
    """A job at some shape of the grid."""

    mode: str
    tags: str
    variant: str
    extra: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join([self.mode, self.tags, self.variant, *self.extra])

    def job(self, data: list[str], P: int, G: int, D: int) -> Job:
        return Job(graph_parallel_job(self, data, P=P, G=G, D=D))


def graph_parallel_job(case: Case, data: list[str], *, P: int, G: int, D: int = 1, N: int = 3) -> DictConfig:
    mode, partition = case.mode.split("-")
    return make_variant(
        case.variant,
        data,
        *adopt(P=P, D=D * G, N=N),
        f"++job.graph_parallel.group_size={G}",
        f"++job.graph_parallel.mode={mode}",
        f"++job.graph_parallel.partition={partition}",
        *([] if case.tags == "stock" else [f"+runner.janus.gars.graphs_per_step={8 * G * D}"]),
        *(f"+runner.janus.gars.{setting}" for setting in TAGS[case.tags]),
        *case.extra,
    )


def cases_of_shapes() -> Iterator[tuple[tuple[int, int, int], list[Case]]]:
    """Every shape with every mode and all kinds of steps, the model and the rest of the options taking turns."""
    variants = cycle(VARIANTS)
    extras = cycle([(), ("+runner.janus.split=eager",), ("+runner.janus.schedule=gpipe_2nd",)])
    for number, shape in enumerate(SHAPES):
        tags = list(TAGS)
        tags = tags[number % 4 :] + tags[: number % 4]
        modes = [MODES[(number + place) % 3] for place in range(4)]
        yield shape, [Case(m, t, next(variants), next(extras)) for m, t in zip(modes, tags, strict=True)]


def assert_exact(ours: Trace, reference: Trace, what: object) -> None:
    result = compare(ours, reference)
    assert result.passes(TOLERANCE), f"{what}: {result}"


LARGE = 4
"""More ranks than this are left to the long suite."""

BY_SHAPE = [
    pytest.param(shape, cases, id="P{}G{}D{}".format(*shape), marks=[pytest.mark.long] * (math.prod(shape) > LARGE))
    for shape, cases in cases_of_shapes()
]


@pytest.mark.parametrize(("shape", "cases"), BY_SHAPE)
def test_gradients_equal_single_process(fake_job: list[str], shape: tuple[int, int, int], cases: list[Case]) -> None:
    P, G, D = shape
    traces = traces_of({str(c): c.job(fake_job, P, G, D) for c in cases}, world_size=P * G * D)
    for case in cases:
        ours, reference = traces[str(case)]
        assert_exact(ours, reference, case)
        (halo,) = ours.halos
        assert halo is not None
        share = halo.comm_free_share
        if case.tags in SHARES:
            assert share in SHARES[case.tags], f"{case}: {share}"
        assert (halo.num_bytes == 0) == (share == 1.0), case
        assert halo.seconds > 0 or share == 1.0


def test_mixed_steps_hold_both_kinds(real_job: list[str]) -> None:
    """Several steps and micro-batches in flight, under the schedules that a pipeline has, the paper's baselines too."""
    schedules = ["wavek", "auto", "1f1b_2nd", "hanayo_2nd"]
    settings = [(f"+runner.janus.schedule={s}", "+runner.janus.debug_checksums=true") for s in schedules]
    cases = {
        s: Case(MODES[i % 3], "mixed", "mole-dropout-efs", extra)
        for i, (s, extra) in enumerate(zip(schedules, settings, strict=True))
    }
    jobs = {s: Job(graph_parallel_job(c, real_job, P=2, G=2, N=5), steps=3) for s, c in cases.items()}
    shares = []
    for name, (ours, reference) in traces_of(jobs, world_size=4).items():
        assert_exact(ours, reference, name)
        shares += [halo.comm_free_share for halo in ours.halos if halo]
    assert any(0 < share < 1 for share in shares), shares


def energies_only(config: DictConfig) -> None:
    energy_only(config)
    for dataset in datasets_of(config):  # or a batch of both data sets has forces of one
        dataset.a2g_args.r_forces = False
        dataset.key_mapping.pop("forces")


OPTIONS = {
    "balanced channels": backbone(charge_balanced_channels=[0, 1], spin_balanced_channels=[4]),
    "chunks": together(backbone(activation_checkpointing=True), unit_model(chunk_size=200)),
    "s2 and grid": backbone(act_type="s2", ff_type="grid"),
    "edges from the loader": together(
        backbone(otf_graph=False), graph_arguments(r_edges=True, external_graph_method="nvidia")
    ),
    "active clipping, energies only": together(unit(clip_grad_norm=0.05), energies_only),
    "frozen backbone": unit_model(freeze_backbone=True),
}
"""Options whose code crosses graph-parallel ranks, or must not."""


def test_options_that_cross_ranks(fake_job: list[str]) -> None:
    jobs = {}
    for number, (name, change) in enumerate(OPTIONS.items()):
        config = graph_parallel_job(Case(MODES[number % 3], "mixed", "mole-efs"), fake_job, P=2, G=2)
        with open_dict(config):
            change(config)
        jobs[name] = Job(config, steps=2)
    for name, (ours, reference) in traces_of(jobs, world_size=4).items():
        assert_exact(ours, reference, name)


def split_over(G: int, mode: str) -> Change:
    """Graph parallelism for a job of `make_job`."""
    m, partition = mode.split("-")

    def change(config: DictConfig) -> None:
        for job in (config.job, config.runner.train_eval_unit.job_config):
            job.graph_parallel.update(group_size=G, mode=GPMode[m], partition=GPPartition[partition])

    return change


SMALL = (
    [crystal(1, seed=0), crystal(2, seed=1), apart(1, seed=2, periodic=True), crystal(1, seed=3), crystal(3, seed=4)],
    [apart(1, seed=5, periodic=False), molecule(2, seed=6), apart(1, seed=7, periodic=False), molecule(3, seed=8)],
)
"""Graphs of one atom, and smaller than three ranks."""

ONE_ATOM = (
    [crystal(1, seed=n) for n in range(3)],
    [apart(1, seed=n, periodic=False) for n in range(3)],
)

NO_EDGES = (
    [apart(4, seed=0, periodic=True), crystal(4, seed=1), apart(3, seed=2, periodic=True), crystal(4, seed=3)],
    [apart(4, seed=5, periodic=False), molecule(4, seed=6), molecule(4, seed=7), molecule(4, seed=8)],
)
"""Among them micro-batches without any edge, and, split by index, ranks without one."""


@pytest.mark.parametrize("G", [pytest.param(2, marks=pytest.mark.long), 3])
def test_ranks_with_next_to_nothing(tmp_path: Path, G: int) -> None:
    """No atom of a graph, no edge, a micro-batch with fewer atoms than ranks (its graphs stay whole), in every mode."""
    jobs = {}
    for mode in MODES:
        for name, frames, max_atoms in (("small", SMALL, 3), ("one atom", ONE_ATOM, 1), ("no edges", NO_EDGES, 8)):
            folder = tmp_path / f"{mode}-{name}"
            jobs[f"{name}, {mode}"] = Job(
                make_job(folder, *frames, split_over(G, mode), max_atoms=max_atoms, P=1, N=3), steps=2
            )
    shares = set()
    for name, (ours, reference) in traces_of(jobs, world_size=G).items():
        assert_exact(ours, reference, name)
        shares |= {halo.comm_free_share for halo in ours.halos if halo}
    assert {0.0, 1.0} <= shares


def test_a_run_with_evaluations_equals_plain_fairchem(tmp_path: Path) -> None:
    """Weights, moving average and validation metrics after each of three steps; fairchem's own groups are put back."""
    frames = [crystal(4, seed=n) for n in range(15)], [molecule(4, seed=n) for n in range(15)]
    job = in_float64(make_job(tmp_path, *frames, max_atoms=9, P=2, N=1), steps=3, lr=8e-3)
    parallel = job.copy()
    with open_dict(parallel):
        split_over(2, "ALL_TO_ALL-SPATIAL")(parallel)
    (reference,) = fit_all({"job": plain(job)}, world_size=1)["job"]
    for rank in fit_all({"job": parallel}, world_size=4)["job"]:
        assert_metrics_equal(rank.metrics, reference.metrics)
        for own, theirs in ((rank.parameters, reference.parameters), (rank.ema, reference.ema)):
            assert own
            for name, value in own.items():
                torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-10, msg=name)
