"""NaN and Inf, wherever they come from, are named or left out: never turned into zeros.

One graph of the training data is bad, so most steps are good.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from fairchem.core.launchers.slurm_launch import _set_seeds
from hydra.utils import instantiate
from omegaconf import DictConfig, open_dict

from fairchem_janus.parallel.launch import RankError, run_on_ranks
from fairchem_janus.report import run_folder
from fairchem_janus.verify.janus_side import steps_of
from fairchem_janus.verify.trace import Named, snapshot_parameters
from tests.integration.frames import crystal, molecule
from tests.integration.options import Change, janus, model, together
from tests.integration.train import fit_all, metrics
from tests.integration.variants import adopt, stock_config
from tests.jobs.prepare import prepare

SID, GRAPH = "omat-train-3", "omat.train[3]"
ELEMENT = 50
"""An atomic number that only the bad graph has."""
NUM_ATOMS = 7
"""Atoms of the bad graph; the others have four."""
VALIDATION_GRAPH, VALIDATION_ELEMENT = "omat.val[2]", 60


def poison(**labels: float) -> Change:
    """Overwrite labels of the bad graph as it is loaded."""

    def change(config: DictConfig) -> None:
        collate = config.runner.train_dataloader.collate_fn
        collate.update(_target_="tests.integration.models.poisoned_collater", poison={SID: labels})

    return change


def infinite_embedding(element: int) -> Change:
    return model(rows={"backbone.sphere_embedding.weight": {element: math.inf}})


def steep_loss(config: DictConfig) -> None:
    (task,) = (task for task in config.runner.train_eval_unit.tasks if task.name == "omat_energy")
    task.loss_fn.loss_fn = {"_target_": "tests.integration.models.SteepLoss", "num_atoms": NUM_ATOMS}


BAD: Mapping[str, tuple[Change, str]] = {
    "nan_energy": (poison(omat_energy=math.nan), "label omat_energy"),
    "infinite_force": (poison(omat_forces=math.inf), "label omat_forces"),
    "nan_stress": (poison(omat_stress=math.nan), "label omat_stress"),
    "forward": (infinite_embedding(ELEMENT), "forward"),
    "loss": (poison(omat_forces=1e30), "loss"),  # its square is infinite in float32
    "gradients": (steep_loss, "gradients"),
}
"""Name -> (what is wrong with the job, the phase in which it shows)."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    omat = [crystal(4, seed=n) for n in range(15)]  # the last three are for validation
    omat[3] = crystal(NUM_ATOMS, seed=3, first=ELEMENT)
    omat[14] = crystal(4, seed=14, first=VALIDATION_ELEMENT)
    folder = tmp_path_factory.mktemp("bad")
    return tuple(prepare(omat=omat, omol=[molecule(4, seed=n) for n in range(15)], folder=folder))


def make_job(data: tuple[str, ...], change: Change, *, on_nan: str, name: str, P: int, D: int = 1) -> DictConfig:
    """The stock job with three micro-batches of up to three graphs a step."""
    config = _base(data).copy()
    with open_dict(config):
        together(janus(on_nan=on_nan, pipeline_size=P), change)(config)
        config.runner.callbacks = []
        for job in (config.job, config.runner.train_eval_unit.job_config):
            job.timestamp_id = f"{name}-{on_nan}-P{P}-D{D}"
    return config


@cache
def _base(data: tuple[str, ...]) -> DictConfig:
    return stock_config(data, *adopt(P=2, N=3), "cutoff_radius=4", "max_atoms=12")


# ---------------------------------------------------------------- driving a job step by step
@dataclass
class Driven:
    """One rank's view of an epoch.

    Attributes:
        bad_steps: steps in which some replica has the bad graph.
        changed: for every step, what of the training state is another than before.
        gradients_left: steps after which a parameter still has a gradient.
        parameters: at the end.
        error: of the first step that raised.
    """

    bad_steps: list[int] = field(default_factory=list)
    names: list[list[str]] = field(default_factory=list)
    changed: list[set[str]] = field(default_factory=list)
    gradients_left: list[int] = field(default_factory=list)
    parameters: Named = field(default_factory=dict)
    error: str | None = None


