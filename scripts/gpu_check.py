#!/usr/bin/env python
"""One CUDA device: exactness of the engine, and phase times and memory of UMA's stages, fed to the simulator.

    python scripts/gpu_check.py [--json results.json] [--stages 4] [--micro-batches 12]

1. Exactness, float64: loss and every gradient of a small UMA through the engine, as one stage (P = 1) and as four,
   against plain fairchem on the union of the micro-batches.
2. For uma-s and uma-m (32 experts, float32, no activation checkpointing): every phase of every stage of P, timed on its
   own, its live bytes, both splits; and the sum of all phases over unsplit fairchem. A micro-batch is one crystal of up
   to 350 atoms, fewer where the device is small.
3. What the simulator makes of these times: step time, bubble and memory of `auto`, `wavek` and the baselines.

`--device cpu` runs the same on a few atoms, to check the script itself.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from fairchem_janus.bench.one_process import PhaseFigures
    from fairchem_janus.bench.workload import Size

TOLERANCE = 1e-10
SHARE_OF_MEMORY = 0.4
"""Of the free device memory, for the graphs of one micro-batch; weights, gradients and temporaries take more."""

BYTES_PER_ATOM = {"uma-s": 46e6, "uma-m": 240e6}
"""Of one micro-batch's graphs at 78 edges an atom, from CPU runs; float32."""

MOST_ATOMS = 350


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write the figures here")
    parser.add_argument("--stages", type=int, default=4, help="P, at most 4")
    parser.add_argument("--micro-batches", type=int, default=12, help="N of the simulated step")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("gpu_check: torch finds no CUDA device on this machine, so there is nothing to check")
        return 0
    warnings.filterwarnings("ignore", message="var.*degrees of freedom")
    device = torch.device(options.device)
    torch.set_num_threads(1)
    result: dict[str, Any] = {"device": torch.cuda.get_device_name() if device.type == "cuda" else "cpu"}
    result["exactness"] = {f"P={P}": exactness(device, P) for P in (1, 4)}
    exact = all(error <= TOLERANCE for found in result["exactness"].values() for error in found.values())
    print(f"{result['device']}: {'exact' if exact else 'NOT exact'} in float64: {result['exactness']}", flush=True)

    from fairchem_janus.bench.workload import UMA_M, UMA_S

    for name, size in (("uma-s", UMA_S), ("uma-m", UMA_M)):
        result[name] = stage_costs(name, size, device, options.stages, options.micro_batches)
        show(name, result[name])
    if options.json:
        options.json.write_text(json.dumps(result, indent=1) + "\n")
    return 0 if exact else 1


