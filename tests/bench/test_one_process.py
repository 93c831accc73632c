"""All stages in one process: exact, and every phase's time and bytes are noted."""

from __future__ import annotations

import pytest
import torch
from fairchem.core.units.mlip_unit.mlip_unit import compute_loss

from fairchem_janus.bench.one_process import OneProcess
from fairchem_janus.bench.workload import Size, make_batches, make_tasks
from fairchem_janus.model.randomness import install_keyed_draws
from fairchem_janus.schedule import TRAINING_PHASES, Phase
from fairchem_janus.verify.compare import tensor_errors

TINY = Size(blocks=2, lmax=2, channels=8, experts=2, cutoff=4.0, max_neighbors=20)
CPU = torch.device("cpu")


@pytest.mark.parametrize("split", ["merged", "eager"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_gradients_are_plain_fairchems(split: str, num_stages: int) -> None:
    ours, plain = TINY.build(dtype=torch.float64), TINY.build(dtype=torch.float64)
    engine = OneProcess(ours, num_stages, CPU, split=split)
    loss = engine.step(lambda: make_batches(2, atoms=4, dtype=torch.float64))
    install_keyed_draws(plain.backbone)
    (union,) = make_batches(1, atoms=4, graphs=2, dtype=torch.float64)
    reference = torch.stack(list(compute_loss(make_tasks(), plain(union), union).values())).sum()
    reference.backward()
    assert loss == pytest.approx(reference.item(), rel=1e-10)
    gradients = [{n: p.grad for n, p in m.named_parameters() if p.grad is not None} for m in (ours, plain)]
    assert max(tensor_errors(*gradients).values()) <= 1e-10


def test_graphs_are_freed_when_the_last_phase_is_over() -> None:
    figures = OneProcess(TINY.build(), 2, CPU).measure(lambda: make_batches(1, atoms=4)[0], repetitions=1)
    assert figures.total_seconds > 0 and all(len(figures.seconds[phase]) == 2 for phase in TRAINING_PHASES)
    for stage in range(2):
        fe, ff, bf, be = (figures.left[phase][stage] for phase in TRAINING_PHASES)
        assert fe > 0 and ff > 0 and be < 0
        assert -ff < bf < 0  # gradients at the boundary stay
        assert abs(fe + ff + bf + be) < 0.02 * fe  # messages come and go
    eager = OneProcess(TINY.build(), 2, CPU, split="eager").measure(lambda: make_batches(1, atoms=4)[0], repetitions=1)
    assert eager.left[Phase.BF][0] == pytest.approx(-eager.left[Phase.FF][0], rel=0.05)
