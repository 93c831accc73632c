"""Keys are changed in place, and nothing else."""

from __future__ import annotations

import pytest
import yaml

from fairchem_janus.convert.text import YamlText

JOB = """\
# @package _global_

# mine
job:   # about the job
  scheduler: {mode: LOCAL, ranks_per_node: 1}   # flow

    # odd place
  seed: 010
list:
- 1
-   {a: "x"}   # kept
runner:
    _target_: 'a.B'  # the runner
    text: |
      block

    empty:
    lr: 8e-4
"""


def changed(text: str, *calls: tuple[str, str], **kwargs: str) -> str:
    document = YamlText(text)
    for path, value in calls:
        document.set(path, value, **kwargs)
    return document.text


def lines_changed(before: str, after: str) -> tuple[list[str], list[str]]:
    old, new = before.splitlines(), after.splitlines()
    return [line for line in old if line not in new], [line for line in new if line not in old]


@pytest.mark.parametrize(
    ("path", "value", "gone", "new"),
    [
        (
            "runner._target_",
            "c.D",
            ["    _target_: 'a.B'  # the runner"],
            ["    # why", "    _target_: c.D  # the runner"],
        ),
        (
            "job.scheduler.ranks_per_node",
            "2",
            ["  scheduler: {mode: LOCAL, ranks_per_node: 1}   # flow"],
            ["  # why", "  scheduler: {mode: LOCAL, ranks_per_node: 2}   # flow"],
        ),
        (
            "job.scheduler.num_nodes",
            "2",
            ["  scheduler: {mode: LOCAL, ranks_per_node: 1}   # flow"],
            ["  # why", "  scheduler: {num_nodes: 2, mode: LOCAL, ranks_per_node: 1}   # flow"],
        ),
        ("job.graph_parallel.group_size", "2", [], ["  graph_parallel:", "    # why", "    group_size: 2"]),
        ("runner.empty", "1", ["    empty:"], ["    # why", "    empty: 1"]),
        ("runner.janus.pipeline_size", "2", [], ["    janus:", "      # why", "      pipeline_size: 2"]),
        ("new.key", "1", [], ["new:", "  # why", "  key: 1"]),
    ],
)
def test_only_lines_of_the_key_change(path: str, value: str, gone: list[str], new: list[str]) -> None:
    assert lines_changed(JOB, changed(JOB, (path, value), comment="why")) == (gone, new)


def test_a_new_key_stands_after_the_one_asked_for() -> None:
    text = changed(JOB, ("runner._recursive_", "false"), after="_target_")
    assert "    _target_: 'a.B'  # the runner\n    _recursive_: false\n    text: |\n" in text
    text = changed(JOB, ("runner.more", "1"), after="text")
    assert "      block\n\n    more: 1\n    empty:\n" in text


def test_keys_of_a_new_mapping_stay_in_order() -> None:
    text = changed(JOB, ("runner.janus.p", "2"), ("runner.janus.n", "4"))
    assert text.endswith("    lr: 8e-4\n    janus:\n      p: 2\n      n: 4\n")


@pytest.mark.parametrize("text", [JOB.rstrip("\n"), JOB.replace("\n", "\r\n")], ids=["no-newline", "crlf"])
def test_line_ends_stay(text: str) -> None:
    result = changed(text, ("runner.new", "1"))
    assert yaml.safe_load(result)["runner"]["new"] == 1
    assert result.startswith(text)
    assert result.count("\r") == (result.count("\n") if "\r" in text else 0)


def test_a_header_leaves_hydras_own_first() -> None:
    document = YamlText(JOB)
    document.add_header(["one", "two"])
    assert document.text == JOB.replace("# @package _global_\n", "# @package _global_\n# one\n# two\n")


@pytest.mark.parametrize(
    ("text", "path", "message"),
    [
        ("a: &x {k: 1}\nb: *x\n", "b.k", "b is shared by a YAML alias"),
        ("a: &x {k: 1}\nb: *x\n", "a.k", "a is shared by a YAML alias"),
        ("a: &x 1\nb: *x\n", "b", "b is shared by a YAML alias"),
        ("a: ${b}\nb: {k: 1}\n", "a.k", "a is ${b}, not a mapping"),
        ("a:\n", "a.k", "a is empty, not a mapping"),
        ("a: [1]\n", "a", "a is not a single value"),
    ],
)
def test_what_would_change_more_is_refused(text: str, path: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        YamlText(text).set(path, "2")
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("text", "message"),
    [("a: [1\n", "not a YAML file: "), ("- 1\n", "not a job file"), ("", "not a job file"), ("x\n", "not a job file")],
)
def test_what_is_no_job_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        YamlText(text)


def test_a_merged_key_is_set_beside_the_merge() -> None:
    text = changed("base: &b {k: 1, l: 2}\nrunner:\n  <<: *b\n  m: 3\n", ("runner.k", "5"))
    assert yaml.safe_load(text)["runner"] == {"k": 5, "l": 2, "m": 3}
