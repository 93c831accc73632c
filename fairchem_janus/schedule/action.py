"""What a schedule is made of: phases, actions and one ordered list of actions per pipeline rank.

A schedule is data. One row per pipeline rank, one cell per action, readable and writable as CSV::

    FE0,FE1,FF0,FF1,BF0,BF1,BE0,BE1     <- row 0: what rank 0 executes, left to right
    FE0,FE1,FF0,FF1,BF0,BF1,BE0,BE1     <- row 1

`FE3` is phase FE of micro-batch 3 on the stage that the row owns (in a folded schedule row s holds stage s). `FE3@2`
names the stage where it is not the row's: unfolded schedules, in which the forces of a stage are computed on another
rank than its energy, need that.

The rows say only in which order each rank works. When an action can start follows from the data flow (`dataflow.py`),
so the same rows are executed by the runtime, timed by the simulator and checked by the validator.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path

CELL = re.compile(r"(FE|FF|BF|BE)(\d+)(?:@(\d+))?")


class Phase(StrEnum):
    """The four phases of a micro-batch on a stage, in the order in which they run."""

    FE = "FE"
    """Energy forward: h[s] -> h[s+1]."""
    FF = "FF"
    """Force forward: differentiates FE with `create_graph`, g[s+1] -> g[s]."""
    BF = "BF"
    """Backward of FF: v[s] -> v[s+1]."""
    BE = "BE"
    """Backward of FE: u[s+1] -> u[s]."""


TRAINING_PHASES = (Phase.FE, Phase.FF, Phase.BF, Phase.BE)
EVALUATION_PHASES = (Phase.FE, Phase.FF)


@dataclass(frozen=True, slots=True)
class Action:
    """One phase of one micro-batch on one stage."""

    phase: Phase
    stage: int
    micro_batch: int

    def cell(self, row: int) -> str:
        """Return the CSV cell of this action in `row`: `FE3`, or `FE3@2` if the row is not the action's stage."""
        text = f"{self.phase}{self.micro_batch}"
        return text if row == self.stage else f"{text}@{self.stage}"

    @classmethod
    def parse(cls, cell: str, row: int) -> Action:
        """Read one cell of `row`; the inverse of `cell`. Raises ValueError if the text is not a cell."""
        match = CELL.fullmatch(cell.strip())
        if match is None:
            raise ValueError(
                f"unknown cell {cell.strip()!r}: expected a phase (FE, FF, BF or BE) and a micro-batch, such as FE3, "
                "or FE3@2 where the stage is not the row's"
            )
        phase, micro_batch, stage = match.groups()
        return cls(Phase(phase), row if stage is None else int(stage), int(micro_batch))

    def __str__(self) -> str:
        return f"{self.phase}{self.micro_batch}@{self.stage}"


