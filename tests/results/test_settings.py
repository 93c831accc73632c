"""The columns in which runs differ."""

from __future__ import annotations

from fairchem_janus.results.settings import differing, flatten


def test_leaves_by_path_without_what_is_no_setting() -> None:
    config = {
        "job": {"run_dir": "a", "timestamp_id": "b", "metadata": {"commit": "c"}, "seed": 0},
        "runner": {"train_eval_unit": {"job_config": {"seed": 0}, "lr": 1}, "callbacks": [{"n": 1}], "list": [1, None]},
    }
    assert flatten(config) == {
        "job.seed": 0,
        "runner.train_eval_unit.lr": 1,
        "runner.list.0": 1,
        "runner.list.1": None,
    }


def test_settings_of_the_pipeline_come_first_and_classes_not_at_all() -> None:
    runs = [{"z": n, "x._target_": n, "runner.janus.wave_size": 3 - n} for n in (1, 2)]
    assert list(differing([{**run, "z": 2 * place} for place, run in enumerate(runs)])) == ["wave_size", "z"]


def test_what_differs_in_the_same_way_is_one_column() -> None:
    runs = [{"a.max_steps": n, "a.b.c.steps": n, "a.b.lr": lr, "same": 1} for n, lr in ((5, 1), (5, 2), (6, 1))]
    assert differing(runs) == {"max_steps": [5, 5, 6], "lr": [1, 2, 1]}


def test_a_key_that_a_run_lacks_is_left_empty() -> None:
    assert differing([{"janus.wave_size": 2}, {}]) == {"wave_size": [2, ""]}


def test_names_are_as_short_as_they_can_be() -> None:
    runs = [{"train.seed": n, "val.seed": n + (n > 1), "tasks.0": n * n, "lr": -n % 3} for n in (1, 2, 3)]
    assert list(differing(runs)) == ["train.seed", "val.seed", "tasks.0", "lr"]


def test_equal_runs_have_no_columns() -> None:
    assert differing([{"a": 1}, {"a": 1}]) == {}
    assert differing([{"a": 1}]) == {}
