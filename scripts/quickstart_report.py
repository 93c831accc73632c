"""Last part of scripts/quickstart.sh: use the exported model, and sum the run up.

    python scripts/quickstart_report.py --data DIR --run DIR --parity FILE --started SECONDS

Imports fairchem alone, on purpose: `inference_ckpt.pt` must load where fairchem-janus is not installed. Prints a few
validation frames, predicted against true, and as the last line one JSON object with the figures of the run. Every
figure is read from what the run wrote: `metrics.jsonl` (training and evaluation) and the file of
`fairchem-janus verify`.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from ase import Atoms
from ase.db import connect
from fairchem.core import FAIRChemCalculator
from fairchem.core.units.mlip_unit import InferenceSettings, load_predict_unit
from rich.console import Console
from rich.table import Table

DATASETS = ("emt_bulk", "emt_surface")
FRAMES_PER_DATASET = 4


def validation_frames(data: Path, dataset: str) -> list[Atoms]:
    """The first frames of a validation set, with EMT's energy and forces attached."""
    with connect(str(data / dataset / "val" / "data.0000.aselmdb"), readonly=True, use_lock_file=False) as db:
        return [row.toatoms() for row in db.select(limit=FRAMES_PER_DATASET)]


def prediction_table(checkpoint: Path, data: Path) -> Table:
    """Predicted against true energy and forces, with the calculator that a fairchem user would take."""
    predictor = load_predict_unit(checkpoint, inference_settings=InferenceSettings(), device="cpu")
    table = Table("data set", "formula", "E true (eV)", "E predicted", "|dE|/atom", "F rms true (eV/A)", "F mean error")
    for dataset in DATASETS:
        calculator = FAIRChemCalculator(predictor, task_name=dataset)
        for frame in validation_frames(data, dataset):
            atoms = frame.copy()
            atoms.calc = calculator
            energy, true_energy = atoms.get_potential_energy(), frame.get_potential_energy()
            forces, true_forces = atoms.get_forces(), frame.get_forces()
            table.add_row(
                dataset,
                frame.get_chemical_formula(),
                f"{true_energy:.3f}",
                f"{energy:.3f}",
                f"{abs(energy - true_energy) / len(frame):.4f}",
                f"{np.sqrt(np.mean(true_forces**2)):.3f}",
                f"{np.mean(np.abs(forces - true_forces)):.3f}",
            )
    return table


def read_metrics(path: Path) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """The training lines of `metrics.jsonl`, and fairchem's log of the last evaluation."""
    lines = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
    steps = [line for line in lines if "loss" in line]
    evaluations = [line["eval"] for line in lines if "eval" in line]
    if not steps or not evaluations:
        raise SystemExit(f"{path} has {len(steps)} training lines and {len(evaluations)} evaluations; expected both")
    return steps, evaluations[-1]


def validation_force_mae(evaluation: dict[str, float], data: Path) -> float:
    """Mean absolute error of a force component in eV/A over the validation atoms of both data sets."""
    atoms = [int(np.load(data / name / "val" / "metadata.npz")["natoms"].sum()) for name in DATASETS]
    errors = [evaluation[f"val/{name}.val,{name}_forces,mae"] for name in DATASETS]
    return float(np.average(errors, weights=atoms))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder written by `fairchem-janus data demo`")
    parser.add_argument("--run", type=Path, required=True, help="folder of the training run")
    parser.add_argument("--parity", type=Path, required=True, help="JSON file of `fairchem-janus verify`")
    parser.add_argument("--started", type=float, required=True, help="when the quickstart began, in Unix seconds")
    args = parser.parse_args()
    logging.disable(logging.WARNING)

    checkpoint = args.run / "checkpoints" / "final" / "inference_ckpt.pt"
    table = prediction_table(checkpoint, args.data)
    assert "fairchem_janus" not in sys.modules, "the exported model must load with fairchem alone"
    console = Console(width=120)
    console.print(f"\n{checkpoint} in plain fairchem, on validation frames:")
    console.print(table)

    steps, evaluation = read_metrics(args.run / "metrics.jsonl")
    parity = json.loads(args.parity.read_text())
    summary = {
        "steps": steps[-1]["step"] + 1,
        "loss_first": steps[0]["loss"],
        "loss_last": steps[-1]["loss"],
        "val_force_mae": validation_force_mae(evaluation, args.data),
        "parity_max_rel_grad_error": parity["max_rel_grad_error"],
        "seconds": round(time.time() - args.started, 1),
    }
    print(json.dumps(summary))


if __name__ == "__main__":
    main()
