"""Cutting one autograd graph at the line where FF's part runs into FE's.

FF differentiates the graph that FE built, so its own graph runs into FE's at many places. BF (the backward of FF)
should stop there: BE walks FE's graph once, for the first and the second order together. PyTorch has no switch for it,
but it can be done exactly without touching the model:

- `boundary_edges` finds the edges (node, input number) by which FF's graph enters FE's;
- BF asks for the gradients that arrive at those edges. Autograd captures a gradient *before* it calls a node's
  pre-hooks, and `Barrier`, a pre-hook on each of those nodes, returns undefined gradients while BF runs, so FE's nodes
  do next to nothing;
- BE starts from the captured gradients as well as from FE's output.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch.autograd.graph import GradientEdge, Node

_LEAF = "torch::autograd::AccumulateGrad"


def reachable_nodes(tensors: Iterable[torch.Tensor]) -> set[Node]:
    """Every autograd node behind the tensors, leaves left out."""
    stack = [tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None]
    seen: set[Node] = set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        stack.extend(n for n, _ in node.next_functions if n is not None and n not in seen and n.name() != _LEAF)
    return seen


def boundary_edges(ff_outputs: Iterable[torch.Tensor], fe_nodes: set[Node]) -> list[GradientEdge]:
    """Edges by which the graph of `ff_outputs` enters `fe_nodes`, in the order of a walk (deterministic)."""
    stack = [tensor.grad_fn for tensor in ff_outputs if tensor.grad_fn is not None]
    seen: set[Node] = set()
    edges: dict[tuple[Node, int], None] = {}
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        for successor, index in node.next_functions:
            if successor is None or successor.name() == _LEAF:
                continue
            if successor in fe_nodes:
                edges[successor, index] = None
            else:
                stack.append(successor)
    return [GradientEdge(node, index) for node, index in edges]


class Barrier:
    """Pre-hook that hands its node undefined gradients while it is closed.

    It must not refer to the micro-batch: node -> hook -> micro-batch -> tensor -> node would be a cycle through C++
    that is never collected. It therefore holds its own flag and nothing else.
    """

    __slots__ = ("closed",)

    def __init__(self) -> None:
        self.closed = False

    def __call__(self, grads: tuple[torch.Tensor | None, ...]) -> tuple[None, ...] | None:
        return tuple(None for _ in grads) if self.closed else None

    def put_on(self, edges: Iterable[GradientEdge]) -> None:
        for node in {edge.node: None for edge in edges}:
            node.register_prehook(self)
