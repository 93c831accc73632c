"""Schedules by name: what `janus.schedule` and `fairchem-janus simulate --schedule` accept."""

from __future__ import annotations

from fairchem_janus.schedule.action import TRAINING_PHASES, Schedule
from fairchem_janus.schedule.baselines import hanayo_2nd, one_f_one_b_2nd
from fairchem_janus.schedule.clock import NO_CAPS, Caps
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.gpipe import gpipe_2nd
from fairchem_janus.schedule.listing import auto
from fairchem_janus.schedule.validate import validate
from fairchem_janus.schedule.wavek import wavek

FAMILIES = ("auto", "wavek", "gpipe_2nd", "1f1b_2nd", "1f1b_2nd_contiguous", "hanayo_2nd")


def make_schedule(
    name: str,
    *,
    num_stages: int,
    num_micro_batches: int,
    wave_size: int | None = None,
    costs: Costs | None = None,
    caps: Caps = NO_CAPS,
    seed: int = 0,
) -> Schedule:
    """Return the training schedule `name`, validated, for `num_stages` stages and `num_micro_batches` micro-batches.

    `name` is one of `FAMILIES`, or the path of a CSV file that ends in `.csv`. `wave_size` is k of `wavek` (default P)
    and `seed` that of `auto`; others ignore them. `costs` are what `auto` plans for (default: typical phase times).
    `auto` keeps within `caps`; any other schedule that does not is an error.

    Raises ValueError for an unknown name, listing the valid ones, for sizes below 1, for caps that cannot be kept, and
    for whatever is wrong in a CSV file.
    """
    if num_stages < 1 or num_micro_batches < 1:
        raise ValueError(
            f"a schedule needs at least 1 stage and 1 micro-batch, got {num_stages} and {num_micro_batches}"
        )
    if name == "auto":
        schedule = auto(costs or Costs(num_stages=num_stages, num_micro_batches=num_micro_batches), caps, seed=seed)
    elif name == "wavek":
        schedule = wavek(num_stages=num_stages, num_micro_batches=num_micro_batches, wave_size=wave_size)
    elif name == "gpipe_2nd":
        schedule = gpipe_2nd(num_stages=num_stages, num_micro_batches=num_micro_batches)
    elif name in ("1f1b_2nd", "1f1b_2nd_contiguous"):
        contiguous = name.endswith("_contiguous")
        schedule = one_f_one_b_2nd(num_stages=num_stages, num_micro_batches=num_micro_batches, contiguous=contiguous)
    elif name == "hanayo_2nd":
        schedule = hanayo_2nd(num_stages=num_stages, num_micro_batches=num_micro_batches)
    elif name.endswith(".csv"):
        schedule = Schedule.from_csv(name, num_stages=num_stages, num_micro_batches=num_micro_batches)
    else:
        raise ValueError(
            f"unknown schedule {name!r}: choose one of {', '.join(FAMILIES)}, or give a path to a .csv file"
        )
    validate(schedule, phases=TRAINING_PHASES, max_in_flight=caps.max_in_flight, max_ff_graphs=caps.max_ff_graphs)
    return schedule
