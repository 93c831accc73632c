"""The `janus.gars` block of a job file: what `GARSBatchSampler` is told.

::

    runner:
      janus:
        num_micro_batches: 8
        gars:
          graphs_per_step: 64
          cost: edges

Everything a user can get wrong here raises `ValueError` naming the key and the fix.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from fairchem_janus.data.cost import LinearCost

PER_STEP = ("graphs_per_step", "atoms_per_step", "edges_per_step")
_LINEAR_KEYS = {"per_atom", "per_edge"}


@dataclass(kw_only=True, slots=True)
class GarsConfig:
    """How global batches are formed and packed. Exactly one of the three sizes of a global batch must be given."""

    graphs_per_step: int | None = None
    """Graphs of a global batch, over all replicas."""

    atoms_per_step: int | None = None
    """Atoms of a global batch, over all replicas, on average: the epoch is cut into round(total / this) equal steps."""

    edges_per_step: int | None = None
    """The same in edges."""

    incomplete: Literal["short", "drop"] = "short"
    """Graphs at the end of an epoch that do not fill `graphs_per_step`: a `short` step of their own, or `drop` (other
    graphs in every epoch, named in the data report). Steps by atoms or edges leave no such rest."""

    cost: str | dict[str, float] = "atoms"
    """What is balanced: `atoms` (the paper), `edges` (what time follows; needs edge counts in the metadata), or
    `{per_atom: a, per_edge: b}`, such as a run fits to its own phase times (`graph_cost` in `profile.json`)."""

    max_atoms: int | None = None
    """Budget of a micro-batch in atoms, never exceeded: where `num_micro_batches` do not suffice, a step has more. A
    graph above it is left out, see `janus.oversize`."""

    max_edges: int | None = None
    """The same in edges."""

    rank_budget: float | None = None
    """C_rank: a micro-batch is comm-free if its largest graph costs no more. Default load / G, rounded up."""

    method: Literal["gars", "sequential"] = "gars"
    """`sequential` is the baseline: the same global batches cut in sequence, as fairchem's sampler does."""

    shuffle: bool = True
    """Another order of the graphs in each epoch; false: always that of the data set."""

    seed: int = 0
    """Of that order, and of the order inside the micro-batches."""

    edges_column: str | None = None
    """Column of `metadata.npz` with the edge counts. Default: the one for the cutoff and `max_neighbors` of the job's
    backbone, such as `nedges_6_max30`, else `nedges_6`."""

    def __post_init__(self) -> None:
        given = [name for name in PER_STEP if getattr(self, name) is not None]
        if len(given) != 1:
            raise ValueError(
                f"janus.gars needs exactly one of {', '.join(PER_STEP)}, the size of a global batch over all replicas; "
                f"got {' and '.join(given) or 'none'}"
            )
        for name in (*PER_STEP, "max_atoms", "max_edges"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise ValueError(f"janus.gars.{name} must be an integer of at least 1, got {value!r}")
        for name, choices in (("incomplete", ("short", "drop")), ("method", ("gars", "sequential"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"janus.gars.{name} must be one of {', '.join(choices)}, got {getattr(self, name)!r}")
        if not isinstance(self.shuffle, bool):
            raise ValueError(f"janus.gars.shuffle must be true or false, got {self.shuffle!r}")
        if not isinstance(self.seed, int) or isinstance(self.seed, bool) or self.seed < 0:
            raise ValueError(f"janus.gars.seed must be an integer of at least 0, got {self.seed!r}")
        if self.rank_budget is not None and not (_is_number(self.rank_budget) and self.rank_budget > 0):
            raise ValueError(f"janus.gars.rank_budget must be a positive number, got {self.rank_budget!r}")
        self._check_cost()

    def _check_cost(self) -> None:
        if self.cost in ("atoms", "edges"):
            return
        if not (isinstance(self.cost, Mapping) and set(self.cost) == _LINEAR_KEYS):
            raise ValueError(f"janus.gars.cost must be atoms, edges or {{per_atom: a, per_edge: b}}, got {self.cost!r}")
        numbers = list(self.cost.values())
        if not (all(_is_number(value) and 0 <= value < float("inf") for value in numbers) and any(numbers)):
            raise ValueError(f"janus.gars.cost must hold two numbers, not negative and not both zero, got {self.cost}")

    @property
    def cost_function(self) -> Literal["atoms", "edges"] | LinearCost:
        """`cost` as `gars.pack` takes it."""
        if isinstance(self.cost, str):
            return "atoms" if self.cost == "atoms" else "edges"
        return LinearCost(per_atom=float(self.cost["per_atom"]), per_edge=float(self.cost["per_edge"]))

    @property
    def needs_edges(self) -> bool:
        """Whether edge counts must be known before a graph is loaded."""
        return self.cost != "atoms" or self.max_edges is not None or self.edges_per_step is not None

    @classmethod
    def from_mapping(cls, block: Mapping[str, Any]) -> GarsConfig:
        """Build from the `janus.gars` block (a dict or a DictConfig).

        Raises:
            ValueError: an unknown key (with the nearest known one) or a bad value.
        """
        if not isinstance(block, Mapping):
            raise ValueError(f"janus.gars must be a block of keys such as {{graphs_per_step: 64}}, got {block!r}")
        values: dict[str, Any] = {
            key: dict(value) if isinstance(value, Mapping) else value for key, value in block.items()
        }
        reject_unknown_keys(values, [field.name for field in fields(cls)], prefix="janus.gars")
        return cls(**values)


def reject_unknown_keys(given: Iterable[Any], known: list[str], *, prefix: str) -> None:
    """Raise ValueError for a key of a block that is not known, with the nearest one that is."""
    for key in given:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, n=1)
            hint = f"did you mean {prefix}.{near[0]}?" if near else f"known keys: {', '.join(known)}"
            raise ValueError(f"unknown key {prefix}.{key}; {hint}")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
