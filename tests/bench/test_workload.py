"""Models of UMA's shapes: as many parameters as the real ones, and micro-batches that repeat exactly."""

from __future__ import annotations

import pytest
import torch

from fairchem_janus.bench.workload import UMA_M, UMA_S, Size, make_batches


@pytest.mark.parametrize(("size", "millions"), [(UMA_S, 146), (UMA_M, 1397)], ids=["uma-s", "uma-m"])
def test_number_of_parameters(size: Size, millions: int) -> None:
    """Design section 7. It grows linearly with the number of experts, so two small models tell."""
    one, two = (sum(p.numel() for p in size.build(experts=experts).parameters()) for experts in (1, 2))
    total = one + (size.experts - 1) * (two - one)
    assert total / 1e6 == pytest.approx(millions, rel=0.01)


def test_batches_are_the_same_every_time() -> None:
    first, again = (make_batches(2, atoms=6, graphs=2) for _ in range(2))
    assert [batch["natoms"].tolist() for batch in first] == [[8, 8], [8, 8]]
    for a, b in zip(first, again, strict=True):
        for key in ("pos", "omat_forces", "omat_energy", "graph_keys"):
            assert torch.equal(a[key], b[key])
    assert not torch.equal(first[0]["pos"], first[1]["pos"])


def test_a_large_crystal_is_a_compact_box() -> None:
    (batch,) = make_batches(1, atoms=108)
    assert batch["natoms"].tolist() == [108]
    assert torch.allclose(batch["cell"][0].diagonal(), torch.tensor(3 * 3.61))
