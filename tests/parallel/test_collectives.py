"""Collectives of graph parallelism: exact values, and derivatives of first and second order by finite differences."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist

from fairchem_janus.parallel.collectives import GraphGroup, exchange_rows, gather_rows, sum_over_ranks
from fairchem_janus.parallel.launch import run_on_ranks

STEP, TOLERANCE = 1e-5, 1e-8
"""Central differences in float64: an error of about STEP^2 and of 1e-16 / STEP."""

Function = Callable[[torch.Tensor, GraphGroup], torch.Tensor]


def world() -> GraphGroup:
    return GraphGroup(dist.group.WORLD, dist.get_rank(), dist.get_world_size())


def sizes(group: GraphGroup) -> list[int]:
    """Rows of each rank: 2, 3, 2, 3; the last rank of three or more has none."""
    rows = [2 + rank % 2 for rank in range(group.size)]
    return rows if group.size == 2 else [*rows[:-1], 0]


def splits(group: GraphGroup) -> tuple[list[int], list[int]]:
    """What this rank sends to and receives from each rank, nothing in places."""
    count = lambda a, b: 0 if a == b else (a + 2 * b) % 3  # noqa: E731
    ranks = range(group.size)
    return [count(group.rank, r) for r in ranks], [count(r, group.rank) for r in ranks]


def gather(x: torch.Tensor, group: GraphGroup) -> torch.Tensor:
    return gather_rows(x, sizes(group), group)


def exchange(x: torch.Tensor, group: GraphGroup) -> torch.Tensor:
    sent, received = splits(group)
    return exchange_rows(x[torch.arange(sum(sent)) % max(1, len(x))] if len(x) else x, sent, received, group)


def total(x: torch.Tensor, group: GraphGroup) -> torch.Tensor:
    return sum_over_ranks(x, group)


def everything(function: Function, x: torch.Tensor, group: GraphGroup) -> torch.Tensor:
    """This rank's part of a function of all ranks' `x` that is curved in it; the sum over the ranks is what counts."""
    y = function(x, group) / group.size
    weights = torch.arange(1.0, y.numel() + 1, dtype=y.dtype, device=y.device).view(y.shape) * (group.rank + 1)
    return (weights * y**3).sum() + (x**3).sum()


def value(function: Function, x: torch.Tensor, group: GraphGroup) -> float:
    part = everything(function, x.detach(), group)
    dist.all_reduce(part)
    return float(part)


def gradient(function: Function, x: torch.Tensor, group: GraphGroup, *, create_graph: bool = False) -> torch.Tensor:
    leaf = x if x.requires_grad else x.detach().requires_grad_()
    (found,) = torch.autograd.grad(everything(function, leaf, group), leaf, create_graph=create_graph)
    return found


def check_function(function: Function, x: torch.Tensor, group: GraphGroup) -> tuple[float, float]:
    """Largest error of the gradient, and of the gradient of <gradient, direction>, on any rank."""
    counts = [torch.zeros(1, dtype=torch.int64, device=x.device) for _ in range(group.size)]
    dist.all_gather(counts, torch.tensor([x.numel()], device=x.device))
    analytic = gradient(function, x, group).view(-1)
    direction = torch.linspace(0.5, 1.5, x.numel(), dtype=x.dtype, device=x.device).view(x.shape) * (group.rank + 1)
    leaf = x.clone().requires_grad_()
    product = (gradient(function, leaf, group, create_graph=True) * direction).sum()
    (analytic_second,) = torch.autograd.grad(product, leaf)
    numeric = torch.zeros_like(analytic)
    for rank, count in enumerate(counts):
        for place in range(int(count)):
            change = torch.zeros(x.numel(), dtype=x.dtype, device=x.device)
            if rank == group.rank:
                change[place] = STEP
            change = change.view(x.shape)
            slope = (value(function, x + change, group) - value(function, x - change, group)) / (2 * STEP)
            if rank == group.rank:
                numeric[place] = slope
    ahead, behind = (gradient(function, x + s * direction, group) for s in (STEP, -STEP))
    numeric_second = (ahead - behind) / (2 * STEP)
    first = (analytic - numeric).abs().sum() / max(1.0, float(numeric.abs().sum()))
    second = (analytic_second - numeric_second).abs().sum() / max(1.0, float(numeric_second.abs().sum()))
    errors = torch.stack([first, second])
    dist.all_reduce(errors, op=dist.ReduceOp.MAX)
    return float(errors[0]), float(errors[1])


def check_all(device_type: str = "cpu") -> dict[str, Any]:
    group = world()
    torch.manual_seed(group.rank)
    device = torch.device(device_type, group.rank) if device_type == "cuda" else torch.device("cpu")
    x = 0.3 * torch.randn(sizes(group)[group.rank], 2, dtype=torch.float64).to(device)
    fixed = 0.3 * torch.randn(3, 2, dtype=torch.float64).to(device)
    found: dict[str, Any] = {
        "gather": check_function(gather, x, group),
        "exchange": check_function(exchange, fixed, group),
        "total": check_function(total, fixed, group),
    }
    found["rows"] = gather(x, group).cpu(), x.cpu()
    found["sum"] = total(fixed, group).cpu(), fixed.cpu()
    found["exchanged"] = exchange(fixed + 10 * group.rank, group).cpu()
    return found


ON_GPUS = [
    pytest.param(G, "cuda", marks=pytest.mark.skipif(torch.cuda.device_count() < G, reason=f"needs {G} GPUs"))
    for G in (2, 4)
]


@pytest.mark.parametrize(("G", "device_type"), [(2, "cpu"), (3, "cpu"), (4, "cpu"), *ON_GPUS])
def test_values_and_derivatives_of_first_and_second_order(G: int, device_type: str) -> None:
    """Over Gloo, and over NCCL where there are GPUs."""
    ranks = run_on_ranks(check_all, device_type, world_size=G, device_type=device_type, timeout_seconds=120.0)
    for name in ("gather", "exchange", "total"):
        first, second = ranks[0][name]
        assert first <= TOLERANCE, f"{name}: gradient off by {first}"
        assert second <= TOLERANCE, f"{name}: second derivative off by {second}"
    together = torch.cat([rank["rows"][1] for rank in ranks])
    summed = torch.stack([rank["sum"][1] for rank in ranks]).sum(0)
    for receiver, rank in enumerate(ranks):
        assert torch.equal(rank["rows"][0], together)
        assert torch.equal(rank["sum"][0], ranks[0]["sum"][0])
        torch.testing.assert_close(rank["sum"][0], summed, rtol=0, atol=1e-14)
        senders = (rank["exchanged"].mean(1) / 10).round().int().tolist()
        assert senders == sorted(senders) and receiver not in senders