def exactness(device: torch.device, num_stages: int) -> dict[str, float]:
    """Largest relative error of loss and gradients against plain fairchem, four micro-batches, float64."""
    from fairchem.core.units.mlip_unit.mlip_unit import compute_loss

    from fairchem_janus.bench.one_process import OneProcess
    from fairchem_janus.bench.workload import UMA_S, make_batches, make_tasks
    from fairchem_janus.model.randomness import install_keyed_draws
    from fairchem_janus.verify.compare import relative_error, tensor_errors

    torch.set_default_dtype(torch.float64)
    try:
        small = {"channels": 32, "experts": 4, "dtype": torch.float64}
        plain, ours = UMA_S.build(**small).to(device), UMA_S.build(**small).to(device)
        engine = OneProcess(ours, num_stages, device)
        where = {"atoms": 4, "dtype": torch.float64, "device": device}
        loss = engine.step(lambda: make_batches(4, **where))
        install_keyed_draws(plain.backbone)
        (union,) = make_batches(1, graphs=4, **where)
        total = torch.stack(list(compute_loss(make_tasks(), plain(union), union).values())).sum()
        total.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    gradients = [{n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in (ours, plain)]
    return {"loss": relative_error(loss, total.item()), "gradient": max(tensor_errors(*gradients).values())}


def stage_costs(name: str, size: Size, device: torch.device, num_stages: int, num_micro_batches: int) -> dict[str, Any]:
    """Phase times and bytes of every stage under both splits, unsplit fairchem, and the simulated step."""
    from fairchem_janus.bench.one_process import OneProcess
    from fairchem_janus.bench.workload import make_batches

    atoms, changes = 4, {"channels": 32, "experts": 2}
    if device.type == "cuda":
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info()
        atoms, changes = min(MOST_ATOMS, int(SHARE_OF_MEMORY * free / BYTES_PER_ATOM[name]) // 4 * 4), {}
    model = size.build(**changes).to(device)

    def make_batch() -> Any:
        return make_batches(1, atoms=atoms, device=device)[0]

    batch = make_batch()
    costs: dict[str, Any] = {"atoms": int(batch["natoms"].sum()), "unsplit_seconds": unsplit(model, make_batch, device)}
    measured = {}
    for split in ("merged", "eager"):
        engine = OneProcess(model, num_stages, device, split=split)
        measured[split] = figures = engine.measure(make_batch)
        costs[split] = {
            "seconds": {str(phase): values for phase, values in figures.seconds.items()},
            "bytes_left": {str(phase): values for phase, values in figures.left.items()},
            "compute_over_unsplit": figures.total_seconds / costs["unsplit_seconds"],
        }
        del engine
    costs["simulated"] = simulated(measured, num_stages, num_micro_batches)
    return costs


def unsplit(model: torch.nn.Module, make_batch: Any, device: torch.device, repetitions: int = 5) -> float:
    """Median seconds of one micro-batch through plain fairchem, forward and backward, after one to warm up."""
    from fairchem.core.units.mlip_unit.mlip_unit import compute_loss

    from fairchem_janus.bench.workload import make_tasks

    plain, tasks, seconds = copy.deepcopy(model), make_tasks(), []
    for _ in range(repetitions + 1):
        batch = make_batch()
        plain.zero_grad()
        started = _now(device)
        torch.stack(list(compute_loss(tasks, plain(batch), batch).values())).sum().backward()
        seconds.append(_now(device) - started)
    return statistics.median(seconds[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def simulated(measured: dict[str, PhaseFigures], num_stages: int, num_micro_batches: int) -> dict[str, Any]:
    """Step time, bubble and peak bytes of graphs for the measured costs; the baselines pay for the *eager* split."""
    from fairchem_janus.bench.figures import BASELINES, auto, baseline
    from fairchem_janus.schedule import Costs, Phase, make_schedule, simulate

    costs = {
        split: Costs(
            num_stages=num_stages,
            num_micro_batches=num_micro_batches,
            phase_times=dict(figures.seconds),
            # until BE a micro-batch holds what FE made, or what BF left if that is more
            fe_graph_size=[max(fe, fe + ff + bf) for fe, ff, bf in zip(*_left(figures), strict=True)],
            ff_graph_size=[float(ff) for ff in figures.left[Phase.FF]],
        )
        for split, figures in measured.items()
    }
    plans = {"auto": auto(costs["merged"])}
    plans["wavek"] = make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches)
    plans |= {name: baseline(name, num_stages, num_micro_batches) for name in BASELINES}
    result = {}
    for name, schedule in plans.items():
        found = simulate(schedule, costs["eager" if name in BASELINES else "merged"])
        result[name] = {"seconds": found.makespan, "bubble": found.bubble_ratio, "graph_bytes": max(found.peak_memory)}
    return result


def _left(figures: PhaseFigures) -> list[list[float]]:
    from fairchem_janus.schedule import Phase

    return [[float(value) for value in figures.left[phase]] for phase in (Phase.FE, Phase.FF, Phase.BF)]


def show(name: str, costs: dict[str, Any]) -> None:
    print(f"{name}, {costs['atoms']} atoms; unsplit fairchem {1000 * costs['unsplit_seconds']:.1f} ms")
    for split in ("merged", "eager"):
        found = costs[split]
        for phase, seconds in found["seconds"].items():
            times = ", ".join(f"{1000 * value:.1f}" for value in seconds)
            left = ", ".join(f"{value / 2**20:+.0f}" for value in found["bytes_left"][phase])
            print(f"  {split:7}{phase}  ms {times}  MiB left {left}")
        print(f"  {split:7}all phases over unsplit {found['compute_over_unsplit']:.3f}")
    for schedule, plan in costs["simulated"].items():
        line = (
            f"{plan['seconds']:.3f} s a step, bubble {plan['bubble']:.1%}, graphs {plan['graph_bytes'] / 2**30:.2f} GiB"
        )
        print(f"  simulated {schedule:20}{line}", flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
