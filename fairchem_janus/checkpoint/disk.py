"""Full disks, told apart from other failures.

When a disk fills up while torch writes a tensor, its zip writer, closing, raises a RuntimeError of its own (`unexpected
pos ...`) over the OSError that says why; and of an error that travels to other ranks only the outermost arrives.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.distributed.checkpoint import FileSystemWriter

_FULL = {errno.ENOSPC, errno.EDQUOT}


def disk_is_full(error: BaseException) -> bool:
    """Whether a disk or a quota is full."""
    return isinstance(error, OSError) and error.errno in _FULL


@contextmanager
def plain_disk_errors() -> Iterator[None]:
    """An error that came of a full disk leaves this context as the OSError that it was."""
    try:
        yield
    except Exception as error:
        cause: BaseException | None = error
        while cause is not None and not disk_is_full(cause):
            cause = cause.__cause__ or cause.__context__
        if isinstance(cause, OSError):
            raise OSError(cause.errno, cause.strerror) from error
        raise


class CheckpointWriter(FileSystemWriter):
    """DCP's writer to a folder, with `plain_disk_errors`."""

    def write_data(self, *args: Any, **kwargs: Any) -> Any:
        with plain_disk_errors():
            return super().write_data(*args, **kwargs)
