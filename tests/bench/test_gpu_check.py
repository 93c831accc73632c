"""`scripts/gpu_check.sh` where there is no CUDA device."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_check.sh"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_device_it_says_so_and_succeeds() -> None:
    environment = {**os.environ, "PYTHON": sys.executable}
    result = subprocess.run([SCRIPT], capture_output=True, text=True, timeout=120, check=False, env=environment)
    assert result.returncode == 0, result.stderr
    assert "finds no CUDA device on this machine" in result.stdout
