"""Batches at the edge of what a pipeline meets: gradients and metrics stay plain fairchem's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest
import torch
from ase import Atoms
from omegaconf import DictConfig, open_dict

from fairchem_janus.parallel.launch import RankError
from fairchem_janus.verify.compare import compare
from fairchem_janus.verify.trace import Trace
from tests.integration.frames import apart, crystal, molecule
from tests.integration.many import Job, traces_of
from tests.integration.options import Change, backbone, janus, nothing, together
from tests.integration.train import Fit, fit_all
from tests.integration.variants import adopt, stock_config
from tests.jobs.prepare import prepare

TOLERANCE = 1e-10
"""Relative, in float64; summation order alone leaves about 1e-14."""


def make_job(
    folder: Path, omat: list[Atoms], omol: list[Atoms], *changes: Change, max_atoms: int, P: int, N: int
) -> DictConfig:
    """The stock job on these frames, with every frame used equally often; the last fifth of each list is validation."""
    prepare(omat=omat, omol=omol, folder=folder)
    config = _base().copy()
    runner = config.runner
    with open_dict(config):
        for job in (config.job, runner.train_eval_unit.job_config):
            job.run_dir = str(folder / "runs")
        for loader in (runner.train_dataloader, runner.eval_dataloader):
            loader.batch_sampler_fn.max_atoms = max_atoms
            for name, dataset in loader.dataset.dataset_configs.items():
                for split, source in dataset.splits.items():
                    source.src = [str(folder / name / split)]
        together(janus(pipeline_size=P, num_micro_batches=N), *changes)(config)
    return config


@cache
def _base() -> DictConfig:
    """Composed once, which takes a second."""
    anywhere = "data_root=anywhere", "job.run_dir=anywhere"
    equally = "train_dataset.combined_dataset_config.sampling.ratios={omat.train: 1.0, omol.train: 1.0}"
    return stock_config(anywhere, *adopt(P=2, N=1), "cutoff_radius=4", equally)


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
    change: Change = nothing

    def job(self, folder: Path) -> Job:
        config = make_job(folder, self.omat, self.omol, self.change, max_atoms=self.max_atoms, P=self.P, N=self.N)
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
EDGE_CASES = {
    "graphs_of_one_atom": EdgeCase(*SINGLE_ATOMS, max_atoms=5, P=2, N=3, batches=[[3], [3]]),
    "micro_batches_without_edges": EdgeCase(*NO_EDGES, max_atoms=4, P=3, N=6, batches=[[6]]),
    "micro_batches_without_edges_eager": EdgeCase(
        *NO_EDGES, max_atoms=4, P=3, N=6, batches=[[6]], change=janus(split="eager")
    ),
    # each has one data set alone, and so no labels for the other's tasks
    "micro_batches_of_one_graph": EdgeCase(*MIXED, max_atoms=6, P=2, N=4, batches=[[4], [4]]),
    "fewer_micro_batches_than_stages": EdgeCase(*MIXED, max_atoms=12, P=4, N=2, batches=[[2], [2]]),
    "last_global_batch_not_full": EdgeCase(*MIXED, max_atoms=6, P=2, N=3, D=2, batches=[[3, 3], [1, 1]]),
    "steps_without_a_label_for_some_tasks": EdgeCase(*MIXED, max_atoms=6, P=2, N=1, batches=[[1]] * 4),
    "unequal_blocks": EdgeCase(*MIXED, max_atoms=12, P=3, N=2, batches=[[2]], change=backbone(num_layers=5)),
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
def frames(make: Callable[..., Atoms], *, fixed: Sequence[int] = ()) -> list[Atoms]:
    """Fifteen structures of four atoms, the last three for validation; all atoms of some are held."""
    return [make(4, seed=n, fixed=range(4) if n in fixed else ()) for n in range(15)]


def in_float64(config: DictConfig, *, steps: int, lr: float) -> DictConfig:
    """The job in double precision, evaluated after every step, without checkpoints."""
    runner = config.runner
    with open_dict(config):
        runner.train_eval_unit.model.update(_target_="tests.integration.models.TunedModel", dtype="float64")
        for loader in (runner.train_dataloader, runner.eval_dataloader):
            loader.collate_fn._target_ = "tests.integration.models.double_collater"
        runner.update(callbacks=[], max_steps=steps, evaluate_every_n_steps=1)
        runner.train_eval_unit.optimizer_fn.lr = lr
        runner.train_eval_unit.ema_decay = 0.9
    return config


def plain(config: DictConfig, unit: str | None = None) -> DictConfig:
    """The same job under fairchem's own runner, where a step is one batch of the sampler."""
    config = config.copy()
    with open_dict(config):
        config.runner._target_ = "fairchem.core.components.train.train_runner.TrainEvalRunner"
        del config.runner.janus, config.runner._recursive_
        if unit is not None:
            config.runner.train_eval_unit._target_ = unit
    return config


Fits = dict[str, list[Fit]]


