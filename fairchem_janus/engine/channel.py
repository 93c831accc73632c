"""Ordered, asynchronous messages from one stage to its neighbour.

A channel carries messages one way between two ranks. Receives are posted in the order in which the sender issues its
sends, which the schedule tells, a few ahead of need: a message that arrives early waits in its buffer. Every handle is
kept until it is waited for (Gloo hangs when one is dropped).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable

import torch
import torch.distributed as dist

from fairchem_janus.engine.messages import TensorSpec, empty_buffer, pack, unpack

PREFETCH = 2
"""Receives posted beyond the one that is needed now; each holds a buffer."""


class LostPeerError(RuntimeError):
    """A neighbour does not answer: its own error, if it could print one, is the one to look at."""


def _wait(work: dist.Work, peer: int) -> None:
    try:
        work.wait()
    except RuntimeError as error:
        raise LostPeerError(
            f"rank {peer} does not answer any more; it failed, was killed (out of memory?) or its machine is gone "
            f"({str(error).splitlines()[0]})"
        ) from error


class Outbound:
    """The sending end."""

    def __init__(self, group: dist.ProcessGroup, peer: int) -> None:
        self.group = group
        self.peer = peer
        self._pending: deque[tuple[dist.Work, torch.Tensor]] = deque()

    def send(self, tensors: list[torch.Tensor], specs: list[TensorSpec]) -> None:
        buffer = pack(tensors, specs)
        work = dist.isend(buffer, dst=self.peer, group=self.group)
        assert work is not None
        self._pending.append((work, buffer))
        while self._pending and self._pending[0][0].is_completed():
            _wait(self._pending.popleft()[0], self.peer)

    def flush(self) -> None:
        """Wait until every message has left."""
        while self._pending:
            _wait(self._pending.popleft()[0], self.peer)


class Inbound:
    """The receiving end."""

    def __init__(self, group: dist.ProcessGroup, peer: int, device: torch.device) -> None:
        self.group = group
        self.peer = peer
        self.device = device
        self._expected: deque[tuple[Hashable, list[TensorSpec]]] = deque()
        self._posted: deque[tuple[Hashable, list[TensorSpec], torch.Tensor, dist.Work]] = deque()
        self._arrived: dict[Hashable, list[torch.Tensor]] = {}

    def expect(self, messages: list[tuple[Hashable, list[TensorSpec]]]) -> None:
        """Announce the messages of a step, in the sender's order."""
        assert not (self._expected or self._posted or self._arrived), "messages left over from the previous step"
        self._expected.extend(messages)
        self._post_ahead()

    def _post_ahead(self) -> None:
        while self._expected and len(self._posted) <= PREFETCH:
            key, specs = self._expected.popleft()
            buffer = empty_buffer(specs, self.device)
            work = dist.irecv(buffer, src=self.peer, group=self.group)
            assert work is not None
            self._posted.append((key, specs, buffer, work))

    def take(self, key: Hashable) -> list[torch.Tensor]:
        """The tensors of one message, waiting for it if need be."""
        while key not in self._arrived:
            assert self._posted, f"message {key} is not among those expected"
            arrived, specs, buffer, work = self._posted.popleft()
            _wait(work, self.peer)
            self._arrived[arrived] = unpack(buffer, specs)
            self._post_ahead()
        return self._arrived.pop(key)
