"""Which schedule a step runs, while a run finds out which is best::

    step    0         1 .. profile_steps        then
            warm-up   profiled                  schedule: auto    the planned schedule
            |------ starting schedule ------|   wave_size: auto   candidates for k, five steps each, then the best
                                                otherwise         as before

Rank 0 plans, and everyone runs what it sends: all ranks change at the same step. What was chosen is part of the
checkpoint, so a resumed run keeps it.
"""

from __future__ import annotations

import json
import logging
import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist

from fairchem_janus.config import AUTO, JanusConfig
from fairchem_janus.engine.profile import Profile, StepProfiler
from fairchem_janus.engine.step import StepReport
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.planning import (
    WaveTrials,
    larger_schedule,
    planned_schedule,
    starting_schedule,
    wave_candidates,
)
from fairchem_janus.recording import write_recording
from fairchem_janus.schedule import Schedule, simulate, validate

RECORDED_STEP = 2
"""Of the steps with the schedule that is kept, which one `janus.trace` writes: the first may still be warming up."""


class ScheduleChoice:
    """Gives every step its schedule.

    Args:
        folder: the run folder, for `profile.json`, `schedule.csv` and the recorded step.

    Attributes:
        current: what a full step runs.
        profile: the measured costs, once known.
        settled: whether `current` stays.
    """

    def __init__(self, config: JanusConfig, topology: Topology, profiler: StepProfiler, folder: Path) -> None:
        self.config = config
        self.topology = topology
        self.profiler = profiler
        self.folder = folder
        self.current = starting_schedule(config)
        self.profile: Profile | None = None
        self.settled = not config.chooses
        self._trials: WaveTrials | None = None
        self._wave_size: int | None = None
        self._num_steps = self._num_settled = 0
        self._of_size: dict[int, Schedule] = {}

    def schedule(self, num_micro_batches: int) -> Schedule:
        """For a step of that many micro-batches; fewer than N drop out of the schedule, down to none at all."""
        if num_micro_batches not in self._of_size:
            self._of_size[num_micro_batches] = self._make(num_micro_batches)
        return self._of_size[num_micro_batches]

    def _make(self, num_micro_batches: int) -> Schedule:
        if num_micro_batches == 0:  # a step with fewer graphs than replicas
            stages = self.config.pipeline_size
            return Schedule(stages, 0, ((),) * stages)
        if num_micro_batches <= self.current.num_micro_batches:
            return self.current.truncated(num_micro_batches)
        return larger_schedule(self.config, num_micro_batches, self._wave_size)

    def after_step(self, report: StepReport, batches: Sequence[Any]) -> None:
        """Every rank calls this after every training step, with the same report."""
        step, last = self._num_steps, self.config.profile_steps
        self._num_steps += 1
        if self.settled:
            self._num_settled += 1
            if self.config.trace and self._num_settled == RECORDED_STEP:
                write_recording(self.profiler.runtime.timeline, self.schedule(len(batches)), self.topology, self.folder)
        if 0 < step <= last:
            self.profiler.note(batches)
        elif self._trials is not None:
            self._note_trial(report)
        if step == 0 and last > 0:
            self.profiler.start()
        elif step == last > 0:
            self.profile = self.profiler.finish(self.current)
            self._write("profile.json", lambda: json.dumps(self.profile_json(), indent=1) + "\n")
            if not self.settled:
                self._choose(self.profile)

    def profile_json(self) -> dict[str, Any]:
        assert self.profile is not None
        return {"split": self.config.split, "schedule": self.current.name, **self.profile.to_json()}

    # ---------------------------------------------------------------- choosing
    def _choose(self, profile: Profile) -> None:
        if self.config.schedule == AUTO:
            schedule = self._from_first_rank(lambda: planned_schedule(self.config, profile))
            self._settle(schedule, f"auto planned {self._expected(schedule, profile)}")
        else:
            self._trials = WaveTrials(self._from_first_rank(lambda: wave_candidates(self.config, profile)))
            self._use_wave(self._trials.current)

    def _from_first_rank(self, make: Callable[[], Any]) -> Any:
        """What `make` returns on rank 0, on every rank; and so an error that it raises."""
        outcome: list[Any] = [None]
        if self.topology.grid.rank == 0:
            try:
                outcome = [make()]
            except ValueError as error:
                outcome = [error]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(outcome, src=0)
        if isinstance(outcome[0], ValueError):
            raise outcome[0]
        return outcome[0]

    def _note_trial(self, report: StepReport) -> None:
        """Steps that are not full say little about a wave size, and are not counted."""
        assert self._trials is not None and self.config.num_micro_batches is not None
        if not report.is_finite or report.num_micro_batches < self.config.num_micro_batches * self.topology.grid.D:
            return
        trials = self._trials
        trials.note(report.pipeline_seconds / max(1, report.num_atoms))
        if not trials.done:
            if trials.current != self._wave_size:
                self._use_wave(trials.current)
            return
        best = self._from_first_rank(lambda: trials.current)
        self._use_wave(best)
        self._trials = None
        tried = ", ".join(f"k={k} {1e6 * statistics.median(times):.4g}" for k, times in trials.times.items())
        self._settle(self.current, f"wavek k={best}, the best of {tried} us per atom")

    def _use_wave(self, wave_size: int) -> None:
        assert self._trials is not None
        self._wave_size = wave_size
        self._use(self._trials.candidates[wave_size])

    def _use(self, schedule: Schedule) -> None:
        self.current = schedule
        self._of_size = {}

    def _settle(self, schedule: Schedule, text: str) -> None:
        self._use(schedule)
        self.settled = True
        self._tell(f"{text}; from step {self._num_steps} of this run on, kept in checkpoints and schedule.csv")
        self._write("schedule.csv", schedule.to_csv)

    def _expected(self, schedule: Schedule, profile: Profile) -> str:
        """The plan and the schedule so far, on the measured costs."""
        assert self.config.num_micro_batches is not None
        costs = profile.costs(self.config.num_micro_batches)
        new, old = simulate(schedule, costs), simulate(self.current, costs)
        return (
            f"{new.makespan:.4g} s a step, bubble {new.bubble_ratio:.1%} (floor {new.bubble_lower_bound:.1%}), at most "
            f"{max(new.peak_in_flight)} in flight; {self.current.name} so far {old.makespan:.4g} s, "
            f"{old.bubble_ratio:.1%}, {max(old.peak_in_flight)}"
        )

    def _tell(self, text: str) -> None:
        if self.topology.grid.rank == 0:
            logging.info(f"janus: {text}")

    def _write(self, name: str, text: Callable[[], str]) -> None:
        if self.topology.grid.rank == 0:
            self.folder.mkdir(parents=True, exist_ok=True)
            (self.folder / name).write_text(text())

    # ---------------------------------------------------------------- checkpoints
    def state(self) -> str:
        """What a checkpoint keeps: JSON, `null` if nothing has been chosen."""
        if not (self.config.chooses and self.settled):
            return "null"
        return json.dumps({**self._key(), "k": self._wave_size, "csv": self.current.to_csv()})

    def load(self, state: str) -> None:
        """Keep what an earlier run chose, if it chose for the same settings."""
        stored = json.loads(state)
        if stored is None or not self.config.chooses:
            return
        if {key: stored.get(key) for key in self._key()} != self._key():
            self._tell("the checkpoint's schedule was chosen for other settings; choosing again")
            return
        assert self.config.num_micro_batches is not None
        schedule = Schedule.parse_csv(
            stored["csv"],
            name=self.config.schedule,
            num_stages=self.config.pipeline_size,
            num_micro_batches=self.config.num_micro_batches,
        )
        validate(schedule)
        self._wave_size = stored["k"]
        self._use(schedule)
        self.settled = True
        what = "auto" if self.config.schedule == AUTO else f"wavek k={self._wave_size}"
        self._tell(f"{what}, as chosen before the checkpoint")

    def _key(self) -> dict[str, Any]:
        """Settings that a choice was made for."""
        c = self.config
        names = ("schedule", "pipeline_size", "num_micro_batches", "max_in_flight", "max_ff_graphs", "partition")
        key = {name: getattr(c, name) for name in (*names, "memory_budget_gib", "split")}
        return {**key, "gp_size": self.topology.grid.G, "gars": None if c.gars is None else asdict(c.gars)}
