"""The checkpoint that a run goes on from, and how many steps it has done."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any


def latest_checkpoint(folder: Path) -> Path | None:
    """The youngest complete checkpoint in a run folder, which is what fairchem resumes from; None if there is none."""
    complete = [metadata.parent for metadata in (folder / "checkpoints").glob("*/.metadata")]
    return max(complete, key=lambda checkpoint: checkpoint.stat().st_mtime, default=None)


def num_steps(checkpoint: Path) -> int | None:
    """The optimizer steps that a checkpoint, janus's or plain fairchem's, has behind it; None if it cannot be read.

    The name tells only for some: `final` and `preemption_state` have no number.
    """
    import torch.distributed.checkpoint as dcp  # takes seconds, the first time
    from torch.distributed.checkpoint.api import CheckpointException

    progress: dict[str, Any] = {"num_steps_completed": None}
    try:
        with warnings.catch_warnings(action="ignore"):  # that there is but one process
            dcp.load({"unit_state": {"progress": progress}}, checkpoint_id=checkpoint, no_dist=True)
    except (Exception, CheckpointException):  # the latter is no Exception
        return None
    return progress["num_steps_completed"]
