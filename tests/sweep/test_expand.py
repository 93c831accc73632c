"""Hydra's sweep syntax, and what a member is known by."""

from __future__ import annotations

from pathlib import Path

import pytest

from fairchem_janus.sweep.expand import Member, expand


def overrides(*arguments: str) -> list[tuple[str, ...]]:
    return [member.overrides for member in expand(arguments)]


def test_every_combination_is_a_member() -> None:
    assert overrides("a.k=2,4", "lr=1e-4,4e-4") == [
        ("a.k=2", "lr=0.0001"),
        ("a.k=2", "lr=0.0004"),
        ("a.k=4", "lr=0.0001"),
        ("a.k=4", "lr=0.0004"),
    ]


@pytest.mark.parametrize(
    ("argument", "members"),
    [
        ("k=range(1,4)", ["k=1", "k=2", "k=3"]),
        ("k=choice(a,b)", ["k=a", "k=b"]),
        ("k=[1,2],[3]", ["k=[1,2]", "k=[3]"]),
        ("k={a:1,b:2},null", ["k={a:1,b:2}", "k=null"]),
        ("k='a,b'", ["k='a,b'"]),
        ("k='a,b','c'", ["k='a,b'", "k='c'"]),
        ("+k=1,2", ["+k=1", "+k=2"]),
        ("++k.l=1,2", ["++k.l=1", "++k.l=2"]),
        ("group@package=x,y", ["group@package=x", "group@package=y"]),
        ("~k", ["~k"]),
        ("k=${other}", ["k=${other}"]),
        ("k=''", ["k=''"]),
        ("k=0.10", ["k=0.1"]),
        ("k=1e-4", ["k=0.0001"]),
        ("lr=1e-4,1e-4", ["lr=0.0001"]),
    ],
)
def test_hydras_syntax(argument: str, members: list[str]) -> None:
    assert overrides(argument) == [(member,) for member in members]


def test_without_several_values_a_sweep_is_one_run() -> None:
    (member,) = expand(["lr=1e-4"])
    assert member == Member(overrides=("lr=0.0001",), swept=())
    assert overrides() == [()]


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("lr=[1,", "lr=[1,: "),
        ("lr", "lr: write lr=VALUE"),
        ("+lr", "+lr: write +lr=VALUE"),
        ("lr=", "lr= has no value; for an empty text write \"lr=''\", with the quotes"),
        ("lr=range(1,1)", "lr=range(1,1) has no values"),
        ("lr=interval(0,1)", "lr=interval(0,1): Can only enumerate CHOICE and RANGE sweeps"),
        ("backbone=glob(*)", "backbone=glob(*): ConfigLoader is not set"),
        ("job.run_dir=here", "job.run_dir=here: a sweep gives every member its own job.run_dir"),
        ("+job.timestamp_id=a,b", "+job.timestamp_id=a,b: a sweep gives every member its own job.timestamp_id"),
    ],
)
def test_what_cannot_be_swept_is_an_error_of_one_line(argument: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        expand([argument])
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("arguments", [("k=1", "k=2"), ("k=1,2", "k=3,4"), ("k=1", "+k=2"), ("++k=1", "k=2")])
def test_a_key_stands_once(arguments: tuple[str, ...]) -> None:
    with pytest.raises(ValueError) as caught:
        expand(arguments)
    assert str(caught.value) == "k is given twice; write all of its values in one override: k=A,B"


def test_keys_that_look_alike_are_others() -> None:
    assert len(expand(["k=1,2", "a.k=1,2", "group@a=x", "group@b=y", "~b.k"])) == 4


def test_a_member_is_known_by_its_overrides_alone(tmp_path: Path) -> None:
    (member,) = expand(["lr=1e-4", "k=2"])
    assert expand(["k=2", "lr=1e-4"])[0].digest == member.digest
    assert expand(["k=2", "lr=1e-4,2e-4"])[0].digest == member.digest
    assert expand(["k=2,3", "lr=1e-4"])[1].digest != member.digest
    assert member.folder_in(tmp_path).name == f"run-{member.digest}"
    member.folder_in(tmp_path).mkdir()
    assert expand(["k=2,3", "lr=1e-4"])[0].folder_in(tmp_path) == member.folder_in(tmp_path)
    assert expand(["k=2,3", "lr=1e-4"])[1].folder_in(tmp_path).name.startswith("k-3-")


def test_names_are_plain_and_short(tmp_path: Path) -> None:
    names = [member.folder_in(tmp_path).name for member in expand(["a.b='x y/z',\"q\"", f"c={'v' * 300},w"])]
    assert names[0].startswith("b-x-y-z_c-vvv")
    assert all(len(name) < 100 for name in names)
    assert len(set(names)) == 4
