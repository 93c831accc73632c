"""How far into an epoch a run was, for a run whose steps are of another size.

fairchem counts optimizer steps. A step of a stock sampler is D * N of its batches, so that another D or N changes what
three steps mean; here the batches that were used are what is kept. A global batch of GARS does not depend on D and N,
but it has a size of its own.
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from fairchem_janus.data.gars_config import PER_STEP
from fairchem_janus.data.gars_sampler import GARSBatchSampler


@dataclass(frozen=True, slots=True)
class StepSize:
    """What one optimizer step takes from an epoch: `amount` of `unit` (batches, graphs, atoms or edges)."""

    unit: str
    amount: int

    @classmethod
    def of(cls, sampler: Any, num_replicas: int) -> StepSize:
        """The step size of a `GARSBatchSampler` or a `MicroBatchSampler`."""
        if isinstance(sampler, GARSBatchSampler):
            (name,) = (name for name in PER_STEP if getattr(sampler.config, name) is not None)
            return cls(name.removesuffix("_per_step"), getattr(sampler.config, name))
        return cls("batches", sampler.num_micro_batches * num_replicas)

    @classmethod
    def of_plain_fairchem(cls, location: str) -> StepSize | None:
        """The step size of the plain fairchem job that wrote a checkpoint, from its `resume.yaml`; None without one."""
        path = Path(location) / "resume.yaml"
        if not path.is_file():
            return None
        job = OmegaConf.load(path).job
        ranks = int(job.scheduler.num_nodes) * int(job.scheduler.ranks_per_node)
        return cls("batches", max(1, ranks // int(job.graph_parallel.group_size)))

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> StepSize:
        return cls(**json.loads(text))


def converted_steps(steps: int, before: StepSize | None, now: StepSize, steps_per_epoch: int) -> int:
    """Steps of this run that cover what `steps` of an earlier one used of its epoch, rounded down.

    >>> converted_steps(3, StepSize("batches", 4), StepSize("batches", 2), 100)
    6

    Logs a warning where the two runs do not meet exactly: then some graphs come twice in this epoch, or the order of
    the graphs is another one.
    """
    if before in (None, now) or steps == 0:
        return steps
    assert before is not None
    if before.unit != now.unit:
        logging.warning(
            f"the checkpoint was {steps} steps of {before.amount} {before.unit} into an epoch; this run counts "
            f"{now.unit} and goes on at its own step {min(steps, steps_per_epoch - 1)}: graphs may come twice or not "
            "at all in this epoch"
        )
        return min(steps, steps_per_epoch - 1)
    used = steps * before.amount
    new = min(used // now.amount, steps_per_epoch - 1)
    again = used - new * now.amount
    text = f"the checkpoint was {used} {now.unit} into an epoch, which is step {new} of {now.amount} here"
    if again:
        logging.warning(f"{text}: the last {again} {now.unit} are used again")
    else:
        logging.info(text)
    return new


def warn_of_other_epochs(before: int, now: int) -> None:
    """Tell that an epoch of the same batches has another number of steps than when the checkpoint was saved."""
    if before != now:
        logging.warning(
            f"the checkpoint is of a run with {before} steps an epoch, this one has {now}: the data set, or what is "
            "dropped from it, has changed. The position in the epoch is kept; which graphs it leaves out is not known"
        )
