"""The inference checkpoint: fairchem's own `inference_ckpt.pt`, made with less memory.

fairchem's `convert_train_checkpoint_to_inference_checkpoint` reads the whole training checkpoint and writes it to disk
once more on the way. Here only weights, averaged weights and the configuration are read, which is half of it for Adam.
"""

from __future__ import annotations

import os

import torch
from fairchem.core.units.mlip_unit.api.inference import MLIPInferenceCheckpoint
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict

from fairchem_janus.checkpoint.disk import plain_disk_errors

KEYS = {"unit_state.model", "unit_state.ema", "config"}


def write_inference_checkpoint(checkpoint: str, path: str) -> None:
    """Write `path` from a training checkpoint's folder; for one rank.

    Raises:
        OSError: it cannot be written.
    """
    held: dict = {}
    reader, planner = FileSystemReader(checkpoint), _EmptyStateDictLoadPlanner(keys=KEYS)
    _load_state_dict(held, storage_reader=reader, planner=planner, no_dist=True)  # as torch's dcp_to_torch_save
    unit = held["config"]["runner"]["train_eval_unit"]
    inference = MLIPInferenceCheckpoint(
        model_state_dict=held["unit_state"]["model"],
        ema_state_dict=held["unit_state"]["ema"],
        model_config=unit["model"],
        tasks_config=unit["tasks"],
    )
    with plain_disk_errors(), open(path, "wb") as file:  # given a path, torch would say less of a failure
        torch.save(inference, file)
        file.flush()
        os.fsync(file.fileno())
