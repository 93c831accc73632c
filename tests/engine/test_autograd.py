"""The cut between FF's graph and FE's, on toy graphs: exact, does no work beyond it, and leaves nothing alive."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd.graph import GradientEdge

from fairchem_janus.engine.autograd import Barrier, boundary_edges, reachable_nodes
from tests.builders import saved_tensors

EXACT = 1e-13  # float64; a few sums taken in another order


class Watched(torch.autograd.Function):
    """Identity that counts the gradients that really arrive, as fairchem's collectives would send traffic for them."""

    calls: list[bool]

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        Watched.calls.append(grad is not None)
        return None if grad is None else Watched.apply(grad)


class Toy:
    """FE: out = f(x; w), with sharing, a branch without a gradient and products. FF: g = d out / dx."""

    def __init__(self, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        make = {"generator": generator, "dtype": torch.float64}
        self.w = [torch.randn(4, 4, **make).requires_grad_() for _ in range(3)]
        self.x = torch.randn(5, 4, **make).requires_grad_()
        self.v, self.u = torch.randn(5, 4, **make), torch.randn((), **make)
        first = Watched.apply((self.x @ self.w[0]).sin())
        second = (first @ self.w[1]).tanh() * first
        self.out = ((second @ self.w[2]) * self.x).sum() + (second**3).sum()
        self.fe_nodes = reachable_nodes([self.out])
        (self.g,) = torch.autograd.grad(self.out, self.x, create_graph=True)

    @property
    def leaves(self) -> list[torch.Tensor]:
        return [self.x, *self.w]

    def reference(self) -> list[torch.Tensor]:
        """Gradients of <v, g> + u * out in one backward."""
        loss = (self.v * self.g).sum() + self.u * self.out
        return list(torch.autograd.grad(loss, self.leaves, retain_graph=True))

    def split(self) -> tuple[list[torch.Tensor | None], list[torch.Tensor | None]]:
        """The same in two: BF up to the cut, then BE over FE's graph."""
        edges = boundary_edges([self.g], self.fe_nodes)
        barrier = Barrier()
        barrier.put_on(edges)
        barrier.closed = True
        found = torch.autograd.grad([self.g], [*self.leaves, *edges], [self.v], retain_graph=True, allow_unused=True)
        barrier.closed = False
        captured = [(e, g) for e, g in zip(edges, found[len(self.leaves) :], strict=True) if g is not None]
        outputs: list[Any] = [self.out, *(edge for edge, _ in captured)]
        be = torch.autograd.grad(outputs, self.leaves, [self.u, *(g for _, g in captured)], allow_unused=True)
        return list(found[: len(self.leaves)]), list(be)


@pytest.fixture(autouse=True)
def fresh_calls() -> None:
    Watched.calls = []


def test_two_parts_give_the_gradient_of_one_backward() -> None:
    toy = Toy()
    expected = toy.reference()
    bf, be = toy.split()
    for first, second, whole in zip(bf, be, expected, strict=True):
        parts = [part for part in (first, second) if part is not None]
        torch.testing.assert_close(sum(parts), whole, rtol=EXACT, atol=EXACT)


def test_the_first_part_does_no_work_in_the_energy_graph() -> None:
    toy = Toy()
    Watched.calls = []
    toy.reference()
    assert Watched.calls.count(True) == 2  # the forces' copy of the node, then the node itself
    Watched.calls = []
    edges = boundary_edges([toy.g], toy.fe_nodes)
    barrier = Barrier()
    barrier.put_on(edges)
    barrier.closed = True
    torch.autograd.grad([toy.g], edges, [toy.v], retain_graph=True, allow_unused=True)
    assert Watched.calls.count(True) == 1  # the forces' copy alone


def test_an_open_barrier_changes_nothing() -> None:
    toy = Toy()
    expected = toy.reference()
    barrier = Barrier()
    barrier.put_on(boundary_edges([toy.g], toy.fe_nodes))
    for found, before in zip(toy.reference(), expected, strict=True):
        assert torch.equal(found, before)


def test_the_energy_graph_is_what_lies_behind_its_output_without_leaves() -> None:
    x = torch.ones(2, requires_grad=True)
    y = x.sin()
    z = (y * y.detach()).sum()
    names = sorted(node.name() for node in reachable_nodes([z]))
    assert names == ["MulBackward0", "SinBackward0", "SumBackward0"]
    assert reachable_nodes([x, y.detach()]) == set()


def test_edges_come_in_the_same_order_every_time() -> None:
    """Captured gradients are matched to edges by their place."""
    first, second = (
        [(edge.node.name(), edge.output_nr) for edge in boundary_edges([toy.g], toy.fe_nodes)] for toy in (Toy(), Toy())
    )
    assert first == second
    assert len(first) > 2


def test_an_edge_is_listed_once_however_often_it_is_used() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x.sin()
    nodes = reachable_nodes([y])
    edges = boundary_edges([y * y, y.cos(), y], nodes)
    assert [(edge.node, edge.output_nr) for edge in edges] == [(y.grad_fn, 0)]


def test_forces_that_do_not_touch_the_energy_graph_have_no_boundary() -> None:
    """A linear energy has a constant gradient."""
    x = torch.ones(3, requires_grad=True)
    y = (2.0 * x).sum()
    nodes = reachable_nodes([y])
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    assert boundary_edges([g], nodes) == []


class Context:
    """Stands for a micro-batch."""

    def __init__(self) -> None:
        self.toy = Toy()
        self.edges: list[GradientEdge] = boundary_edges([self.toy.g], self.toy.fe_nodes)
        self.barrier: Any = Barrier()


class LeakyBarrier(Barrier):
    """A hook that knows its micro-batch."""

    __slots__ = ("context",)


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_nothing_outlives_its_micro_batch(without_gc: None) -> None:
    """By reference counts alone: no cycle is left for the garbage collector either."""
    with saved_tensors() as saved:
        context = Context()
        context.barrier.put_on(context.edges)
        context.toy.split()
        alive = [weakref.ref(x) for x in (context, context.toy, context.toy.out, context.toy.g)]
        assert len(saved) > 0
        del context
        assert [reference() is None for reference in alive] == [True] * 4
        assert len(saved) == 0


def test_a_hook_that_held_its_micro_batch_would_keep_it_for_ever() -> None:
    """Why a `Barrier` holds a flag and nothing else: the cycle runs through C++, where no collector looks."""
    context = Context()
    context.barrier = LeakyBarrier()
    context.barrier.context = context
    context.barrier.put_on(context.edges)
    alive = weakref.ref(context)
    leaked = context.barrier
    del context
    gc.collect()
    assert alive() is not None
    leaked.context = None  # clean up
    assert alive() is None


def test_a_barrier_can_hold_nothing_but_its_flag() -> None:
    assert Barrier.__slots__ == ("closed",)
    with pytest.raises(AttributeError):
        Barrier().context = object()  # type: ignore[attr-defined]