@pytest.fixture(scope="module")
def fits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Fits]:
    """`ours` and fairchem's (`plain`) fits of the same jobs, by name."""
    root = tmp_path_factory.mktemp("evaluation")
    whole = frames(crystal), frames(molecule)
    masked = frames(crystal, fixed=(12, 14)), frames(molecule)
    small = [crystal(4, seed=n) for n in range(5)], [molecule(4, seed=n) for n in range(5)]
    # steps of several micro-batches move other weights than fairchem's do: those jobs do not move theirs (lr=0)
    trained = in_float64(make_job(root / "a", *whole, max_atoms=9, P=2, N=1), steps=3, lr=8e-3)
    replicas = in_float64(make_job(root / "b", *whole, max_atoms=9, P=2, N=1), steps=2, lr=8e-3)
    waves = in_float64(make_job(root / "c", *whole, max_atoms=4, P=4, N=4), steps=1, lr=0.0)
    few = in_float64(make_job(root / "d", *small, max_atoms=12, P=4, N=2), steps=1, lr=0.0)
    hidden = in_float64(make_job(root / "e", *masked, max_atoms=4, P=2, N=2), steps=1, lr=0.0)
    ours = fit_all({"trained": trained, "hidden": hidden}, world_size=2)
    ours |= fit_all({"replicas": replicas, "waves": waves, "few": few}, world_size=4)
    single = {"trained": trained, "waves": waves, "few": few, "hidden": hidden}
    jobs = {name: plain(job) for name, job in single.items()}
    jobs["hidden_mended"] = plain(hidden, "tests.integration.models.mended_unit")
    theirs = fit_all(jobs, world_size=1) | fit_all({"replicas": plain(replicas)}, world_size=2)
    return {"ours": ours, "plain": theirs}


def assert_metrics_equal(
    ours: list[dict[str, float]], reference: list[dict[str, float]], *, rel: float = TOLERANCE, loss: bool = True
) -> None:
    """The same metrics after every evaluation, with or without `val/loss`."""
    for own, theirs in zip(ours, reference, strict=True):
        assert own.keys() == theirs.keys()
        for name in own.keys() - (set() if loss else {"val/loss"}):
            in_float32 = name.endswith("cosine_similarity")  # fairchem casts for it
            assert own[name] == pytest.approx(theirs[name], rel=1e-6 if in_float32 else rel), name


def test_every_evaluation_of_a_training_run_equals_plain_fairchems(fits: dict[str, Fits]) -> None:
    """Of the moving average of weights that both trained themselves; the last act of the last step is one, too."""
    (reference,) = fits["plain"]["trained"]
    for rank in fits["ours"]["trained"]:
        assert_metrics_equal(rank.metrics, reference.metrics)
    assert len({metrics["val/loss"] for metrics in reference.metrics}) == 3


def test_weights_and_their_average_equal_plain_fairchems_after_a_run_with_evaluations(fits: dict[str, Fits]) -> None:
    (reference,) = fits["plain"]["trained"]
    for rank in fits["ours"]["trained"]:
        for own, theirs in ((rank.parameters, reference.parameters), (rank.ema, reference.ema)):
            assert own
            for name, value in own.items():
                torch.testing.assert_close(value, theirs[name], rtol=1e-9, atol=1e-10, msg=name)


def test_replicas_evaluate_what_fairchems_ranks_do(fits: dict[str, Fits]) -> None:
    """Within float32, in which fairchem sums over ranks. Its loss is that of one rank's batches alone, ours of all."""
    reference = fits["plain"]["replicas"][0]
    for rank in fits["ours"]["replicas"]:
        assert_metrics_equal(rank.metrics, reference.metrics, rel=1e-6, loss=False)


@pytest.mark.parametrize("job", ["waves", "few"])
def test_metrics_do_not_depend_on_how_many_micro_batches_are_evaluated_together(
    fits: dict[str, Fits], job: str
) -> None:
    """`few` has one evaluation batch for four ranks. Losses are normalised over all that are evaluated together."""
    (reference,) = fits["plain"][job]
    for rank in fits["ours"][job]:
        assert_metrics_equal(rank.metrics, reference.metrics, loss=False)


def test_a_first_validation_batch_without_labels_counts_for_nothing(fits: dict[str, Fits]) -> None:
    """fairchem's `Metrics` divide by zero on it."""
    (failed,), (mended,) = fits["plain"]["hidden"], fits["plain"]["hidden_mended"]
    assert failed.error is not None and failed.error.startswith("ZeroDivisionError")
    for rank in fits["ours"]["hidden"]:
        assert_metrics_equal(rank.metrics, mended.metrics, loss=False)


def test_fewer_evaluation_batches_than_replicas_are_refused(tmp_path: Path) -> None:
    """fairchem's sampler says `there are less batches than ranks!`, with all P x D ranks for replicas."""
    frames = [crystal(4, seed=n) for n in range(5)], [molecule(4, seed=n) for n in range(5)]
    job = make_job(tmp_path, *frames, max_atoms=12, P=1, N=1)
    with pytest.raises(RankError) as caught:
        fit_all({"few": job}, world_size=2)
    assert "could not make batches for 2 replica(s): there are less batches than ranks!" in str(caught.value)
    assert "at least as many batches as replicas" in str(caught.value)
