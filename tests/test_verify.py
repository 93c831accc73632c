"""`verify`: what it measures, and that it fails when gradients differ."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from fairchem_janus.cli.main import app
from fairchem_janus.verify import run
from fairchem_janus.verify.compare import Comparison, compare, tensor_errors
from fairchem_janus.verify.trace import Trace

NAMES = ("backbone.blocks.0.norm_1.weight", "backbone.blocks.1.norm_1.weight", "output_heads.efs.bias")


def trace() -> Trace:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(4, generator=generator, dtype=torch.float64) for name in NAMES}
    return Trace(losses=[2.0], grad_norms=[3.0], gradients=[tensors], parameters=dict(tensors), batches=[[[[0]]]])


def test_equal_traces_have_no_error() -> None:
    result = compare(trace(), trace())
    assert (result.loss, result.grad_norm, result.grad, result.param) == (0.0, 0.0, 0.0, 0.0)
    assert result.passes(0.0)


def test_one_gradient_that_is_off_is_found_and_named() -> None:
    ours = trace()
    ours.gradients[0][NAMES[1]] = ours.gradients[0][NAMES[1]] * (1 + 1e-6)
    result = compare(ours, trace())
    assert result.worst_tensor == NAMES[1]
    assert result.grad == pytest.approx(1e-6, rel=1e-6)
    assert not result.passes(1e-10)
    assert result.by_module["backbone.blocks.1"][0] == result.grad
    assert result.by_module["backbone.blocks.0"][0] == 0.0


def test_loss_and_norm_count_too() -> None:
    for name in ("losses", "grad_norms"):
        ours = trace()
        setattr(ours, name, [getattr(ours, name)[0] * (1 + 1e-6)])
        assert not compare(ours, trace()).passes(1e-10)


def test_the_error_is_relative_to_the_largest_element_with_a_floor_for_tiny_tensors() -> None:
    reference = {"large": torch.tensor([100.0, 1.0]), "tiny": torch.tensor([1e-12])}
    ours = {"large": torch.tensor([100.0, 2.0]), "tiny": torch.tensor([2e-12])}
    errors = tensor_errors(ours, reference)
    assert errors["large"] == pytest.approx(0.01)
    assert errors["tiny"] == pytest.approx(1e-12 / (1e-8 * 100), rel=1e-3)


@pytest.mark.parametrize("broken", [None, float("nan")])
def test_a_gradient_that_is_missing_or_nan_is_infinitely_wrong(broken: float | None) -> None:
    ours = trace()
    if broken is None:
        del ours.gradients[0][NAMES[0]]
    else:
        ours.gradients[0][NAMES[0]] = torch.full((4,), broken, dtype=torch.float64)
    assert compare(ours, trace()).grad == float("inf")


def comparison(error: float) -> Comparison:
    modules = {"backbone.blocks.0": (error, 0.0, 10)}
    return Comparison(loss=0.0, grad_norm=0.0, grad=error, param=0.0, ema=0.0, worst_tensor=NAMES[0], by_module=modules)


@pytest.mark.parametrize(("error", "status", "verdict"), [(1e-14, 0, "exact within"), (1e-3, 1, "NOT exact within")])
def test_the_command_exits_with_1_past_the_tolerance(
    error: float, status: int, verdict: str, tmp_path: Path, fake_job: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.jobs.prepare import STOCK_JOB

    monkeypatch.setattr(run, "verify_job", lambda *_, **__: comparison(error))
    file = tmp_path / "parity.json"
    result = CliRunner().invoke(app, ["verify", "-c", str(STOCK_JOB), "--steps", "2", "--json", str(file), *fake_job])
    logging.disable(logging.NOTSET)  # the command silences fairchem in its own process
    assert result.exit_code == status, result.output
    assert verdict in result.output
    figures = json.loads(file.read_text())
    assert figures["max_rel_grad_error"] == error
    assert {"max_rel_loss_error", "max_rel_param_error", "worst_tensor", "steps", "dtype", "world"} <= set(figures)
