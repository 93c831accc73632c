"""The figures of a run, and the table of several, from files as runs write them."""

from __future__ import annotations

import csv
import io
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch.distributed.checkpoint as dcp
from rich.console import Console

from fairchem_janus.results.checkpoints import latest_checkpoint
from fairchem_janus.results.folder import find_runs
from fairchem_janus.results.summary import summarize
from fairchem_janus.results.table import json_rows, show, write_csv

JANUS, STOCK = "fairchem_janus.JanusRunner", "fairchem.core.components.train.train_runner.TrainEvalRunner"


def step(number: int, loss: float, seconds: float = 1.0) -> dict[str, Any]:
    return {
        "step": number,
        "loss": loss,
        "seconds_per_step": seconds,
        "atoms_per_second(approx)": 100 / seconds,
        "samples_per_second(approx)": 10 / seconds,
        "bubble": 0.2,
    }


def write_run(
    folder: Path, *records: dict[str, Any], runner: str = JANUS, config: dict[str, Any] | None = None
) -> Path:
    folder.mkdir(parents=True)
    job = {"run_dir": str(folder.parent), "timestamp_id": folder.name, "seed": 0}
    (folder / "canonical_config.yaml").write_text(
        json.dumps({"job": job, "runner": {"_target_": runner, **(config or {})}})
    )
    if records:
        (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


END = {"step": 20, "end": {"completed": True, "peak_memory_gib": 1.5}}


def test_figures_of_a_finished_run(tmp_path: Path) -> None:
    steps = [step(n, loss=100.0 - n, seconds=50.0 if n == 0 else 1.0 + n % 3) for n in range(20)]
    evaluations = [{"step": n, "eval": {"val/loss": 7.0 - n / 10, "val/x,mae": 1.0}} for n in (10, 20)]
    run = summarize(write_run(tmp_path / "a", *steps, *evaluations, END))
    assert (run.status, run.step, run.memory_gib) == ("finished", 20, 1.5)
    assert run.loss == pytest.approx((82 + 81) / 2)  # the last tenth
    assert run.val_loss == 5.0
    assert run.seconds_per_step == 2.0  # the median, without the first step
    assert (run.atoms_per_second, run.samples_per_second, run.bubble) == (50.0, 5.0, 0.2)


def test_a_resumed_run_counts_its_steps_once(tmp_path: Path) -> None:
    first = [step(n, loss=1000.0) for n in range(12)]
    resumed = [step(10, loss=1.0, seconds=60.0), step(11, loss=2.0, seconds=4.0)]
    run = summarize(write_run(tmp_path / "a", *first, *resumed))
    assert (run.status, run.step, run.loss) == ("unfinished", 12, 2.0)
    assert run.seconds_per_step == 1.0  # the step after the resumption is left out, as the first one is
    assert run.memory_gib is None


def test_an_early_end_and_a_torn_line(tmp_path: Path) -> None:
    early = write_run(tmp_path / "a", step(0, 3.0), {"step": 1, "end": {"completed": False, "peak_memory_gib": 1.0}})
    assert summarize(early).status == "unfinished"
    torn = write_run(tmp_path / "b", step(0, 3.0))
    with open(torn / "metrics.jsonl", "a") as file:
        file.write('{"step": 1, "lo')
    assert summarize(torn).loss == 3.0


def test_plain_fairchem_runs_get_a_row_with_what_is_known(tmp_path: Path) -> None:
    running = write_run(tmp_path / "a", runner=STOCK)
    assert (summarize(running).status, summarize(running).loss) == ("unfinished", None)
    final = running / "checkpoints" / "final"
    final.mkdir(parents=True)
    (final / ".metadata").touch()
    assert summarize(running).status == "finished"


def test_steps_without_a_report_are_those_of_the_last_complete_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a", runner=STOCK)
    for number, name in ((10, "step_10"), (15, "final")):
        state = {"unit_state": {"progress": {"num_steps_completed": number}}}
        dcp.save(state, checkpoint_id=run / "checkpoints" / name, no_dist=True)
        os.utime(run / "checkpoints" / name, (number, number))
    (run / "checkpoints" / "step_20").mkdir()  # torn off
    assert latest_checkpoint(run) == run / "checkpoints" / "final"
    assert summarize(run).step == 15


def test_a_setting_left_at_null_is_a_dash(tmp_path: Path) -> None:
    for index, wave_size in enumerate((None, 2)):
        write_run(tmp_path / f"{index}", config={"janus": {"wave_size": wave_size}})
    text = io.StringIO()
    show([summarize(folder) for folder in find_runs([tmp_path])], Console(file=text, width=200))
    assert "wave_size" in text.getvalue()
    assert "None" not in text.getvalue()


def test_runs_are_found_in_parent_folders_once(tmp_path: Path) -> None:
    a = write_run(tmp_path / "runs" / "a", step(0, 1.0))
    b = write_run(tmp_path / "runs" / "deep" / "b")
    (a / "checkpoints" / "step_1").mkdir(parents=True)
    write_run(a / "checkpoints" / "step_1" / "no_run")
    assert find_runs([tmp_path / "runs", a]) == [a, b]


def test_the_table_has_the_settings_that_differ(tmp_path: Path) -> None:
    for lr in (0.1, 0.2):
        write_run(tmp_path / f"lr{lr}", step(0, 5.0), END, config={"optimizer": {"lr": lr}, "max_steps": 20})
    write_run(tmp_path / "stock", runner=STOCK, config={"optimizer": {"lr": 0.1}, "max_steps": 20})
    runs = [summarize(folder) for folder in find_runs([tmp_path])]
    text = io.StringIO()
    show(runs, Console(file=text, width=200))
    lines = text.getvalue().splitlines()
    heading = "".join(lines[:3])
    assert [name in heading for name in ("_target_", "lr", "max_steps", "memory")] == [True, True, False, True]
    narrow = io.StringIO()
    show(runs, Console(file=narrow, width=80))
    assert all(figure in narrow.getvalue() for figure in ("finished", "atoms/s", "bubble", "20.0%", "1.50"))
    assert sum("finished" in line for line in lines) == 3  # one of them unfinished
    rows = json_rows(runs)
    assert [(row["run"], row["lr"], row["loss"], row["memory_gib"]) for row in rows] == [
        ("lr0.1", 0.1, 5.0, 1.5),
        ("lr0.2", 0.2, 5.0, 1.5),
        ("stock", 0.1, None, None),
    ]
    write_csv(runs, tmp_path / "table.csv")
    written = list(csv.DictReader((tmp_path / "table.csv").read_text().splitlines()))
    assert [row["lr"] for row in written] == ["0.1", "0.2", "0.1"]


def test_json_has_no_nan(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "a", step(0, 5.0), {"step": 1, "eval": {"val/loss": float("nan")}})
    (row,) = json_rows([summarize(folder)])
    assert row["val/loss"] is None
    json.dumps(row, allow_nan=False)
