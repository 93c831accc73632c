"""`JanusRunner` refuses a wrong job before it builds a model, and says what it replaced in a right one."""

from __future__ import annotations

import csv
import json
import logging
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from fairchem.core.common import distutils
from fairchem.core.models import base
from omegaconf import OmegaConf
from torchtnt.framework import State
from torchtnt.framework.callback import Callback

from fairchem_janus import JanusRunner, JanusTrainEvalUnit
from fairchem_janus.data.sampler import MicroBatchSampler
from fairchem_janus.parallel import watch
from tests.builders import model_config
from tests.integration.variants import adopt, stock_config

UNIT = "fairchem.core.units.mlip_unit.mlip_unit.MLIPTrainEvalUnit"
GET_DATALOADER = "fairchem.core.components.common.dataloader_builder.get_dataloader"


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """A job of one rank on the CPU; a failing runner must not end the tests' process, as it would a job's."""
    monkeypatch.setenv(distutils.CURRENT_DEVICE_TYPE_STR, "cpu")
    monkeypatch.setattr(watch, "_exit_after", lambda seconds: None)
    running: list[watch.FailureWatch] = []
    start = watch.FailureWatch.start
    monkeypatch.setattr(watch.FailureWatch, "start", lambda self: (running.append(self), start(self))[1])
    monkeypatch.setattr(watch, "POLL_SECONDS", 0.01)
    level = logging.getLogger().level
    yield
    for guard in running:
        guard.stop()
    logging.getLogger().setLevel(level)


def children(tmp_path: Path, **changes: Any) -> dict[str, Any]:
    """A runner's children as `_recursive_: false` hands them over; `a__b=value` changes the key a.b."""
    job = {
        "run_dir": str(tmp_path),
        "timestamp_id": "now",
        "graph_parallel": {"group_size": 1},
        "scheduler": {"mode": "LOCAL"},
        "seed": 0,
    }
    config = OmegaConf.create(
        {
            "train_dataloader": {"_target_": GET_DATALOADER},
            "eval_dataloader": {"_target_": GET_DATALOADER},
            "train_eval_unit": {"_target_": UNIT, "job_config": job, "model": model_config()},
            "callbacks": [],
            "max_steps": 1,
        }
    )
    for key, value in changes.items():
        OmegaConf.update(config, key.replace("__", "."), value, force_add=True)
    return {key: config[key] for key in config}


def refusal(children: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *, janus: Any = None) -> str:
    """The error of a job that is wrong, which must come before any model is built."""

    def build(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("a model was built")

    monkeypatch.setattr(base.HydraModel, "__init__", build)
    with pytest.raises(ValueError) as caught:
        JanusRunner(janus=janus, **children)
    return str(caught.value)


def test_an_unknown_runner_key_is_refused_with_the_known_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(children(tmp_path, max_step=3), monkeypatch)
    assert text.startswith("unknown key runner.max_step; known keys: janus, train_dataloader, eval_dataloader,")
    assert "max_steps" in text


def test_an_unknown_janus_key_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(children(tmp_path), monkeypatch, janus={"pipelin_size": 1})
    assert text == "unknown key janus.pipelin_size; did you mean janus.pipeline_size?"


@pytest.mark.parametrize("key", ["train_dataloader", "eval_dataloader", "train_eval_unit"])
def test_objects_instead_of_configurations_are_refused_with_the_fix(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: str
) -> None:
    """What a runner without `_recursive_: false` gets: its children already built."""
    text = refusal({**children(tmp_path), key: object()}, monkeypatch)
    assert f"runner.{key} must reach JanusRunner as configuration" in text
    assert "+runner._recursive_=false" in text


def test_a_missing_child_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    incomplete = children(tmp_path)
    del incomplete["eval_dataloader"]
    assert "runner.eval_dataloader must" in refusal(incomplete, monkeypatch)


def test_another_unit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = "fairchem.core.units.mlip_unit.mlip_unit.MLIPEvalUnit"
    text = refusal(children(tmp_path, train_eval_unit___target_=other), monkeypatch)
    assert f"runner.train_eval_unit._target_ is {other}" in text
    assert "MLIPTrainEvalUnit" in text


def test_another_dataloader_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = refusal(children(tmp_path, train_dataloader___target_="torch.utils.data.DataLoader"), monkeypatch)
    assert "a dataloader of the job is built by torch.utils.data.DataLoader" in text
    assert GET_DATALOADER in text


@pytest.mark.parametrize(
    ("changes", "janus", "message"),
    [
        ({}, {"pipeline_size": 2, "num_micro_batches": 2}, "the world has 1 ranks"),
        ({}, {"num_micro_batches": 0}, "janus.num_micro_batches must be an integer of at least 1"),
        ({"train_eval_unit__model__backbone__direct_forces": True}, None, "backbone.direct_forces is true"),
        ({}, {"partition": [3]}, "janus.partition=[3] must be 1 number(s) of at least 1"),
        ({}, {"schedule": "nowhere.csv"}, "janus.schedule=nowhere.csv: there is no such file"),
        ({"train_eval_unit__train_strategy": "fsdp"}, None, "train_eval_unit.train_strategy=fsdp"),
        ({"train_eval_unit__job_config__graph_parallel__group_size": 2}, None, "job.graph_parallel.group_size = 2"),
    ],
)
def test_a_job_that_cannot_run_is_refused_before_a_model_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], janus: Any, message: str
) -> None:
    assert message in refusal(children(tmp_path, **changes), monkeypatch, janus=janus)


