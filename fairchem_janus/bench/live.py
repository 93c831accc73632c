"""Bytes of the tensors that are alive, exactly, on any device.

`LiveBytes` sees every tensor that an operation returns (a dispatch mode: forward, backward and double backward alike),
and counts each storage once, from then until it is freed (a weak reference to the storage tells). What autograd keeps
for a backward, what the engine keeps between phases and what a message waits in are all such storages, so nothing need
know where it is held, and plain fairchem is counted the same way. What existed before (parameters, optimizer state,
gradient buffers, the batch as it was loaded) is not counted.

    with LiveBytes() as live:
        loss = model(batch)
        print(live.total)   # the graph, and the loss
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts while it is entered, and follows what it has seen afterwards too.

    Attributes:
        total: bytes alive now.
        peak: most that were alive at once, temporaries inside an operator's backward included.
    """

    def __init__(self) -> None:
        super().__init__()
        self.total = 0
        self.peak = 0
        self._seen: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            # an operation that writes in place, or makes a view, returns storage that it was given
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in given:
                self._see(tensor.untyped_storage())
        return result

    def _see(self, storage: torch.UntypedStorage) -> None:
        address, size = storage._cdata, storage.nbytes()
        if address in self._seen:
            return
        self._seen[address] = size
        self.total += size
        self.peak = max(self.peak, self.total)
        weakref.finalize(storage, self._forget, address)

    def _forget(self, address: int) -> None:
        self.total -= self._seen.pop(address)
