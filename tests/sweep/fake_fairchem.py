"""Stands in for the fairchem command: does to the run folder what the override `do=...` says, in milliseconds.

ok      a janus run that takes all of its steps
plain   a run of plain fairchem
fail    a traceback and exit status 1
half    a janus run that ends early without an error
slurm   a job that is only submitted
signal  stopped by a signal from elsewhere, exit status 0
sleep   runs until it is stopped; takes SIGTERM as fairchem does
deaf    runs until it is killed
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path

JANUS, PLAIN = "fairchem_janus.JanusRunner", "fairchem.core.components.train.train_runner.TrainEvalRunner"


def main(arguments: list[str]) -> None:
    overrides = dict(argument.lstrip("+").split("=", 1) for argument in arguments[2:])
    run_dir, name = (overrides[key][1:-1].replace("\\'", "'") for key in ("job.run_dir", "job.timestamp_id"))
    run = Path(run_dir) / name
    do = overrides.get("do", "ok")
    mode = "SLURM" if do == "slurm" else "LOCAL"
    config = {"job": {"scheduler": {"mode": mode}}, "runner": {"_target_": PLAIN if do == "plain" else JANUS}}
    config["runner"]["lr"] = overrides.get("lr")
    (run / "canonical_config.yaml").write_text(json.dumps(config))
    with open(run / "starts.txt", "a") as file:
        file.write(f"{time.monotonic()}\n")
    (run / "pid.txt").write_text(str(os.getpid()))
    if do == "fail":
        raise ValueError(f"lr={overrides.get('lr')} is too\n  large")
    if do == "signal":
        _preempt(run)
    if do in ("sleep", "deaf"):
        signal.signal(signal.SIGTERM, lambda *_: _preempt(run) if do == "sleep" else None)
        print("waiting", flush=True)
        while True:
            time.sleep(0.05)
    if do in ("ok", "half"):
        time.sleep(float(overrides.get("seconds", 0)))
        steps = [_step(index, loss=1.0 / (index + 1)) for index in range(4)]
        end = {"step": 4, "end": {"completed": do == "ok", "peak_memory_gib": 0.5}}
        with open(run / "metrics.jsonl", "a") as file:
            file.writelines(json.dumps(record) + "\n" for record in [*steps, {"step": 4, "eval": {"val/loss": 2}}, end])
    with open(run / "ends.txt", "a") as file:
        file.write(f"{time.monotonic()}\n")


def _step(index: int, *, loss: float) -> dict[str, float]:
    speed = {"atoms_per_second(approx)": 100.0, "samples_per_second(approx)": 10.0}
    return {"loss": loss, "step": index, "seconds_per_step": 0.5, "bubble": 0.25} | speed


def _preempt(run: Path) -> None:
    (run / "checkpoints" / "preemption_state").mkdir(parents=True, exist_ok=True)
    sys.exit(0)


if __name__ == "__main__":
    print("\n".join(re.sub(r"\s+", " ", argument) for argument in sys.argv[1:]))
    main(sys.argv[1:])
