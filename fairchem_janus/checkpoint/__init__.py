"""Checkpoints that move anywhere: any (P, G, D), and plain fairchem, in both directions.

A checkpoint is a folder of torch's distributed checkpoint format (DCP) with the names of the unsplit model, as plain
fairchem writes it::

    step_100/
      .metadata            what is stored where
      __0_0.distcp ...     unit_state.model.*, .ema.*, .optim.*, .scheduler.*, .progress.*, and our own .janus.*
      resume.yaml          the job, with runner_state_path set to this folder
      inference_ckpt.pt    the averaged weights, for FAIRChemCalculator

- `state.py`: what a rank contributes, and how it takes it back;
- `optimizer.py`: the optimizer's part, by parameter name;
- `contents.py`: whether a checkpoint has what a job needs;
- `progress.py`: how far into an epoch a run was, in units that do not depend on D and N;
- `random_state.py`: the random generators of each rank;
- `folder.py`: a folder that is complete or not there;
- `disk.py`: full disks, told apart from other failures;
- `export.py`: the inference checkpoint.
"""

from __future__ import annotations

from fairchem_janus.checkpoint.folder import save_checkpoint
from fairchem_janus.checkpoint.random_state import RandomState
from fairchem_janus.checkpoint.state import load_checkpoint, load_unit_state, unit_state

__all__ = ["RandomState", "load_checkpoint", "load_unit_state", "save_checkpoint", "unit_state"]
