"""`LiveBytes` counts every storage that is alive, once."""

from __future__ import annotations

import torch

from fairchem_janus.bench.live import LiveBytes

SIDE = 100
ONE = SIDE * SIDE * 4
"""Bytes of one float32 matrix."""


def matrix() -> torch.Tensor:
    return torch.ones(SIDE, SIDE, requires_grad=True)


def test_graphs_are_counted_until_they_are_freed() -> None:
    x, w = matrix(), matrix()  # made before: not counted
    with LiveBytes() as live:
        y = (x @ w).tanh().sin()  # tanh keeps its result, sin its argument, which is the same tensor; and y itself
        assert live.total == 2 * ONE
        (g,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        with_second_graph = live.total
        assert with_second_graph > 3 * ONE
        g.square().sum().backward()
        assert live.total >= 2 * ONE  # the gradients of x and w
        del y, g
    assert live.total == 2 * ONE
    x.grad = w.grad = None
    assert live.total == 0
    assert live.peak >= with_second_graph


def test_views_and_writes_in_place_are_not_counted_again() -> None:
    with LiveBytes() as live:
        x = torch.zeros(SIDE, SIDE)
        x.view(-1)[3:].add_(1.0)
        torch.add(x, 1.0, out=x)
        kept = [x.detach(), x.t(), x[0]]
        assert live.total == ONE
        del x
        assert live.total == ONE
        del kept
        assert live.total == 0


def test_storage_that_reuses_an_address_is_counted() -> None:
    with LiveBytes() as live:
        for _ in range(100):
            x = torch.zeros(SIDE, SIDE)
            assert live.total == ONE
            del x
            assert live.total == 0
    assert live.peak == ONE
