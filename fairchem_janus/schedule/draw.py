"""A step drawn for the terminal: one line per rank, time from left to right, one colour per phase.

Without colours the fill tells the phase, and each action starts with its micro-batch, if there is room for it::

    rank 0 |0-......0===0#######..............0+++++
    rank 1 |..0-0===............0#######0+++++......
    - FE  = FF  # BF  + BE  . idle

The lanes may come from the simulator (`lanes_of`) or from a recorded run: all that is drawn is blocks with a start and
an end.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fairchem_janus.schedule.action import Phase, Schedule
from fairchem_janus.schedule.simulate import Simulation

if TYPE_CHECKING:
    from rich.text import Text

FILLS = {Phase.FE: "-", Phase.FF: "=", Phase.BF: "#", Phase.BE: "+", None: "w"}
"""Fill of each phase without colours; None is deferred parameter-gradient work."""

COLOURS = {Phase.FE: "#4477AA", Phase.FF: "#228833", Phase.BF: "#EE6677", Phase.BE: "#CCBB44", None: "#BBBBBB"}
"""Colour of each phase (Tol's bright palette, told apart by colour-blind readers); None is deferred work."""

IDLE = "."


@dataclass(frozen=True, slots=True)
class Block:
    """A stretch of work on one rank. `phase` None is deferred parameter-gradient work."""

    label: str
    phase: Phase | None
    start: float
    end: float


def lanes_of(schedule: Schedule, simulation: Simulation) -> list[list[Block]]:
    """Return the blocks of each rank, by start."""
    lanes = []
    for row, actions in enumerate(schedule.rows):
        blocks = [Block(str(a.micro_batch), a.phase, *simulation.spans[a]) for a in actions]
        blocks += [Block("", None, start, end) for start, end in simulation.deferred_spans[row]]
        lanes.append(sorted(blocks, key=lambda block: block.start))
    return lanes


def draw(lanes: Sequence[Sequence[Block]], width: int = 100) -> str:
    """Return the lanes as plain text, `width` columns for the time between the first start and the last end."""
    legend = "  ".join(f"{FILLS[phase]} {phase or 'W'}" for phase in FILLS if _occurs(phase, lanes))
    lines = [
        f"rank {rank} |" + "".join(_text(block, columns) for block, columns in _columns(lane, lanes, width))
        for rank, lane in enumerate(lanes)
    ]
    return "\n".join([*lines, f"{legend}  {IDLE} idle"])


def draw_rich(lanes: Sequence[Sequence[Block]], width: int = 100) -> Text:
    """Return the lanes as a rich Text with the phases as background colours."""
    from rich.text import Text

    text = Text(no_wrap=True)
    for rank, lane in enumerate(lanes):
        text.append(f"rank {rank} |")
        for block, columns in _columns(lane, lanes, width):
            style = f"black on {COLOURS[block.phase]}" if block else ""
            text.append(_fill(block, columns, " ") if block else " " * columns, style)
        text.append("\n")
    for phase in COLOURS:
        if _occurs(phase, lanes):
            text.append(f" {phase or 'W'} ", f"black on {COLOURS[phase]}")
            text.append(" ")
    return text


def _columns(lane: Sequence[Block], lanes: Sequence[Sequence[Block]], width: int) -> list[tuple[Block | None, int]]:
    """Return the lane as (block, number of columns), None for idle time; blocks too short for a column are left out."""
    begin = min((block.start for other in lanes for block in other), default=0.0)
    end = max((block.end for other in lanes for block in other), default=0.0)
    scale = width / (end - begin) if end > begin else 0.0
    pieces: list[tuple[Block | None, int]] = []
    used = 0
    for block in lane:
        first = max(used, round((block.start - begin) * scale))
        last = round((block.end - begin) * scale)
        if first > used:
            pieces.append((None, first - used))
        if last > first:
            pieces.append((block, last - first))
        used = max(first, last)
    if used < width:
        pieces.append((None, width - used))
    return pieces


def _text(block: Block | None, columns: int) -> str:
    return IDLE * columns if block is None else _fill(block, columns, FILLS[block.phase])


def _fill(block: Block, columns: int, fill: str) -> str:
    """Return the block's label padded with `fill`, or `fill` alone where the label does not fit."""
    return (block.label if len(block.label) <= columns else "").ljust(columns, fill)


def _occurs(phase: Phase | None, lanes: Sequence[Sequence[Block]]) -> bool:
    return any(block.phase is phase for lane in lanes for block in lane)
