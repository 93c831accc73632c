"""Whether fairchem can compose a member's configuration, found out with its own function before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from fairchem_janus.sweep.state import shortened


def composition_error(job_file: Path, overrides: Sequence[str]) -> str | None:
    """What `fairchem -c JOB_FILE OVERRIDES` would end with before it runs anything, on one line; None: nothing."""
    from fairchem.core._cli import get_hydra_config_from_yaml  # takes seconds, the first time

    try:
        get_hydra_config_from_yaml(str(job_file), list(overrides))
    except Exception as error:  # Hydra's, OmegaConf's, YAML's, ...: the command ends with any of them
        return _message(error)
    return None


def _message(error: Exception) -> str:
    """Without Hydra's list of folders and OmegaConf's line on the type of a node."""
    lines = str(error).partition("Config search path:")[0].splitlines()
    return shortened([line for line in lines if "object_type=" not in line]) or type(error).__name__
