#!/usr/bin/env python
"""Trajectories of a pipelined run and of plain fairchem, from the same seed on the same global batches.

    scripts/compare_trajectories.py -c JOB.yaml --pipeline-size 2 --steps 1000 --dtype float32 --json [overrides]

Both sides record, at every optimizer step, the mean absolute error of energies and forces of that step's own
predictions over the global batch, before the update. Reported is the mean over the steps of |ours - fairchem's| /
fairchem's, in percent (the measure of the JanusPipe paper, which reports 0.84 % for energies and 0.21 % for forces over
1,000 iterations). Nothing is resynchronised: both runs go their own way from the common initial weights.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from fairchem_janus.verify.maes import Sums


class Precision(StrEnum):
    float32 = "float32"
    float64 = "float64"


def trajectory(steps: Sequence[Sums], property_name: str) -> list[float]:
    """MAE of one property at every step, all data sets together."""
    values = []
    for sums in steps:
        parts = [part for name, part in sums.items() if name.endswith(property_name)]
        values.append(sum(total for total, _ in parts) / max(1, sum(count for _, count in parts)))
    return values


def mean_percentage_difference(ours: Sequence[float], reference: Sequence[float]) -> float:
    """Mean of |a - b| / b, in percent."""
    return 100.0 * sum(abs(a - b) / b for a, b in zip(ours, reference, strict=True)) / len(reference)


def draw(path: Path, curves: dict[str, tuple[list[float], list[float]]], title: str) -> None:
    """Both trajectories and their relative difference, one column a property."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(2, len(curves), figsize=(5.5 * len(curves), 6), sharex=True, squeeze=False)
    for column, (label, (ours, reference)) in enumerate(curves.items()):
        top, bottom = axes[:, column]
        top.plot(reference, color="black", linewidth=1.6, label="plain fairchem")
        top.plot(ours, color="tab:orange", linewidth=0.8, label="fairchem-janus")
        top.set(ylabel=label, yscale="log")
        top.legend(frameon=False)
        difference = [100 * abs(a - b) / b for a, b in zip(ours, reference, strict=True)]
        bottom.plot(difference, color="tab:orange", linewidth=0.8)
        bottom.set(xlabel="optimizer step", ylabel="difference in %")
        if any(difference):
            bottom.set_yscale("log")
    figure.suptitle(title)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)


def main(
    context: typer.Context,
    config: Annotated[Path, typer.Option("-c", "--config", exists=True)] = Path("hydra_configs/uma_like.yaml"),
    pipeline_size: Annotated[int, typer.Option(min=1)] = 2,
    steps: Annotated[int, typer.Option(min=1)] = 1000,
    dtype: Annotated[Precision, typer.Option()] = Precision.float32,
    plot: Annotated[Path | None, typer.Option(help="PNG file for the picture.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Last line: one JSON object.")] = False,
) -> None:
    """Run both sides and print how far their error trajectories are apart."""
    import logging

    logging.disable(logging.INFO)
    import torch
    from fairchem.core._cli import get_hydra_config_from_yaml

    from fairchem_janus.verify.run import pipeline_trace, reference_trace

    overrides = [
        f"runner.janus.pipeline_size={pipeline_size}",
        f"++job.scheduler.ranks_per_node={pipeline_size}",
        *context.args,
    ]
    job = get_hydra_config_from_yaml(str(config), overrides)
    torch_dtype = getattr(torch, dtype.value)
    limit = 24 * 3600.0
    ours = pipeline_trace(
        job,
        steps=steps,
        dtype=torch_dtype,
        world_size=pipeline_size,
        keep_gradients=False,
        timeout_seconds=limit,
    )
    reference = reference_trace(job, ours, dtype=torch_dtype, keep_gradients=False, timeout_seconds=limit)
    curves = {
        label: (trajectory(ours.maes, name), trajectory(reference.maes, name))
        for label, name in (("energy MAE (eV)", "energy"), ("force MAE (eV/A)", "forces"))
    }
    energy, force = (mean_percentage_difference(*pair) for pair in curves.values())
    title = f"P = {pipeline_size}, {steps} steps, {dtype.value}: energies {energy:.2g} %, forces {force:.2g} % apart"
    if plot is not None:
        draw(plot, curves, title)
    for label, (a, b) in curves.items():
        print(f"{label}: first {b[0]:.4f}, last {b[-1]:.4f} (fairchem) {a[-1]:.4f} (fairchem-janus)")
    print(title)
    if as_json:
        print(json.dumps({"steps": steps, "energy_mae_mape": energy, "force_mae_mape": force}))


if __name__ == "__main__":
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(main)
    app()
