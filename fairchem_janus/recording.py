"""A step as it really ran, gathered from all ranks and written to the run folder::

step.txt         what ran beside what the schedule's list says, as text
step.png         the timeline, one colour a phase
step.trace.json  for Perfetto (https://ui.perfetto.dev) or chrome://tracing, one lane a rank
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch.distributed as dist

from fairchem_janus.engine.timeline import Timeline
from fairchem_janus.parallel.topology import Topology
from fairchem_janus.schedule import Schedule
from fairchem_janus.schedule.draw import Block, draw
from fairchem_janus.schedule.export import save_png, save_trace


def gather_recording(timeline: Timeline, topology: Topology) -> list[list[Block]]:
    """The last step's blocks of every rank, in seconds from the first one's start; all ranks must call this.

    Ranks are aligned by their machines' wall clocks.
    """
    own = (timeline.began, timeline.spans())
    everyone = [own]
    grid = topology.grid
    if grid.D * grid.P * grid.G > 1:
        everyone = [own] * (grid.D * grid.P * grid.G)
        dist.all_gather_object(everyone, own)
    first = min((began + span.start for began, spans in everyone for span in spans), default=0.0)
    return [
        [
            Block(str(span.action.micro_batch), span.action.phase, began + span.start - first, began + span.end - first)
            for span in spans
        ]
        for began, spans in everyone
    ]


def write_recording(timeline: Timeline, schedule: Schedule, topology: Topology, folder: Path) -> None:
    """Write the last step's three files; all ranks must call this."""
    lanes = gather_recording(timeline, topology)
    if topology.grid.rank != 0:
        return
    folder.mkdir(parents=True, exist_ok=True)
    names = [f"rank {rank}" for rank in range(len(lanes))]
    end = max((block.end for lane in lanes for block in lane), default=0.0)
    title = f"{schedule.name}, recorded: {1e3 * end:.4g} ms"
    (folder / "step.txt").write_text(f"{title}\n{draw(lanes, 160)}\n\nschedule, one row a stage\n{schedule.to_csv()}")
    save_png(lanes, folder / "step.png", title=title)
    save_trace({"recorded": lanes}, folder / "step.trace.json", names=names)
    logging.info(f"janus: wrote a recorded step to {folder}/step.txt, step.png and step.trace.json")
