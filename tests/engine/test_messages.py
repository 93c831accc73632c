"""What travels between stages: both ends know the shapes, and bytes arrive as they left."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fairchem_janus.engine.messages import TensorSpec, empty_buffer, message_specs, pack, unpack
from fairchem_janus.model.stage import ModelShape
from fairchem_janus.schedule import Phase
from fairchem_janus.verify.trace import cast_batch
from tests.builders import LocalPipeline, tiny_batch

F32, F64 = torch.float32, torch.float64
ATOMS, GRAPHS = 7, 2


def specs(phase: Phase, dtype: torch.dtype, **shape: Any) -> list[TensorSpec]:
    model = ModelShape(**{"sph": 9, "channels": 8, "num_experts": 0, "forces": True, "stress": True} | shape)
    return message_specs(phase, cast_batch(tiny_batch([3, 4]), dtype), model)


@pytest.mark.parametrize("phase", [Phase.FE, Phase.BE])
def test_energy_phases_send_the_embedding_and_what_the_root_made(phase: Phase) -> None:
    h, csd, coefficients = ((ATOMS, 9, 8), F32), ((GRAPHS, 8), F32), ((GRAPHS, 4), F32)
    assert specs(phase, F32) == [h, csd]
    assert specs(phase, F32, num_experts=4) == [h, csd, coefficients]


@pytest.mark.parametrize("phase", [Phase.FF, Phase.BF])
def test_force_phases_send_energies_in_double_precision_first(phase: Phase) -> None:
    energy, h, pos, cell = ((GRAPHS,), F64), ((ATOMS, 9, 8), F32), ((ATOMS, 3), F32), ((GRAPHS, 3, 3), F32)
    assert specs(phase, F32) == [energy, h, pos, cell]
    assert specs(phase, F32, stress=False) == [energy, h, pos]
    assert specs(phase, F32, stress=False, forces=False) == [energy]


@pytest.mark.parametrize("dtype", [F32, F64])
@pytest.mark.parametrize("phase", list(Phase))
def test_a_message_arrives_bit_for_bit(phase: Phase, dtype: torch.dtype) -> None:
    wanted = specs(phase, dtype, num_experts=3)
    sent = [torch.randn(spec.shape, dtype=spec.dtype) for spec in wanted]
    buffer = pack(sent, wanted)
    assert buffer.dtype == torch.uint8
    assert buffer.shape == empty_buffer(wanted, torch.device("cpu")).shape
    received = unpack(buffer, wanted)
    for before, after in zip(sent, received, strict=True):
        assert after.dtype == before.dtype
        assert torch.equal(after, before)


def test_an_odd_number_of_single_precision_values_does_not_misalign_what_follows() -> None:
    wanted = [TensorSpec((3,), F64), TensorSpec((5, 1), F32), TensorSpec((1,), F32)]
    sent = [torch.arange(3.0, dtype=F64), torch.arange(5.0).view(5, 1), torch.tensor([9.0])]
    assert [t.flatten().tolist() for t in unpack(pack(sent, wanted), wanted)] == [[0, 1, 2], [0, 1, 2, 3, 4], [9]]


def test_values_of_another_type_are_cast_and_strided_ones_straightened() -> None:
    wanted = [TensorSpec((2, 3), F32)]
    sent = torch.arange(6.0, dtype=torch.float64).view(3, 2).T.requires_grad_()
    (received,) = unpack(pack([sent], wanted), wanted)
    assert not received.requires_grad
    assert torch.equal(received, sent.detach().float())


def test_a_tensor_of_another_shape_never_leaves() -> None:
    with pytest.raises(AssertionError, match=r"message tensor of shape \(2, 3\), not \(3, 2\)"):
        pack([torch.zeros(2, 3)], [TensorSpec((3, 2), F32)])
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        pack([torch.zeros(2), torch.zeros(2)], [TensorSpec((2,), F32)])


@pytest.mark.parametrize("experts", [0, 4])
@pytest.mark.parametrize("sizes", [[3, 4], [1], [1, 1, 1]], ids=str)
def test_every_message_of_a_step_has_the_shapes_that_both_ends_expect(experts: int, sizes: list[int]) -> None:
    """`pack` refuses any other; single atoms, which have no edges, included."""
    pipeline = LocalPipeline(3, experts=experts)
    pipeline.step(lambda: [tiny_batch(sizes)])
    assert all(gradient.isfinite().all() for gradient in pipeline.gradients().values())
