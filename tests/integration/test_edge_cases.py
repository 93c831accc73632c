"""Batches at the edge of what a pipeline meets: gradients and metrics stay plain fairchem's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
from ase import Atoms
from omegaconf import DictConfig

from fairchem_janus.verify.compare import compare
from fairchem_janus.verify.trace import Trace
from tests.integration.frames import apart, crystal, molecule
from tests.integration.many import Job, traces_of
from tests.integration.variants import adopt, stock_config
from tests.jobs.prepare import prepare

TOLERANCE = 1e-10
"""Relative, in float64; summation order alone leaves about 1e-14."""


def make_job(
    folder: Path, omat: list[Atoms], omol: list[Atoms], *overrides: str, P: int, N: int, D: int = 1
) -> DictConfig:
    """The stock job on these frames, with every frame used equally often; the last fifth of each list is validation."""
    data = prepare(omat=omat, omol=omol, folder=folder)
    equally = "train_dataset.combined_dataset_config.sampling.ratios={omat.train: 1.0, omol.train: 1.0}"
    return stock_config(data, *adopt(P=P, N=N, D=D), "cutoff_radius=4", equally, *overrides)


@dataclass(frozen=True)
class EdgeCase:
    """A job, and what its batches (replica x micro-batch x graph, a list a step) must be for it to test anything.

    Attributes:
        omat, omol: frames; the last of each is for validation.
        batches: micro-batches of each step and replica.
    """

    omat: list[Atoms]
    omol: list[Atoms]
    max_atoms: int
    P: int
    N: int
    batches: list[list[int]]
    D: int = 1
    overrides: tuple[str, ...] = ()

    def job(self, folder: Path) -> Job:
        overrides = f"max_atoms={self.max_atoms}", *self.overrides
        config = make_job(folder, self.omat, self.omol, *overrides, P=self.P, N=self.N, D=self.D)
        return Job(config, steps=len(self.batches))


# no two of these fit into six atoms
MIXED = [crystal(n, seed=n) for n in (4, 6, 4, 5, 4)], [molecule(n, seed=n) for n in (5, 4, 6, 4, 4)]
SINGLE_ATOMS = (
    [crystal(1, seed=0), crystal(4, seed=1), apart(1, seed=2, periodic=True), crystal(1, seed=3), crystal(3, seed=4)],
    [apart(1, seed=5, periodic=False), molecule(4, seed=6), apart(1, seed=7, periodic=False), molecule(3, seed=8)],
)
NO_EDGES = (
    [apart(4, seed=0, periodic=True), crystal(4, seed=1), apart(4, seed=2, periodic=True), crystal(4, seed=3)],
    [apart(4, seed=5, periodic=False), molecule(4, seed=6), molecule(4, seed=7), molecule(4, seed=8)],
)
EAGER = ("+runner.janus.split=eager",)

EDGE_CASES = {
    "graphs_of_one_atom": EdgeCase(*SINGLE_ATOMS, max_atoms=5, P=2, N=3, batches=[[3], [3]]),
    "micro_batches_without_edges": EdgeCase(*NO_EDGES, max_atoms=4, P=3, N=6, batches=[[6]]),
    "micro_batches_without_edges_eager": EdgeCase(*NO_EDGES, max_atoms=4, P=3, N=6, batches=[[6]], overrides=EAGER),
    # each has one data set alone, and so no labels for the other's tasks
    "micro_batches_of_one_graph": EdgeCase(*MIXED, max_atoms=6, P=2, N=4, batches=[[4], [4]]),
    "fewer_micro_batches_than_stages": EdgeCase(*MIXED, max_atoms=12, P=4, N=2, batches=[[2], [2]]),
    "last_global_batch_not_full": EdgeCase(*MIXED, max_atoms=6, P=2, N=3, D=2, batches=[[3, 3], [1, 1]]),
    "steps_without_a_label_for_some_tasks": EdgeCase(*MIXED, max_atoms=6, P=2, N=1, batches=[[1]] * 4),
    "unequal_blocks": EdgeCase(*MIXED, max_atoms=12, P=3, N=2, batches=[[2]], overrides=("backbone.num_layers=5",)),
}


@pytest.fixture(scope="module")
def traces(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Trace, Trace]]:
    """The pipeline's trace and plain fairchem's for every edge case."""
    root = tmp_path_factory.mktemp("edge_cases")
    found: dict[str, tuple[Trace, Trace]] = {}
    for size in (2, 3, 4):
        jobs = {name: case.job(root / name) for name, case in EDGE_CASES.items() if size == case.P * case.D}
        found |= traces_of(jobs, world_size=size)
    return found


@pytest.mark.parametrize("name", EDGE_CASES)
def test_gradients_equal_plain_fairchem(traces: dict[str, tuple[Trace, Trace]], name: str) -> None:
    ours, reference = traces[name]
    assert [[len(replica) for replica in step] for step in ours.batches] == EDGE_CASES[name].batches
    errors = compare(ours, reference)
    assert errors.grad <= TOLERANCE, errors.worst_tensor
    assert errors.loss <= TOLERANCE
    assert errors.grad_norm <= TOLERANCE


# ---------------------------------------------------------------- evaluation
MASKED = [crystal(4, seed=n, fixed=range(4) if n in (20, 21) else ()) for n in (0, 1, 2, 20, 21, 22)]
"""Frames whose forces are all masked: with their atoms fixed, `eval_on_free_atoms` leaves none."""


def in_float64(config: DictConfig, *, every: int, steps: int, lr: float) -> DictConfig:
    """The job in double precision: `steps` steps, an evaluation after every `every` steps, no checkpoints."""
    runner = config.runner
    with open_dict(config):
        runner.train_eval_unit.model.update(_target_="tests.integration.models.TunedModel", dtype="float64")
        for loader in (runner.train_dataloader, runner.eval_dataloader):
            loader.collate_fn._target_ = "tests.integration.models.double_collater"
        runner.update(callbacks=[], max_steps=steps, evaluate_every_n_steps=every)
        runner.train_eval_unit.optimizer_fn.lr = lr
        runner.train_eval_unit.ema_decay = 0.9
    return config


def plain(config: DictConfig) -> DictConfig:
    """The same job for fairchem's own runner: a step is one batch of its sampler."""
    plain = config.copy()
    with open_dict(plain):
        plain.runner._target_ = "fairchem.core.components.train.train_runner.TrainEvalRunner"
        del plain.runner.janus, plain.runner._recursive_
    return plain


