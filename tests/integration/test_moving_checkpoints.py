"""A checkpoint of any number of stages, replicas and micro-batches, or of plain fairchem, is resumed by any other."""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
from omegaconf import DictConfig

from fairchem_janus.checkpoint.contents import read_contents
from fairchem_janus.parallel.launch import RankError
from tests.integration.resume import Resumed, checkpoint, differences, job, run_all, stored
from tests.integration.variants import adopt

SAVED_AT, STEPS = 5, 25

SIZES: dict[str, tuple[int, list[str]]] = {
    "plain": (1, []),
    "plain-ddp": (2, ["++job.scheduler.ranks_per_node=2"]),
    "P1-N2": (1, adopt(P=1, N=2)),
    "P2-N2": (2, adopt(P=2, N=2)),
    "P2-N1": (2, adopt(P=2, N=1)),
    "D2-N1": (2, adopt(P=1, D=2, N=1)),
    "G2-N2": (2, [*adopt(P=1, N=2), "++job.graph_parallel.group_size=2", "++job.scheduler.ranks_per_node=2"]),
    "P2-D2-N1": (4, adopt(P=2, D=2, N=1)),
    "P2-G2-N2": (4, [*adopt(P=2, N=2), "++job.graph_parallel.group_size=2", "++job.scheduler.ranks_per_node=4"]),
    "P2-unfolded": (2, [*adopt(P=2, N=2), "+runner.janus.schedule=1f1b_2nd"]),
    "P2-gars": (2, [*adopt(P=2, N=2), "+runner.janus.gars.graphs_per_step=6"]),
    "D2-gars": (2, [*adopt(P=1, D=2, N=2), "+runner.janus.gars.graphs_per_step=6"]),
}
"""World size and overrides. A global batch is one of the stock sampler's for `plain` and `P2-N1`, 6 graphs for GARS,
and two batches of the sampler otherwise."""

FRESH = ("P1-N2", "plain", "P2-N2", "P2-N1", "plain-ddp", "G2-N2", "P2-gars", "P2-D2-N1", "P2-G2-N2")

MOVES = [
    ("P1-N2", "P2-N2"),
    ("P2-N2", "P1-N2"),
    ("P2-N2", "D2-N1"),
    ("P2-N2", "G2-N2"),
    ("G2-N2", "P1-N2"),
    ("P2-N2", "P2-unfolded"),
    ("P2-gars", "D2-gars"),
    ("plain", "P2-N1"),
    ("P2-N1", "plain"),
    ("plain-ddp", "P2-N2"),
    *(
        FOUR_RANKS := [
            ("P2-N2", "P2-G2-N2"),
            ("P2-G2-N2", "P2-D2-N1"),
            ("P2-D2-N1", "P2-G2-N2"),
            ("P2-G2-N2", "plain-ddp"),
            ("plain-ddp", "P2-D2-N1"),
            ("P2-D2-N1", "P1-N2"),
        ]
    ),
]

RELOADS = [
    ("P1-N2", "P2-N2"),
    ("P2-N2", "P1-N2"),
    ("plain-ddp", "P2-N2"),
    ("P2-N1", "plain"),
    ("P2-N2", "D2-N1"),
    ("G2-N2", "P2-N2"),
    ("P2-N2", "P2-unfolded"),
    ("P2-G2-N2", "P2-D2-N1"),
]
"""Resumed, and saved again without a step."""

LONG = [
    ("P2-N2", "P1-N2"),
    ("G2-N2", "P1-N2"),
    ("P2-N2", "P2-unfolded"),
    ("plain-ddp", "P2-N2"),
    ("P2-N2", "G2-N2"),
    *FOUR_RANKS,
]
"""Left to the long suite."""

LONG_RELOADS = [pair for pair in RELOADS if pair not in (("P1-N2", "P2-N2"), ("P2-N1", "plain"))]

# `unfolded`: every rank holds both stages, one for each half of the phases

Runs = dict[str, list[Resumed]]


def cases(pairs: list[tuple[str, str]], long: list[tuple[str, str]]) -> list[Any]:
    return [
        pytest.param(*pair, id="-to-".join(pair), marks=[pytest.mark.long] if pair in long else []) for pair in pairs
    ]


@pytest.fixture(scope="module")
def selected(request: pytest.FixtureRequest) -> list[tuple[str, str]]:
    """Pairs of the tests that were asked for."""
    own = [item for item in request.session.items if item.path == request.path and hasattr(item, "callspec")]
    return [(item.callspec.params["before"], item.callspec.params["after"]) for item in own]