@dataclass(frozen=True, slots=True)
class Schedule:
    """An ordered list of actions for each of `num_stages` pipeline ranks. Nothing is checked here: see `validate`."""

    num_stages: int
    num_micro_batches: int
    rows: tuple[tuple[Action, ...], ...]
    """`rows[r]` is what rank r executes, in order."""
    name: str = "custom"
    recompute: bool = False
    """Whether FF rebuilds FE's graph even on the rank that ran FE (on another rank it always does). Not in the CSV."""

    @property
    def phases(self) -> tuple[Phase, ...]:
        """All four phases, or FE and FF alone if no row holds a backward action (an evaluation schedule)."""
        has_backward = any(action.phase in (Phase.BF, Phase.BE) for row in self.rows for action in row)
        return TRAINING_PHASES if has_backward else EVALUATION_PHASES

    @property
    def is_folded(self) -> bool:
        """Whether stage s has all its phases in row s, and FF differentiates the very graph that FE built (SymFold)."""
        return not self.recompute and all(
            action.stage == row for row, actions in enumerate(self.rows) for action in actions
        )

    def recomputes(self, stage: int, row: int) -> bool:
        """Whether FF of a stage, running in `row`, first recomputes FE."""
        return self.recompute or not any(a.phase is Phase.FE and a.stage == stage for a in self.rows[row])

    def truncated(self, num_micro_batches: int) -> Schedule:
        """Return this schedule without the actions of micro-batches `num_micro_batches` and above.

        This is how a last global batch with fewer micro-batches runs: dropping whole micro-batches from a valid
        schedule leaves a valid one. Raises ValueError if there are fewer than asked for, or less than one is asked for.
        """
        if not 1 <= num_micro_batches <= self.num_micro_batches:
            raise ValueError(
                f"a schedule of {self.num_micro_batches} micro-batches cannot be cut to {num_micro_batches}: "
                f"ask for 1 to {self.num_micro_batches}"
            )
        rows = tuple(tuple(a for a in row if a.micro_batch < num_micro_batches) for row in self.rows)
        return replace(self, num_micro_batches=num_micro_batches, rows=rows)

    def without(self, micro_batches: Collection[int]) -> Schedule:
        """Return this schedule without the actions of some micro-batches, whose numbers then stand for nothing."""
        if not micro_batches:
            return self
        rows = tuple(tuple(a for a in row if a.micro_batch not in micro_batches) for row in self.rows)
        return replace(self, rows=rows)

    def to_csv(self, path: str | Path | None = None) -> str:
        """Return the schedule as CSV text, one row per rank, and write it to `path` if one is given."""
        text = "".join(",".join(a.cell(r) for a in row) + "\n" for r, row in enumerate(self.rows))
        if path is not None:
            Path(path).write_text(text)
        return text

    @classmethod
    def from_csv(
        cls,
        path: str | Path,
        *,
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
    ) -> Schedule:
        """Read a schedule from a CSV file, one row per rank; empty cells may only stand at the end of a row.

        `num_stages` and `num_micro_batches` are what the job needs; left out, they are taken from the file (number of
        rows, highest micro-batch + 1). Only the text is checked here: run `validate` on the result.

        Raises ValueError, naming file, row and column (both counted from 1, as a spreadsheet does), for an unknown
        or a misplaced empty cell, a stage or micro-batch out of range, or a wrong number of rows.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            row = Path(path).read_bytes()[: error.start].count(b"\n") + 1
            raise ValueError(
                f"{path}, row {row}: this is no text in UTF-8; is it a spreadsheet's own format?"
            ) from None
        return cls.parse_csv(
            text, name=Path(path).stem, source=path, num_stages=num_stages, num_micro_batches=num_micro_batches
        )

    @classmethod
    def parse_csv(
        cls,
        text: str,
        *,
        name: str,
        source: str | Path = "CSV text",
        num_stages: int | None = None,
        num_micro_batches: int | None = None,
    ) -> Schedule:
        """Read a schedule from CSV text as `from_csv` does; `source` is what errors call it."""
        lines = [(number, line) for number, line in enumerate(csv.reader(io.StringIO(text)), 1) if line]
        wanted = len(lines) if num_stages is None else num_stages
        if not lines or len(lines) != wanted:
            where = f"row {min(len(lines), wanted) + 1}, column 1"
            raise ValueError(
                f"{source}, {where}: the file has {len(lines)} row(s), but the pipeline has "
                f"{num_stages or 'at least 1'} stage(s); a schedule has one row per stage"
            )
        rows = tuple(
            _parse_line(line, row, number, source, wanted, num_micro_batches)
            for row, (number, line) in enumerate(lines)
        )
        if num_micro_batches is None:
            num_micro_batches = max((a.micro_batch + 1 for row in rows for a in row), default=0)
        return cls(wanted, num_micro_batches, rows, name)


def _parse_line(
    line: list[str], row: int, number: int, source: str | Path, num_stages: int, num_micro_batches: int | None
) -> tuple[Action, ...]:
    """Parse the cells of one CSV line; `number` is its 1-based line in the file, `row` its 0-based rank."""
    while line and not line[-1].strip():
        line = line[:-1]
    actions = []
    for column, cell in enumerate(line, 1):
        try:
            action = Action.parse(cell, row)
            if action.stage >= num_stages:
                raise ValueError(f"cell {cell.strip()!r} names stage {action.stage}, but there are {num_stages} stages")
            if num_micro_batches is not None and action.micro_batch >= num_micro_batches:
                raise ValueError(
                    f"cell {cell.strip()!r} names micro-batch {action.micro_batch}, but a step has "
                    f"{num_micro_batches} micro-batches, counted from 0"
                )
        except ValueError as error:
            raise ValueError(f"{source}, row {number}, column {column}: {error}") from None
        actions.append(action)
    return tuple(actions)
