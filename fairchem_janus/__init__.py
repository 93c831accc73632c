"""Pipeline-parallel training of conservative interatomic potentials, as a fairchem runner.

A conservative potential gets its forces as gradients of the energy, so a training step differentiates twice.
`fairchem_janus` runs such a step as four phases per micro-batch and pipeline stage (FE energy forward, FF force
forward, BF backward of FF, BE backward of FE) underneath the ordinary fairchem training job::

    fairchem -c job.yaml runner._target_=fairchem_janus.JanusRunner +runner._recursive_=false \\
        +runner.janus.pipeline_size=2 +runner.janus.num_micro_batches=4 ++job.scheduler.ranks_per_node=2

The package imports fairchem and torch only when something that needs them is used, so that planning tools such as
`fairchem-janus simulate` start at once.
"""

from __future__ import annotations

import importlib
from importlib import metadata
from typing import Any

__version__ = "0.1.0"

BUILT_FOR = {"fairchem-core": "2.24", "torch": "2.13"}
"""Distribution -> `major.minor` this release was written and tested against."""

_LAZY = {
    "JanusRunner": "fairchem_janus.runner",
    "JanusTrainEvalUnit": "fairchem_janus.unit",
    "JanusConfig": "fairchem_janus.config",
}

__all__ = ["BUILT_FOR", "JanusConfig", "JanusRunner", "JanusTrainEvalUnit", "__version__"]


def _check_versions() -> None:
    """Raise ImportError if fairchem or torch is missing or of a version this release was not built for."""
    for distribution, wanted in BUILT_FOR.items():
        try:
            found = metadata.version(distribution)
        except metadata.PackageNotFoundError:
            raise ImportError(
                f"fairchem-janus {__version__} needs {distribution} {wanted}.*, which is not installed; "
                f"run: pip install '{distribution}=={wanted}.*'"
            ) from None
        if found.split("+")[0].split(".")[:2] != wanted.split("."):
            raise ImportError(
                f"fairchem-janus {__version__} was built for {distribution} {wanted}.*, but {found} is installed; "
                f"its engine relies on internals that change between releases. "
                f"Run: pip install '{distribution}=={wanted}.*'"
            )


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


_check_versions()