@pytest.fixture(scope="module")
def configs(
    fake_job: list[str], tmp_path_factory: pytest.TempPathFactory, selected: list[tuple[str, str]]
) -> dict[str, DictConfig]:
    """All jobs by name; two groups of parameters, so that the optimizer has something to mix up."""
    common = [
        f"job.run_dir='{tmp_path_factory.mktemp('moving')}'",
        "runner.train_eval_unit.model._target_=tests.integration.models.GroupedModel",
        "+runner.train_eval_unit.save_inference_ckpt=false",
        "max_atoms=32",  # 64 batches: no replica is handed one twice at the end of an epoch
        f"steps={STEPS}",
        "checkpoint_every=100",
        "runner.callbacks.0._target_=tests.jobs.callbacks.SaveAt",
        f"+runner.callbacks.0.steps=[{SAVED_AT}, 10]",
    ]
    moved = {*selected, ("P2-N2", "D2-N1")}
    starts = {before for before, _ in moved}
    jobs = {name: job(name, fake_job, *common, *SIZES[name][1]) for name in FRESH if name in starts}
    for before, after in (pair for pair in MOVES if pair in moved):
        start = checkpoint(jobs[before], f"step_{SAVED_AT}")
        jobs[f"{before}>{after}"] = job(f"{before}--{after}", fake_job, *common, *SIZES[after][1], start=start)
    for before, after in (pair for pair in RELOADS if pair in moved):
        start = checkpoint(jobs[before], f"step_{SAVED_AT}")
        options = [*common, *SIZES[after][1], f"runner.max_steps={SAVED_AT}"]
        jobs[f"{before}={after}"] = job(f"{before}-again-{after}", fake_job, *options, start=start)
    return jobs


@pytest.fixture(scope="module")
def runs(configs: dict[str, DictConfig]) -> Runs:
    """What became of them: first those that start anew, then those that need their checkpoints."""
    results: Runs = {}
    for fresh in (True, False):
        for world_size in (1, 2, 4):
            jobs = {
                name: config
                for name, config in configs.items()
                if (name in FRESH) == fresh and SIZES[name.replace("=", ">").rpartition(">")[2]][0] == world_size
            }
            results |= run_all(jobs, world_size=world_size) if jobs else {}
    return results


def losses(runs: Runs, name: str) -> dict[int, float]:
    """Of the whole global batch: plain fairchem's are one a rank, ours are the same on all ranks."""
    ranks = runs[name]
    return {step: mean(rank.losses[step] for rank in ranks) for step in ranks[0].losses}


@pytest.mark.parametrize(("before", "after"), cases(MOVES, LONG))
def test_the_next_20_losses_are_those_of_the_uninterrupted_run(runs: Runs, before: str, after: str) -> None:
    whole, rest = losses(runs, before), losses(runs, f"{before}>{after}")
    assert list(rest) == list(range(SAVED_AT, STEPS))
    for step, loss in rest.items():
        # float32 round-off, which 20 steps of training amplify
        assert loss == pytest.approx(whole[step], rel=1e-5), f"step {step}"


@pytest.mark.parametrize(("before", "after"), cases(RELOADS, LONG_RELOADS))
def test_what_is_loaded_is_saved_again_to_the_bit(
    runs: Runs, configs: dict[str, DictConfig], before: str, after: str
) -> None:
    """Model, optimizer with both groups, moving average, schedule and progress, name by name."""
    first = stored(checkpoint(configs[before], f"step_{SAVED_AT}"))
    again = stored(checkpoint(configs[f"{before}={after}"], "final"))
    assert differences(first, again) == []
    assert len(first["optim"]["param_groups"]) == 2
    assert {group["weight_decay"] for group in first["optim"]["param_groups"]} == {0, 1e-3}


def test_a_checkpoint_that_was_moved_can_be_moved_on(configs: dict[str, DictConfig], runs: Runs) -> None:
    """The run that went from P = 2 to D = 2 saves the same names and progress as the one that stayed."""
    moved, stayed = (checkpoint(configs[name], "step_10") for name in ("P2-N2>D2-N1", "P2-N2"))
    assert not Path(moved.parent / ".incomplete").exists()
    assert contents(moved) == contents(stayed)
    assert stored(moved)["progress"] == stored(stayed)["progress"]


def contents(location: Path) -> dict[str, tuple[int, ...] | None]:
    return {key: shape for key, shape in read_contents(str(location)).items() if key.startswith("unit_state.")}


def test_a_checkpoint_of_another_model_is_refused_by_name_on_every_rank(
    configs: dict[str, DictConfig], runs: Runs, fake_job: list[str], tmp_path: Path
) -> None:
    """A model of three blocks, whose stages all find what they ask for in a checkpoint of four."""
    options = [f"job.run_dir='{tmp_path}'", "backbone.num_layers=3", "steps=8", *SIZES["P2-N2"][1]]
    start = checkpoint(configs["P2-N2"], f"step_{SAVED_AT}")
    with pytest.raises(RankError, match=r"parameters or buffers that the model does not have, backbone\.blocks\.3\."):
        run_all({"shallow": job("shallow", fake_job, *options, start=start)}, world_size=2, timeout_seconds=60)
