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

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from omegaconf import OmegaConf

from fairchem_janus.data.gars_config import GarsConfig, reject_unknown_keys

SCHEDULES = ("wavek", "gpipe_2nd", "auto", "1f1b_2nd", "1f1b_2nd_contiguous", "hanayo_2nd")
AUTO = "auto"
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
    """Order in which a stage runs its phases (docs/schedules.md): `wavek` (waves of `wave_size` micro-batches),
    `gpipe_2nd`, `auto` (planned from the run's own first steps), or the path of a CSV file, one row a stage. For
    comparison: the unfolded baselines `1f1b_2nd`, `1f1b_2nd_contiguous` and `hanayo_2nd`."""

    wave_size: int | str | None = None
    """k of `wavek`: micro-batches issued as a unit; at most 2k are in flight. Defaults to `pipeline_size`, or what the
    caps allow. `auto`: try the most promising ones for five steps each, once per run, and keep the fastest."""

    max_in_flight: int | None = None
    """Most micro-batches with a live graph on a rank. None: no limit for a named schedule; for what `auto` chooses, 2P
    (as many as `wavek` has by default), or what `memory_budget_gib` allows."""

    max_ff_graphs: int | None = None
    """Most micro-batches with a live FF graph (FF to BF) on a rank. None: no limit."""

    memory_budget_gib: float | None = None
    """Memory of a rank in GiB that `auto` plans within: parameters, gradients, optimizer state, moving average, and
    the graphs of the micro-batches in flight, as measured in the run's first steps. None: no limit."""

    partition: list[int] | None = None
    """Blocks of each stage, for example [5, 6, 6, 5]. None: evenly. `fairchem-janus plan` proposes one."""

    profile_steps: int = 3
    """Steps, after the first, in which every phase is timed and its memory measured for `profile.json` in the run
    folder and for what `auto` chooses. It changes no result. 0: none."""

    trace: bool = False
    """Write one step as it really ran to the run folder (text, PNG and Perfetto trace): the second one with the
    schedule that the run keeps."""

    split: str = "merged"
    """How the second backward is divided between BF and BE: `merged` (BE walks the energy graph once, for both
    orders) or `eager` (BF walks it too). Both are exact; `merged` is faster."""

    oversize: str = "warn"
    """Graphs that the sampler's budget (`max_atoms`) keeps out: `warn` (count them, list their ids in the run folder)
    or `error`."""

    on_nan: str = "error"
    """NaN or Inf in labels, predictions, loss or gradients: `error` (end the job, naming the graphs) or `skip` (leave
    the step out on every rank and note its graphs in `bad_samples.csv` in the run folder)."""

    gars: GarsConfig | None = None
    """Form and pack the training loader's global batches by GARS instead of grouping batches of the job's own sampler;
    then `num_micro_batches` is the number of bins of a replica. See `GarsConfig` (docs/packing.md)."""

    prefetch_steps: int | None = None
    """Optimizer steps that each loader worker loads ahead, where the job has workers (`num_workers`). Default 2."""

    debug_checksums: bool = False
    """Compare a checksum of every batch over the ranks of a replica. Costs one small all-gather a step."""

    def __post_init__(self) -> None:
        for name in ("pipeline_size", "num_micro_batches", "max_in_flight", "max_ff_graphs", "prefetch_steps"):
            self._check_positive(name)
        self._check_schedule()
        for name, choices in (("split", SPLITS), ("oversize", OVERSIZE), ("on_nan", ON_NAN)):
            value = getattr(self, name)
            if value not in choices:
                raise ValueError(f"janus.{name} must be one of {', '.join(choices)}, got {value!r}")
        for name in ("debug_checksums", "trace"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"janus.{name} must be true or false, got {getattr(self, name)!r}")
        if self.num_micro_batches is None:
            if self.pipeline_size > 1:
                raise ValueError(
                    f"janus.num_micro_batches is required when janus.pipeline_size is {self.pipeline_size}: it says "
                    "how many of the sampler's batches make one optimizer step. Set for example "
                    f"+runner.janus.num_micro_batches={2 * self.pipeline_size} (more micro-batches, smaller bubble)"
                )
            self.num_micro_batches = 1
        if self.wave_size is None:
            caps = [cap // 2 for cap in (self.max_in_flight, self.max_ff_graphs) if cap is not None]
            self.wave_size = max(1, min([self.pipeline_size, *caps]))

    def _check_schedule(self) -> None:
        """What a schedule, its caps and its partition are made from, as far as it can be told without the model."""
        if self.schedule not in SCHEDULES and not str(self.schedule).endswith(".csv"):
            raise ValueError(
                f"janus.schedule must be one of {', '.join(SCHEDULES)}, or the path of a .csv file, got "
                f"{self.schedule!r}"
            )
        if self.wave_size != AUTO:
            self._check_positive("wave_size")
        elif self.schedule != "wavek":
            raise ValueError(f"janus.wave_size=auto chooses k of schedule wavek, but janus.schedule={self.schedule}")
        budget = self.memory_budget_gib
        if budget is not None and (isinstance(budget, bool) or not isinstance(budget, (int, float)) or not budget > 0):
            raise ValueError(f"janus.memory_budget_gib must be a positive number, got {budget!r}")
        if budget is not None and not self.chooses:
            raise ValueError(
                f"janus.memory_budget_gib is for schedule auto or wave_size auto; janus.schedule={self.schedule} is "
                "kept whatever it takes. Limit it with janus.max_in_flight"
            )
        steps = self.profile_steps
        if not isinstance(steps, int) or isinstance(steps, bool) or steps < self.chooses:
            least = "1 for what `auto` chooses" if self.chooses else "0"
            raise ValueError(f"janus.profile_steps must be an integer of at least {least}, got {steps!r}")
        if self.partition is not None:
            counts = list(self.partition) if isinstance(self.partition, Sequence) else [self.partition]
            if isinstance(self.partition, str) or not all(type(count) is int for count in counts):
                raise ValueError(
                    f"janus.partition must be a list of integers such as [5, 6, 6, 5], got {self.partition!r}"
                )
            self.partition = counts

    @property
    def chooses(self) -> bool:
        """Whether the run chooses its schedule itself, from measurements."""
        return AUTO in (self.schedule, self.wave_size)

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
        if block is not None and not isinstance(block, Mapping) and not OmegaConf.is_dict(block):
            raise ValueError(
                f"janus must be a block of keys such as {{pipeline_size: 2, num_micro_batches: 4}}, got {block!r}"
            )
        values = dict(block or {})
        reject_unknown_keys(values, [field.name for field in fields(cls)], prefix="janus")
        if values.get("gars") is not None:
            values["gars"] = GarsConfig.from_mapping(values["gars"])
        return cls(**values)
