"""Runs side by side: for the terminal, as CSV and as JSON."""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fairchem_janus.results.settings import MISSING, differing
from fairchem_janus.results.summary import RunSummary

MOST_SETTINGS = 8
"""Settings that the terminal's table has room for; CSV and JSON have all of them."""

FIGURES = {
    "step": ("step", "d"),
    "loss": ("loss", ".4g"),
    "val_loss": ("val loss", ".4g"),
    "seconds_per_step": ("s/step", ".3g"),
    "atoms_per_second": ("atoms/s", ",.0f"),
    "bubble": ("bubble", ".1%"),
    "memory_gib": ("memory\nGiB", ".2f"),
}
"""Attribute of `RunSummary` -> heading and format, in the terminal."""

CSV_FIGURES = (*FIGURES, "samples_per_second")


def settings_columns(runs: Sequence[RunSummary]) -> dict[str, list[Any]]:
    """The settings in which the runs differ: overrides, if all runs are members of sweeps, else configuration values.

    A run whose configuration was never composed has none but its overrides.
    """
    if all(run.overrides is not None for run in runs):
        return differing([run.overrides or {} for run in runs])
    return differing([run.config for run in runs])


def run_names(runs: Sequence[RunSummary]) -> list[str]:
    """Names of the run folders, with as many parents as it takes to tell them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for length in range(1, max((len(path) for path in paths), default=1) + 1):
        names = ["/".join(path[-length:]) for path in paths]
        if len(set(names)) == len(names):
            break
    return names


def rows(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """One flat row a run: name, status, differing settings, figures, last evaluation, error, folder; None: unknown."""
    settings = settings_columns(runs)
    result = []
    for index, (run, name) in enumerate(zip(runs, run_names(runs), strict=True)):
        row: dict[str, Any] = {"run": name, "status": run.status}
        row |= {column: values[index] for column, values in settings.items() if column not in row}
        row |= {figure: getattr(run, figure) for figure in CSV_FIGURES}
        row |= {"error": run.error, **run.metrics, "folder": str(run.folder)}
        result.append(row)
    return result


def write_csv(runs: Sequence[RunSummary], file: Path) -> None:
    """Write all columns."""
    table = rows(runs)
    columns = list(dict.fromkeys(column for row in table for column in row))
    with open(file, "w", newline="") as stream:
        writer = csv.DictWriter(stream, columns)
        writer.writeheader()
        writer.writerows(table)


def json_rows(runs: Sequence[RunSummary]) -> list[dict[str, Any]]:
    """`rows` for JSON, which has no NaN: None takes its place."""
    return [
        {key: None if isinstance(value, float) and not math.isfinite(value) else value for key, value in row.items()}
        for row in rows(runs)
    ]


def show(runs: Sequence[RunSummary], console: Console) -> None:
    """Print the table, the errors of failed runs, and what did not fit."""
    settings = settings_columns(runs)
    shown = {name: [_setting(value) for value in values] for name, values in list(settings.items())[:MOST_SETTINGS]}
    labels = run_names(runs)
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True, pad_edge=False)
    distinct = shown and len(set(zip(*shown.values(), strict=True))) == len(runs)
    by_settings = distinct and all(run.overrides is not None for run in runs)  # members of a sweep are their overrides
    if not by_settings:
        table.add_column("run", overflow="fold")
    for name in shown:
        table.add_column(escape(name), overflow="fold")
    table.add_column("status", no_wrap=True)  # figures stay whole in a narrow terminal; names are folded
    for heading, _ in FIGURES.values():
        table.add_column(heading, justify="right", no_wrap=True)
    for index, run in enumerate(runs):
        cells = [] if by_settings else [escape(labels[index])]
        cells += [escape(values[index]) for values in shown.values()]
        cells.append(f"[red]{run.status}[/]" if run.status == "failed" else run.status)
        cells += [_cell(getattr(run, name), form) for name, (_, form) in FIGURES.items()]
        table.add_row(*cells)
    console.print(table)
    for name, run in zip(labels, runs, strict=True):
        if run.error:
            console.print(f"[red]{escape(name)}[/]: {escape(run.error)}", soft_wrap=True, highlight=False)
    if len(settings) > len(shown):
        console.print(f"{len(settings) - len(shown)} more settings differ; --csv and --json have them")


def _setting(value: Any) -> str:
    """A setting that a run does not have, or leaves at null, is a dash."""
    return "-" if value is None or value == MISSING else str(value)


def _cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
