"""Build a model in the memory of one pipeline stage.

fairchem's constructors build all blocks. While `only_blocks` is in force, a block of another stage gives its memory
back as soon as it is built::

    block 0   build, draw, keep
    block 1   build, draw, parameters to the meta device      names, shapes and counts stay, numbers go
    block 2   ...

Every block still draws its random numbers, so that the weights that are kept are those of a single process to the bit.
MoLE layers, which replace linear ones after all blocks are built, one at a time, follow the layer they replace to its
device. The C library keeps freed memory, in pieces that the next layer does not fit into; it is told to return it.
Weights loaded into a parameter on the meta device are left out. `cut_to_stage` removes what is left of the
other stages' blocks.
"""

from __future__ import annotations

import ctypes
import functools
import inspect
import warnings
from collections.abc import Container, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from fairchem.core.models.uma import escn_md
from fairchem.core.models.uma.nn import mole_utils
from torch import nn
from torch.utils.serialization import config as serialization


@contextmanager
def only_blocks(num_blocks: int, own: Container[int]) -> Iterator[None]:
    """Within this context, backbones of `num_blocks` blocks keep the numbers of those in `own` alone.

    Other backbones (one that a fine-tuning job starts from and replaces) are built as ever. Checkpoint files are mapped
    instead of read, so that only what is copied out of them takes memory.
    """
    make_backbone, make_block = escn_md.eSCNMDBackbone.__init__, escn_md.eSCNMD_Block
    make_mole = mole_utils.MOLE
    signature = inspect.signature(make_backbone)
    skips: list[bool] = []
    """Of the blocks yet to be built, in order, whether to let go of each."""

    @functools.wraps(make_backbone)
    def init(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        bound = signature.bind(self, *args, **kwargs)
        bound.apply_defaults()
        count = bound.arguments["num_layers"]
        skips[:] = [count == num_blocks and index not in own for index in range(count)]
        make_backbone(self, *args, **kwargs)

    def build(*args: Any, **kwargs: Any) -> nn.Module:
        block = make_block(*args, **kwargs)
        if skips.pop(0):
            drop_numbers(block)
            _return_freed_memory()
        return block

    def build_mole(*args: Any, **kwargs: Any) -> nn.Module:
        _return_freed_memory()
        return make_mole(*args, **kwargs)

    with (
        patch.object(escn_md.eSCNMDBackbone, "__init__", init),
        patch.object(escn_md, "eSCNMD_Block", build),
        patch.object(mole_utils, "MOLE", build_mole),
        serialization.patch({"load.mmap": True}),
        warnings.catch_warnings(),
    ):
        warnings.filterwarnings("ignore", ".*copying from a non-meta parameter.*")
        yield
    _return_freed_memory()


def drop_numbers(module: nn.Module) -> None:
    """Move the parameters of a module to the meta device, in place; buffers, which blocks share, stay."""
    for child in module.modules():
        for name, parameter in child.named_parameters(recurse=False):
            empty = torch.empty_like(parameter, device="meta")
            setattr(child, name, nn.Parameter(empty, requires_grad=parameter.requires_grad))


def _return_freed_memory() -> None:
    """To the system, where the C library is glibc."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