def _drive_all(configs: list[tuple[DictConfig, bool]]) -> list[Driven]:
    return [_drive(config, only_good=only_good) for config, only_good in configs]


def _drive(config: DictConfig, *, only_good: bool) -> Driven:
    """Train over an epoch; `only_good` never shows the unit a step with the bad graph."""
    _set_seeds(config.job.seed)
    runner = instantiate(config.runner)
    unit = runner.train_eval_unit
    unit.load_scheduler(len(runner.train_dataloader))
    unit.model.train()
    result = Driven()
    items = list(steps_of(runner.train_dataloader, len(runner.train_dataloader)))
    result.names = [[name for batch in item for name in batch["graph_ids"]] for item in items]
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, result.names)
    result.bad_steps = [step for step in range(len(items)) if any(GRAPH in names[step] for names in everyone)]
    try:
        for step, item in enumerate(items):
            if only_good and step in result.bad_steps:
                continue
            unit.train_progress._num_steps_completed = step
            before = _state_of(unit)
            unit.train_step(None, item)
            after = _state_of(unit)
            result.changed.append({part for part in before if not _same(before[part], after[part])})
            if any(parameter.grad is not None and parameter.grad.any() for parameter in unit.model.parameters()):
                result.gradients_left.append(step)
    except (ArithmeticError, RuntimeError) as error:
        result.error = f"{type(error).__name__}: {error}"
    finally:
        runner.close()
    result.parameters = snapshot_parameters(unit.model)
    return result


def _state_of(unit: Any) -> dict[str, Any]:
    return deepcopy(
        {
            "parameters": snapshot_parameters(unit.model),
            "moving average": unit.ema_model.state_dict(),
            "optimizer": unit.optimizer.state_dict(),
            "scheduler": unit.scheduler.state_dict(),
        }
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return torch.allclose(a, b, rtol=0, atol=0, equal_nan=True)
    if isinstance(a, Mapping):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b)


EVERYTHING = {"parameters", "moving average", "optimizer", "scheduler"}

JOBS = [(1, name) for name in BAD] + [(2, name) for name in ("nan_energy", "forward", "gradients")]
"""(D, what is bad), over two stages."""
RUN_AGAIN = [(1, "infinite_force"), (1, "forward"), (2, "gradients")]
"""Jobs that are also run without the bad steps."""

DrivenJobs = dict[tuple[int, str, bool], list[Driven]]


@pytest.fixture(scope="module")
def driven(data: tuple[str, ...]) -> DrivenJobs:
    """(D, what is bad, whether the bad steps were never shown) -> each rank's training with `on_nan: skip`."""
    found = {}
    for D in (1, 2):
        keys = [(D, name, False) for d, name in JOBS if d == D] + [(D, name, True) for d, name in RUN_AGAIN if d == D]
        work = [
            (make_job(data, BAD[name][0], on_nan="skip", name=name, P=2, D=D), only_good) for _, name, only_good in keys
        ]
        ranks = run_on_ranks(_drive_all, work, world_size=2 * D, timeout_seconds=300)
        found |= {key: [rank[index] for rank in ranks] for index, key in enumerate(keys)}
    return found


@pytest.mark.parametrize(("D", "name"), JOBS)
def test_a_bad_step_leaves_every_rank_as_it_was_and_training_goes_on(driven: DrivenJobs, D: int, name: str) -> None:
    ranks = driven[D, name, False]
    assert len(ranks) == 2 * D
    for rank in ranks:
        assert rank.bad_steps
        assert len(rank.bad_steps) < len(rank.names)
        assert rank.changed == [set() if step in rank.bad_steps else EVERYTHING for step in range(len(rank.names))]
        assert not rank.gradients_left
        assert rank.error is None


@pytest.mark.parametrize(("D", "name"), RUN_AGAIN)
def test_training_ends_as_if_the_bad_step_had_not_been_there(driven: DrivenJobs, D: int, name: str) -> None:
    for skipping, good_alone in zip(driven[D, name, False], driven[D, name, True], strict=True):
        assert _same(skipping.parameters, good_alone.parameters)


