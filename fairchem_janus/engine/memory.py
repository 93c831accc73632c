"""Bytes in use, without hooks: what the allocator counts.

On CUDA torch's caching allocator counts what it gave out (`torch.cuda.memory_allocated`). On the CPU torch allocates
with malloc, and glibc counts: `mallinfo2` sums what is handed out over all arenas and mapped blocks, in 2 microseconds
and to the byte (a tensor of 4,000,000 bytes moves it by 4,000,064). The resident set would not do: it does not shrink
when a tensor is freed. Hooks on saved tensors would not either: they displace those of activation checkpointing.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch

_FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class _Mallinfo2(ctypes.Structure):
    """`struct mallinfo2` of glibc 2.33 and newer; `uordblks` are bytes in use, `hblkhd` those in mapped blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in _FIELDS]


@lru_cache(maxsize=1)
def _mallinfo2() -> Any:
    """The C function, or None where the C library has none (musl, glibc before 2.33)."""
    try:
        function = ctypes.CDLL(None).mallinfo2
    except AttributeError:
        return None
    function.restype = _Mallinfo2
    return function


def allocated_bytes(device: torch.device) -> int:
    """Bytes handed out at this moment on the device; 0 on a CPU whose C library does not tell."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    function = _mallinfo2()
    if function is None:
        return 0
    info = function()
    return info.uordblks + info.hblkhd


def tensor_bytes(values: Iterable[Any]) -> int:
    """Bytes of the tensors among `values`, storage that several share counted once."""
    storages = {}
    for value in values:
        if isinstance(value, torch.Tensor):
            storage = value.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())
