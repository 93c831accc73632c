"""Shared fixtures: data for the stock job, made once a session."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.jobs.prepare import prepare_fake, prepare_real

torch.set_num_threads(1)  # the tensors are tiny: more threads only get in each other's way

REAL_DATA = os.environ.get("JANUS_TEST_DATA")


@pytest.fixture(scope="session")
def real_job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that point the stock job at real crystals and molecules."""
    if REAL_DATA is None:
        pytest.skip("JANUS_TEST_DATA is not set: no folder with real DFT data")
    return prepare_real(Path(REAL_DATA), tmp_path_factory.mktemp("real"))


@pytest.fixture(scope="session")
def fake_job(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Overrides that point the stock job at fairchem's own fake data."""
    return prepare_fake(tmp_path_factory.mktemp("fake"))
