"""Schedules of the four-phase pipeline: made, checked, simulated and drawn, without torch.

>>> from fairchem_janus.schedule import Costs, make_schedule, simulate
>>> schedule = make_schedule("wavek", num_stages=2, num_micro_batches=3, wave_size=2)
>>> print(schedule.to_csv(), end="")
FE0,FE1,FF0,BF0,FF1,FE2,BF1,FF2,BF2,BE0,BE1,BE2
FE0,FE1,FF0,FF1,BF0,FE2,FF2,BE0,BF1,BF2,BE1,BE2
>>> print(f"{simulate(schedule, Costs(num_stages=2, num_micro_batches=3)).bubble_ratio:.3f}")
0.209
"""

from __future__ import annotations

from fairchem_janus.schedule.action import EVALUATION_PHASES, TRAINING_PHASES, Action, Phase, Schedule
from fairchem_janus.schedule.baselines import unfolded_evaluation
from fairchem_janus.schedule.bound import lower_bound
from fairchem_janus.schedule.clock import NO_CAPS, Caps
from fairchem_janus.schedule.costs import DEFERRABLE_SHARE, TYPICAL_TIMES, Costs
from fairchem_janus.schedule.dataflow import Message, dependencies, inbound, messages
from fairchem_janus.schedule.families import FAMILIES, make_schedule
from fairchem_janus.schedule.gpipe import evaluation_schedule
from fairchem_janus.schedule.listing import auto, wave_sizes
from fairchem_janus.schedule.simulate import Simulation, simulate
from fairchem_janus.schedule.validate import ScheduleError, live_graphs, validate

__all__ = [
    "DEFERRABLE_SHARE",
    "EVALUATION_PHASES",
    "FAMILIES",
    "NO_CAPS",
    "TRAINING_PHASES",
    "TYPICAL_TIMES",
    "Action",
    "Caps",
    "Costs",
    "Message",
    "Phase",
    "Schedule",
    "ScheduleError",
    "Simulation",
    "auto",
    "dependencies",
    "evaluation_schedule",
    "inbound",
    "live_graphs",
    "lower_bound",
    "make_schedule",
    "messages",
    "simulate",
    "unfolded_evaluation",
    "validate",
    "wave_sizes",
]