def test_the_error_is_on_the_console_and_a_rank_alone_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """That other ranks are ended is claimed in parallel/test_watch.py and integration/test_command_line.py."""
    ended = []
    monkeypatch.setattr(watch, "_exit_after", ended.append)
    text = refusal(children(tmp_path, max_step=3), monkeypatch)
    assert f"rank 0 failed, ending all ranks\nValueError: {text}" in caplog.text
    assert not any(thread.name == "janus-watch" for thread in threading.enumerate())
    assert ended == []


# ---------------------------------------------------------------- a job that is right


@pytest.fixture(scope="module")
def stock_runner(fake_job: list[str]) -> Any:
    """Stock job, two micro-batches a step, on one rank: built by overrides alone."""
    config = stock_config(fake_job, *adopt(P=1, N=2), "max_atoms=15")
    arguments = {key: value for key, value in config.runner.items() if key not in ("_target_", "_recursive_")}

    def build() -> JanusRunner:
        runner = JanusRunner(**arguments)
        runner.job_config = config.job
        return runner

    return build


def test_children_are_built_and_the_table_says_what_changed(
    stock_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        runner = stock_runner()
    assert isinstance(runner.train_eval_unit, JanusTrainEvalUnit)
    assert [type(callback).__name__ for callback in runner.callbacks] == ["TrainCheckpointCallback"]
    assert runner.checkpoint_callback is runner.callbacks[0]
    for loader in (runner.train_dataloader, runner.eval_dataloader):
        assert isinstance(loader.batch_sampler, MicroBatchSampler)
        assert len(loader) == -(-len(loader.batch_sampler.batches) // 2)
    (table,) = [record.getMessage() for record in caplog.records if "in the job file" in record.getMessage()]
    for shown in (
        "D=1 x P=1 x G=1",
        "JanusTrainEvalUnit",
        "2 make a step",
        f"{len(runner.train_dataloader)} steps",
        "wavek",
    ):
        assert shown in table


def test_graphs_over_the_budget_are_listed_in_the_run_folder(
    stock_runner: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        runner = stock_runner()
    folder = Path(runner.job_config.run_dir) / runner.job_config.timestamp_id
    rows = list(csv.DictReader((folder / "left_out_train.csv").open()))
    assert rows
    assert all(int(row["natoms"]) > 15 and row["reason"] == "max_atoms" for row in rows)
    assert f"{len(rows)} of " in caplog.text


def test_a_run_trains_evaluates_and_writes_its_metrics(stock_runner: Any) -> None:
    runner = stock_runner()
    before = {name: value.clone() for name, value in runner.train_eval_unit.model.named_parameters()}
    runner.run()
    after = dict(runner.train_eval_unit.model.named_parameters())
    assert any(not torch.equal(value, after[name]) for name, value in before.items())
    path = Path(runner.job_config.run_dir) / runner.job_config.timestamp_id / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    steps = [record for record in records if "loss" in record]
    assert [record["step"] for record in steps] == [0, 1, 2, 3]
    assert all(record["loss"] > 0 and record["grad_norm"] > 0 for record in steps)
    assert records[-1]["step"] == 4
    assert records[-1]["end"]["completed"] is True
    assert 0.1 < records[-1]["end"]["peak_memory_gib"] < 50
    assert threading.active_count() == 1 or not any(t.name == "janus-watch" for t in threading.enumerate())


class StopAfter(Callback):
    """Asks for an end after a step, as a callback before a time limit does."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_train_step_end(self, state: State, unit: Any) -> None:
        if unit.train_progress.num_steps_completed == self.step:
            state.stop()


def test_a_run_that_was_asked_to_stop_is_not_called_complete(stock_runner: Any) -> None:
    runner = stock_runner()
    runner.callbacks.append(StopAfter(2))
    runner.run()
    path = Path(runner.job_config.run_dir) / runner.job_config.timestamp_id / "metrics.jsonl"
    end = json.loads(path.read_text().splitlines()[-1])
    assert (end["step"], end["end"]["completed"]) == (2, False)
