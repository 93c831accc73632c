"""The `janus` block of a job file: every knob, its default and its validation.

::

    runner:
      _target_: fairchem_janus.JanusRunner
      _recursive_: false
      janus:
        pipeline_size: 2
        num_micro_batches: 4

Everything a user can get wrong here raises `ValueError` naming the key and the fix, before a model is built.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

SCHEDULES = ("wavek", "gpipe_2nd")
SPLITS = ("merged", "eager")
OVERSIZE = ("warn", "error")
ON_NAN = ("error", "skip")


@dataclass(kw_only=True, slots=True)
class JanusConfig:
    """Settings of the pipeline engine; see each field."""

    pipeline_size: int = 1
    """P, pipeline stages per replica. The world holds D * P * G ranks; D follows from the number of ranks."""

    num_micro_batches: int | None = None
    """N, micro-batches per replica and optimizer step: N consecutive batches of the job's own sampler make a step.
    Defaults to 1 when `pipeline_size` is 1 and must be given otherwise."""

    schedule: str = "wavek"
    """Order in which a stage runs its phases: `wavek` (waves of `wave_size` micro-batches) or `gpipe_2nd`."""

    wave_size: int | None = None
    """k of `wavek`: micro-batches issued as a unit. Defaults to `pipeline_size`; at most 2k are in flight."""

    split: str = "merged"
    """How the second backward is divided between BF and BE: `merged` (BE walks the energy graph once, for both
    orders) or `eager` (BF walks it too). Both are exact; `merged` is faster."""

    oversize: str = "warn"
    """Graphs that the sampler's `max_atoms` keeps out: `warn` (count them, list their ids in the run folder) or
    `error`."""

    on_nan: str = "error"
    """NaN or Inf in labels, predictions, loss or gradients: `error` (end the job, naming the graphs) or `skip` (leave
    the step out on every rank and note its graphs in `bad_samples.csv` in the run folder)."""

    debug_checksums: bool = False
    """Compare a checksum of every batch over the ranks of a replica. Costs one small all-gather a step."""

    def __post_init__(self) -> None:
        for name in ("pipeline_size", "num_micro_batches", "wave_size"):
            self._check_positive(name)
        for name, choices in (("schedule", SCHEDULES), ("split", SPLITS), ("oversize", OVERSIZE), ("on_nan", ON_NAN)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"janus.{name} must be one of {', '.join(choices)}, got {value!r}")
        if not isinstance(self.debug_checksums, bool):
            raise ValueError(f"janus.debug_checksums must be true or false, got {self.debug_checksums!r}")
        if self.num_micro_batches is None:
            if self.pipeline_size > 1:
                raise ValueError(
                    f"janus.num_micro_batches is required when janus.pipeline_size is {self.pipeline_size}: it says "
                    "how many of the sampler's batches make one optimizer step. Set for example "
                    f"+runner.janus.num_micro_batches={2 * self.pipeline_size} (more micro-batches, smaller bubble)"
                )
            self.num_micro_batches = 1
        if self.wave_size is None:
            self.wave_size = self.pipeline_size

    def _check_positive(self, name: str) -> None:
        value = getattr(self, name)
        if value is None and name != "pipeline_size":
            return
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"janus.{name} must be an integer of at least 1, got {value!r}")

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any] | None) -> JanusConfig:
        """Build from the `janus` block of a job file (a dict, a DictConfig or None).

        Raises:
            ValueError: an unknown key (with the nearest known one) or a value out of range.
        """
        values = dict(block or {})
        known = [field.name for field in fields(cls)]
        for key in values:
            if key not in known:
                near = difflib.get_close_matches(str(key), known, n=1)
                hint = f"did you mean janus.{near[0]}?" if near else f"known keys: {', '.join(known)}"
                raise ValueError(f"unknown key janus.{key}; {hint}")
        return cls(**values)
