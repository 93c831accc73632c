"""The heart of it: every gradient of a pipelined step equals plain fairchem's on the union of the micro-batches."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from omegaconf import DictConfig

from fairchem_janus.verify.compare import Comparison, compare
from fairchem_janus.verify.run import pipeline_trace, reference_trace
from fairchem_janus.verify.trace import Trace
from tests.integration.variants import VARIANTS, adopt, make_variant

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-4}
"""Summation order alone leaves about 1e-14 in float64 and 1e-6 in float32."""

TIMEOUT = 120.0

GRID = [(P, D, N) for D in (1, 2) for P in (1, 2, 3, 4) for N in (1, 2, 5)]

Check = Callable[..., Comparison]


@pytest.fixture(scope="module")
def check() -> Check:
    """Compare a job with plain fairchem; references are shared by jobs that see the same graphs in a step."""
    references: dict[str, Trace] = {}

    def run(config: DictConfig, *, world_size: int, name: str, steps: int = 1, dtype: torch.dtype) -> Comparison:
        ours = pipeline_trace(config, steps=steps, dtype=dtype, world_size=world_size, timeout_seconds=TIMEOUT)
        key = repr((name, dtype, ours.batches))
        if key not in references:
            references[key] = reference_trace(config, ours, dtype=dtype, timeout_seconds=TIMEOUT)
        return compare(ours, references[key])

    return run


def assert_exact(result: Comparison, dtype: torch.dtype) -> None:
    assert result.grad <= TOLERANCE[dtype], result.worst_tensor
    assert result.loss <= TOLERANCE[dtype]
    assert result.grad_norm <= TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("P", "D", "N", "variant"),
    [
        pytest.param(
            P, D, N, VARIANTS[i % len(VARIANTS)], marks=[pytest.mark.long] * (P == 3 or (P * D == 8 and N < 5))
        )
        for i, (P, D, N) in enumerate(GRID)
    ],
    ids=lambda value: str(value),
)
def test_gradients_equal_single_process(
    check: Check, real_job: list[str], P: int, D: int, N: int, variant: str
) -> None:
    config = make_variant(variant, real_job, *adopt(P=P, D=D, N=N))
    result = check(config, world_size=P * D, name=variant, dtype=torch.float64)
    assert_exact(result, torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("P", [pytest.param(2, marks=pytest.mark.long), 3])
def test_gradients_equal_single_process_on_fake_data(check: Check, fake_job: list[str], P: int, variant: str) -> None:
    config = make_variant(variant, fake_job, *adopt(P=P, N=3))
    result = check(config, world_size=P, name=variant, dtype=torch.float64)
    assert_exact(result, torch.float64)


@pytest.mark.parametrize("variant", VARIANTS)
def test_eager_split_gives_the_same_gradients(check: Check, fake_job: list[str], variant: str) -> None:
    config = make_variant(variant, fake_job, *adopt(P=2, N=3), "+runner.janus.split=eager")
    result = check(config, world_size=2, name=variant, dtype=torch.float64)
    assert_exact(result, torch.float64)


@pytest.mark.parametrize("schedule", ["gpipe_2nd", "wavek"])
@pytest.mark.parametrize("wave_size", [1, 3])
def test_gradients_do_not_depend_on_the_schedule(
    check: Check, fake_job: list[str], schedule: str, wave_size: int
) -> None:
    overrides = [f"+runner.janus.schedule={schedule}", f"+runner.janus.wave_size={wave_size}"]
    config = make_variant("mole-efs", fake_job, *adopt(P=2, N=5), *overrides)
    result = check(config, world_size=2, name="mole-efs", dtype=torch.float64)
    assert_exact(result, torch.float64)


@pytest.mark.parametrize("variant", ["mole-efs", "dense-ef"])
def test_float32_gradients_agree_to_rounding(check: Check, fake_job: list[str], variant: str) -> None:
    config = make_variant(variant, fake_job, *adopt(P=2, N=2))
    result = check(config, world_size=2, name=variant, dtype=torch.float32)
    assert_exact(result, torch.float32)


def test_several_steps_give_the_same_parameters(check: Check, fake_job: list[str]) -> None:
    """Clipping, AdamW and the schedule included: the norm over all stages is the one that fairchem clips by."""
    config = make_variant("mole-efs", fake_job, *adopt(P=3, N=2), "runner.train_eval_unit.clip_grad_norm=0.5")
    result = check(config, world_size=3, name="mole-efs-clip", steps=4, dtype=torch.float64)
    assert_exact(result, torch.float64)
    assert result.param <= 1e-9  # AdamW divides by the root of squared gradients, which magnifies rounding
