"""Importing the package says at once when fairchem or torch is not what it was built for."""

from __future__ import annotations

import importlib.util
from importlib import metadata

import pytest

import fairchem_janus

GOOD = {"fairchem-core": "2.24.1", "torch": "2.13.0+cu130"}


def import_with(monkeypatch: pytest.MonkeyPatch, versions: dict[str, str]) -> None:
    """Execute the package's `__init__` anew where the given distributions, and no others, are installed."""

    def version(distribution: str) -> str:
        if distribution not in versions:
            raise metadata.PackageNotFoundError(distribution)
        return versions[distribution]

    monkeypatch.setattr(metadata, "version", version)
    spec = importlib.util.find_spec("fairchem_janus")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_every_patch_release_and_build_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    import_with(monkeypatch, GOOD)


@pytest.mark.parametrize(
    ("distribution", "found", "wanted"),
    [
        ("fairchem-core", "2.23.0", "2.24"),
        ("fairchem-core", "2.2.4", "2.24"),
        ("torch", "2.12.1+cpu", "2.13"),
        ("torch", "2.1", "2.13"),
        ("torch", "3.13.0", "2.13"),
    ],
)
def test_another_version_is_an_import_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, distribution: str, found: str, wanted: str
) -> None:
    with pytest.raises(ImportError) as caught:
        import_with(monkeypatch, {**GOOD, distribution: found})
    assert f"was built for {distribution} {wanted}.*, but {found} is installed" in str(caught.value)
    assert f"pip install '{distribution}=={wanted}.*'" in str(caught.value)


@pytest.mark.parametrize("distribution", GOOD)
def test_a_missing_package_is_an_import_error_that_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, distribution: str
) -> None:
    with pytest.raises(ImportError) as caught:
        import_with(monkeypatch, {name: version for name, version in GOOD.items() if name != distribution})
    assert f"needs {distribution} {fairchem_janus.BUILT_FOR[distribution]}.*, which is not installed" in str(
        caught.value
    )
    assert f"pip install '{distribution}=={fairchem_janus.BUILT_FOR[distribution]}.*'" in str(caught.value)


def test_what_it_was_built_for_is_what_it_depends_on() -> None:
    requirements = metadata.requires("fairchem-janus")
    assert requirements is not None
    for distribution, version in fairchem_janus.BUILT_FOR.items():
        assert f"{distribution}=={version}.*" in requirements


def test_the_public_names_exist_and_others_do_not() -> None:
    for name in fairchem_janus.__all__:
        assert getattr(fairchem_janus, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'JanusRuner'"):
        fairchem_janus.JanusRuner  # noqa: B018