@pytest.mark.parametrize(("D", "name"), JOBS)
def test_bad_samples_csv_names_the_step_the_phase_and_the_graph(
    driven: DrivenJobs, data: tuple[str, ...], D: int, name: str
) -> None:
    change, phase = BAD[name]
    config = make_job(data, change, on_nan="skip", name=name, P=2, D=D)
    with open(Path(run_folder(config.job)) / "bad_samples.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    first, *_ = replicas = driven[D, name, False][::2]
    expected = [(step, phase, GRAPH) for step in first.bad_steps]
    if phase == "gradients":  # a sum over all graphs of the step
        expected = [(step, phase, graph) for step in first.bad_steps for r in replicas for graph in r.names[step]]
    assert [(int(line["step"]), line["phase"], line["graph"]) for line in lines] == expected
    left_out = [record["step"] for record in metrics(config) if "left_out" in record]
    assert left_out == first.bad_steps


# ---------------------------------------------------------------- on_nan: error
@pytest.fixture(scope="module")
def errors(data: tuple[str, ...]) -> dict[str, Driven]:
    configs = [make_job(data, change, on_nan="error", name=name, P=1) for name, (change, _) in BAD.items()]
    (rank,) = run_on_ranks(_drive_all, [(config, False) for config in configs], world_size=1, timeout_seconds=300)
    return dict(zip(BAD, rank, strict=True))


@pytest.mark.parametrize("name", BAD)
def test_the_error_names_phase_data_set_and_graph(errors: dict[str, Driven], name: str) -> None:
    outcome, phase = errors[name], BAD[name][1]
    assert len(outcome.changed) == outcome.bad_steps[0]
    assert outcome.error is not None
    assert f"NaN or Inf in {phase} of " in outcome.error
    assert GRAPH in outcome.error
    if phase != "gradients":
        assert "omol" not in outcome.error
    assert "Remove or mend these graphs" in outcome.error
    assert "+runner.janus.on_nan=skip" in outcome.error


def test_a_rank_of_a_pipeline_says_where_it_met_the_bad_graph(data: tuple[str, ...]) -> None:
    config = make_job(data, BAD["forward"][0], on_nan="error", name="pipeline", P=2)
    with pytest.raises(RankError) as caught:
        run_on_ranks(_drive_all_raising, [config], world_size=2, timeout_seconds=120)
    text = str(caught.value)
    assert f"(graphs {GRAPH}): NonFiniteError: NaN or Inf in forward of {GRAPH}." in text
    assert "rank 0 (d=0 p=0 g=0), stage 0, FF of micro-batch " in text


def _drive_all_raising(configs: list[DictConfig]) -> None:
    for config in configs:
        if error := _drive(config, only_good=False).error:
            raise RuntimeError(error)


# ---------------------------------------------------------------- evaluation
def test_an_evaluation_leaves_bad_graphs_out_and_says_so(data: tuple[str, ...]) -> None:
    config = make_job(data, infinite_embedding(VALIDATION_ELEMENT), on_nan="skip", name="evaluation", P=2)
    config.runner.max_steps = config.runner.evaluate_every_n_steps = 1
    for rank in fit_all({"bad": config}, world_size=2)["bad"]:
        assert rank.metrics
        assert all(math.isfinite(value) for metrics in rank.metrics for value in metrics.values())
    with open(Path(run_folder(config.job)) / "bad_samples.csv", newline="") as file:
        lines = {(int(line["step"]), line["phase"], line["graph"]) for line in csv.DictReader(file)}
    assert lines == {(1, "evaluation forward", VALIDATION_GRAPH)}


def test_an_evaluation_of_bad_graphs_is_an_error_that_names_them(data: tuple[str, ...]) -> None:
    config = make_job(data, infinite_embedding(VALIDATION_ELEMENT), on_nan="error", name="evaluation", P=2)
    config.runner.max_steps = config.runner.evaluate_every_n_steps = 1
    with pytest.raises(RankError, match=r"NaN or Inf in forward of omat\.val\[2\]"):
        fit_all({"bad": config}, world_size=2)
