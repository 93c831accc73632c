"""Collectives of graph parallelism that can be differentiated any number of times, and what they cost.

Everything that crosses ranks inside a forward is linear, and each is the adjoint of another one here::

    gather rows of all ranks     <->  sum rows over the ranks, keep the own ones
    exchange chosen rows         <->  exchange them back
    sum over the ranks           <->  sum over the ranks

so a backward is a forward of the partner, to any order, on any backend. The first two are one `all_to_all_single` each:
no padding, no branch for a backend, and a sum in the order of the ranks, the same on all of them.

fairchem's own functions (`gp_utils`, `graph_parallel_a2a`) give the same numbers, but turn undefined gradients into
zeros and run on them. In a pipeline's BF, whose walk ends where FF's graph enters FE's (`engine/autograd.py`), every
exchange of FE would then send zeros: twice the halo traffic. Here an undefined gradient stays undefined and nothing is
sent. All ranks of a group see the same graph of operations, so they agree on what is undefined.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from fairchem_janus.parallel.marks import Mark, mark, seconds

LinearFunction = Callable[[torch.Tensor], torch.Tensor]


class Exchange(NamedTuple):
    """One collective on this rank: what it ran for, the bytes this rank sent to others, and when."""

    label: Any
    num_bytes: int
    start: Mark
    end: Mark


class HaloMeter:
    """Counts the collectives of one step.

    Attributes:
        label: (phase or `gate`, micro-batch) that runs now; each collective is noted under it.
    """

    def __init__(self) -> None:
        self.label: Any = None
        self.exchanges: list[Exchange] = []

    def reset(self) -> None:
        """A new step starts."""
        self.exchanges = []

    @property
    def num_bytes(self) -> int:
        """Bytes that this rank sent."""
        return sum(exchange.num_bytes for exchange in self.exchanges)

    @property
    def seconds(self) -> float:
        """Time in collectives, waiting for the other ranks included."""
        return sum(seconds(exchange.start, exchange.end) for exchange in self.exchanges)

    def by_label(self) -> dict[Any, tuple[int, int, float]]:
        """(number, bytes, seconds) of the collectives noted under each label."""
        found: dict[Any, tuple[int, int, float]] = {}
        for label, num_bytes, start, end in self.exchanges:
            count, total, time = found.get(label, (0, 0, 0.0))
            found[label] = count + 1, total + num_bytes, time + seconds(start, end)
        return found


@dataclass(frozen=True, slots=True)
class GraphGroup:
    """The G ranks that share a micro-batch, as a collective sees them.

    Attributes:
        group: None for a group of one rank, where every collective is the identity.
    """

    group: dist.ProcessGroup | None
    rank: int
    size: int
    meter: HaloMeter = field(default_factory=HaloMeter)

    def run(self, collective: Callable[[], None], like: torch.Tensor, num_bytes: int) -> None:
        start = mark(like.device)
        collective()
        self.meter.exchanges.append(Exchange(self.meter.label, num_bytes, start, mark(like.device)))


def gather_rows(x: torch.Tensor, sizes: Sequence[int], group: GraphGroup) -> torch.Tensor:
    """Rows of all ranks, in the order of the ranks.

    Args:
        x: this rank's rows [sizes[rank], ...].
        sizes: number of rows of every rank.
    """
    own = [sizes[group.rank]] * group.size

    def gather(x: torch.Tensor) -> torch.Tensor:
        everywhere = x.expand(group.size, *x.shape).reshape(-1, *x.shape[1:])
        return _all_to_all(everywhere, own, sizes, group)

    def sum_own(x: torch.Tensor) -> torch.Tensor:
        parts = _all_to_all(x, sizes, own, group)
        return parts.view(group.size, own[0], *x.shape[1:]).sum(0)

    return _Linear.apply(x, gather, sum_own)


def exchange_rows(
    x: torch.Tensor, send_splits: Sequence[int], receive_splits: Sequence[int], group: GraphGroup
) -> torch.Tensor:
    """Send consecutive rows of `x` to each rank, `send_splits` of them; returns those received, in rank order."""
    return _Linear.apply(
        x,
        lambda x: _all_to_all(x, send_splits, receive_splits, group),
        lambda x: _all_to_all(x, receive_splits, send_splits, group),
    )


def sum_over_ranks(x: torch.Tensor, group: GraphGroup) -> torch.Tensor:
    """The sum of every rank's `x`; each rank uses it by itself, so its gradient is summed as well."""

    def total(x: torch.Tensor) -> torch.Tensor:
        result = x.contiguous().clone()
        num_bytes = 2 * (group.size - 1) * result.numel() * result.element_size() // group.size  # of a ring
        group.run(lambda: dist.all_reduce(result, group=group.group), result, num_bytes)
        return result

    return _Linear.apply(x, total, total)


def _all_to_all(x: torch.Tensor, send: Sequence[int], receive: Sequence[int], group: GraphGroup) -> torch.Tensor:
    out = x.new_empty((sum(receive), *x.shape[1:]))
    x = x.contiguous()
    row = x[:1].numel() * x.element_size() if x.shape[0] else 0
    sent = (sum(send) - send[group.rank]) * row
    group.run(
        lambda: dist.all_to_all_single(out, x, list(receive), list(send), group=group.group), x, sent
    )  # not asynchronous: what follows needs it
    return out


class _Linear(torch.autograd.Function):
    """A linear function and its adjoint, each the other's derivative; what is undefined stays undefined."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, function: LinearFunction, adjoint: LinearFunction) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.function, ctx.adjoint = function, adjoint
        return function(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> Any:
        return None if grad is None else _Linear.apply(grad, ctx.adjoint, ctx.function), None, None
