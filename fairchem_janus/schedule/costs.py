"""What the simulator and the planner must know about a job: times, messages and memory.

Units are free as long as they agree: one unit of time for all times, one unit of size for all sizes, bandwidth in
sizes per time. A job's measured profile uses seconds and bytes; `fairchem-janus simulate` uses multiples of tFE.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fairchem_janus.schedule.action import TRAINING_PHASES, Phase

TYPICAL_TIMES = {Phase.FE: 1.0, Phase.FF: 1.9, Phase.BF: 3.6, Phase.BE: 2.6}
"""Phase times relative to FE, used where nothing has been measured (design section 7)."""

DEFERRABLE_SHARE = 0.5
"""Share of BF and BE that is parameter gradients (W) in `--split-weight-grad`: it can wait, the rest cannot."""


@dataclass(frozen=True, kw_only=True)
class Costs:
    """Costs of one training step of `num_micro_batches` micro-batches on `num_stages` stages.

    Everything given per stage may also be one number for all stages. Raises ValueError for a wrong number of values,
    a phase without a time, or a negative or non-finite value.
    """

    num_stages: int
    num_micro_batches: int
    phase_times: Mapping[Phase, float | Sequence[float]] = field(default_factory=lambda: TYPICAL_TIMES)
    """Time of each phase on each stage for a micro-batch of scale 1."""
    micro_batch_scale: float | Sequence[float] = 1.0
    """Size of each micro-batch relative to the one that was timed: multiplies its times, messages and graphs."""
    link_latency: float = 0.0
    """Time from sending the last byte of a message to its arrival."""
    link_bandwidth: float = math.inf
    """Rate at which a link sends; a link sends its messages one after another. Computing goes on meanwhile."""
    message_sizes: Mapping[Phase, float] = field(default_factory=dict)
    """Size of what each phase hands to another rank (0 if left out)."""
    fe_graph_size: float | Sequence[float] = 0.0
    """Memory of one FE graph on each stage."""
    ff_graph_size: float | Sequence[float] = 0.0
    """Memory that FF adds on each stage, until BF has run."""
    deferrable_share: float = 0.0
    """Share of BF and BE that is parameter gradients and may run later on the same rank."""

    times: Mapping[Phase, tuple[float, ...]] = field(init=False, repr=False, compare=False)
    """`phase_times` with one value per stage; likewise the following three."""
    scales: tuple[float, ...] = field(init=False, repr=False, compare=False)
    fe_graph_sizes: tuple[float, ...] = field(init=False, repr=False, compare=False)
    ff_graph_sizes: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        missing = [str(phase) for phase in TRAINING_PHASES if phase not in self.phase_times]
        if missing:
            raise ValueError(f"phase_times has no time for {', '.join(missing)}: all of FE, FF, BF and BE need one")
        stages = self.num_stages
        times = {p: self._expand(f"phase_times[{p}]", self.phase_times[p], stages) for p in TRAINING_PHASES}
        scales = self._expand("micro_batch_scale", self.micro_batch_scale, self.num_micro_batches)
        object.__setattr__(self, "times", times)
        object.__setattr__(self, "scales", scales)
        object.__setattr__(self, "fe_graph_sizes", self._expand("fe_graph_size", self.fe_graph_size, stages))
        object.__setattr__(self, "ff_graph_sizes", self._expand("ff_graph_size", self.ff_graph_size, stages))
        for phase, size in self.message_sizes.items():
            self._expand(f"message_sizes[{phase}]", size, 1)
        self._expand("link_latency", self.link_latency, 1)
        if not self.link_bandwidth > 0:
            raise ValueError(f"link_bandwidth must be positive, got {self.link_bandwidth}")
        if not 0 <= self.deferrable_share < 1:
            raise ValueError(f"deferrable_share must be at least 0 and below 1, got {self.deferrable_share}")

    @staticmethod
    def _expand(name: str, value: float | Sequence[float], length: int) -> tuple[float, ...]:
        """Return `length` values, repeating a single number; raise ValueError for a wrong count or a bad value."""
        values = tuple(map(float, value)) if isinstance(value, Sequence) else (float(value),) * length
        if len(values) != length:
            raise ValueError(f"{name} has {len(values)} value(s), expected 1 or {length}")
        if not all(math.isfinite(v) and v >= 0 for v in values):
            raise ValueError(f"{name} must be finite and not negative, got {value}")
        return values

    def time(self, phase: Phase, stage: int, micro_batch: int) -> float:
        """Return the time that a phase takes, deferrable part included."""
        return self.times[phase][stage] * self.scales[micro_batch]

    def deferrable_time(self, phase: Phase, stage: int, micro_batch: int) -> float:
        """Return the part of `time` that may run later: `deferrable_share` of BF and BE, nothing of FE and FF."""
        return self.deferrable_share * self.time(phase, stage, micro_batch) if phase in (Phase.BF, Phase.BE) else 0.0

    def transfer_time(self, phase: Phase, micro_batch: int) -> float:
        """Return how long the result of a phase occupies a link, without `link_latency`."""
        return self.message_sizes.get(phase, 0.0) * self.scales[micro_batch] / self.link_bandwidth
