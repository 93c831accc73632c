#!/usr/bin/env python
"""Peak host memory of building a model: whole, and one pipeline stage of it.

    python scripts/bench_build_memory.py [--json] [--blocks 10] [--stages 5] [--channels 128] [--experts 8]

Stages are built as a run builds them: all blocks are made and draw their random numbers, and those of other stages are
let go one by one (fairchem_janus/model/frugal.py).
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--blocks", type=int, default=10)
    parser.add_argument("--stages", type=int, default=5)
    parser.add_argument("--channels", type=int, default=128)
    parser.add_argument("--experts", type=int, default=8)
    options = parser.parse_args()

    from fairchem_janus.bench.build_memory import build_peak

    whole, *stages = build_peak(
        num_blocks=options.blocks, num_stages=options.stages, channels=options.channels, experts=options.experts
    )
    ratio = max(stage.peak_bytes for stage in stages) / whole.peak_bytes
    if options.json:
        print(json.dumps({"ratio": ratio, "whole": asdict(whole), "stages": [asdict(stage) for stage in stages]}))
        return
    print(f"ratio {ratio:.3f} (worst stage over the whole model)")
    for name, peak in [("whole", whole), *((f"stage {i}", stage) for i, stage in enumerate(stages))]:
        print(f"{name:8} peak {peak.peak_bytes / 1e6:7.0f} MB, parameters {peak.parameter_bytes / 1e6:7.0f} MB")


if __name__ == "__main__":
    sys.exit(main())
