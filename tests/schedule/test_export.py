"""A step as a trace for Perfetto and as a picture file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fairchem_janus.schedule import Costs, Phase, make_schedule, simulate
from fairchem_janus.schedule.draw import Block, lanes_of
from fairchem_janus.schedule.export import save_png, save_trace, trace_events


def test_every_rank_is_a_lane_and_every_block_an_event_in_microseconds() -> None:
    lanes = [[Block("0", Phase.FE, 0.0, 0.5), Block("3", Phase.BE, 1.0, 1.25)], [Block("0", Phase.FF, 0.5, 1.0)]]
    trace = trace_events({"recorded": lanes}, ["rank 0", "rank 1"])
    named = {e["tid"]: e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "thread_name"}
    assert named == {0: "rank 0", 1: "rank 1"}
    blocks = [(e["tid"], e["name"], e["ts"], e["dur"]) for e in trace["traceEvents"] if e["ph"] == "X"]
    assert blocks == [(0, "FE 0", 0.0, 5e5), (0, "BE 3", 1e6, 2.5e5), (1, "FF 0", 5e5, 5e5)]


def test_plan_and_reality_stand_side_by_side(tmp_path: Path) -> None:
    costs = Costs(num_stages=2, num_micro_batches=3)
    schedule = make_schedule("wavek", num_stages=2, num_micro_batches=3)
    lanes = lanes_of(schedule, simulate(schedule, costs))
    save_trace({"planned": lanes, "recorded": lanes}, tmp_path / "trace.json", names=["rank 0", "rank 1"])
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == ["planned", "recorded"]
    assert sum(e["ph"] == "X" for e in events) == 2 * 2 * 4 * 3


def test_deferred_work_has_no_micro_batch() -> None:
    (event,) = (e for e in trace_events({"": [[Block("", None, 0.0, 1.0)]]}, [""])["traceEvents"] if e["ph"] == "X")
    assert event["name"] == "W" and "cname" not in event


@pytest.mark.parametrize("lanes", [[[Block("0", Phase.FE, 3.0, 4.0)], [Block("0", Phase.FF, 4.0, 6.0)]], [[], []]])
def test_the_picture_is_a_png_with_a_line_a_rank(lanes: list[list[Block]], tmp_path: Path) -> None:
    image = pytest.importorskip("matplotlib.image")
    save_png(lanes, tmp_path / "step.png", title="a step")
    pixels = image.imread(tmp_path / "step.png")
    assert pixels.shape[1] > pixels.shape[0] > 100
    colours = {tuple(round(255 * x) for x in pixel[:3]) for pixel in pixels.reshape(-1, pixels.shape[2])}
    drawn = {(0x44, 0x77, 0xAA), (0x22, 0x88, 0x33)}
    assert (drawn <= colours) is any(lanes)
