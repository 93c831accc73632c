"""A step as a picture file and as a trace: the lanes of blocks that `draw.py` shows in the terminal, in seconds."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fairchem_janus.schedule.draw import COLOURS, Block

CHROME_COLOURS = {"FE": "thread_state_running", "FF": "good", "BF": "terrible", "BE": "yellow"}
"""Names from the trace viewer's palette, the nearest to those of `draw.COLOURS`; Perfetto colours by name."""


def trace_events(groups: Mapping[str, Sequence[Sequence[Block]]], names: Sequence[str]) -> dict[str, Any]:
    """Return a trace in Chrome's JSON format: a process for each group of lanes, in it a lane (thread) for each rank.

    `groups` may hold several pictures of one step, say `planned` and `recorded`, to be compared in one window; `names`
    are those of the lanes. Each block is a complete event (`ph: X`), `ts` and `dur` in microseconds.
    """
    events: list[dict[str, Any]] = []
    for process, (group, lanes) in enumerate(groups.items()):
        events.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": group}})
        for thread, (name, lane) in enumerate(zip(names, lanes, strict=True)):
            where = {"pid": process, "tid": thread}
            events.append({"ph": "M", "name": "thread_name", **where, "args": {"name": name}})
            events.append({"ph": "M", "name": "thread_sort_index", **where, "args": {"sort_index": thread}})
            for block in lane:
                phase = str(block.phase or "W")
                events.append(
                    {
                        "ph": "X",
                        "name": f"{phase} {block.label}".rstrip(),
                        "cat": "phase",
                        **where,
                        "ts": 1e6 * block.start,
                        "dur": 1e6 * (block.end - block.start),
                        "args": {"micro_batch": block.label},
                        **({"cname": CHROME_COLOURS[phase]} if phase in CHROME_COLOURS else {}),
                    }
                )
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def save_trace(groups: Mapping[str, Sequence[Sequence[Block]]], path: Path, *, names: Sequence[str]) -> None:
    """Write `trace_events` to a file."""
    path.write_text(json.dumps(trace_events(groups, names)))


def save_png(lanes: Sequence[Sequence[Block]], path: Path, *, title: str) -> None:
    """Write the lanes as a timeline, one line a rank, one colour a phase, waiting in white between them."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg  # no pyplot: no display, no global state
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    begin = min((block.start for lane in lanes for block in lane), default=0.0)
    end = max((block.end for lane in lanes for block in lane), default=1.0)
    figure = Figure(figsize=(14, 1.4 + 0.6 * len(lanes)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for rank, lane in enumerate(lanes):
        for block in lane:
            width = block.end - block.start
            axes.barh(rank, width, 0.8, block.start - begin, color=COLOURS[block.phase], edgecolor="black", lw=0.4)
            if width > 0.012 * (end - begin):  # else the number does not fit
                middle = block.start - begin + width / 2
                axes.text(middle, rank, block.label, ha="center", va="center", fontsize=8)
    axes.set(xlim=(0, end - begin), yticks=range(len(lanes)), yticklabels=[f"rank {r}" for r in range(len(lanes))])
    axes.set(xlabel="time (s)", title=title)
    axes.invert_yaxis()
    drawn = {block.phase for lane in lanes for block in lane}
    handles = [Patch(facecolor=colour, label=str(p or "W")) for p, colour in COLOURS.items() if p in drawn]
    handles.append(Patch(facecolor="white", edgecolor="black", label="idle"))
    axes.legend(handles=handles, ncols=len(handles), loc="upper center", bbox_to_anchor=(0.5, -0.3), frameon=False)
    figure.savefig(path, dpi=110)
