"""Which members a sweep has: Hydra's own sweep syntax, expanded to the overrides of every member.

>>> [member.overrides for member in expand(["lr=1e-4,4e-4", "steps=10"])]
[('lr=0.0001', 'steps=10'), ('lr=0.0004', 'steps=10')]

The syntax is that of `hydra --multirun`: `a,b`, `choice(a,b)`, `range(1,4)`; commas inside quotes, brackets and braces
do not separate. A member is known by its overrides: the same overrides are the same member, in whatever order they
stand and in whatever sweep.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

OWN_KEYS = ("job.run_dir", "job.timestamp_id")
"""What a sweep sets for each member, so that its run folder is known beforehand."""

LONGEST_NAME = 80


@dataclass(frozen=True, slots=True)
class Member:
    """One run of a sweep.

    Attributes:
        overrides: for the fairchem command line.
        swept: those among them that the sweep varies.
    """

    overrides: tuple[str, ...]
    swept: tuple[str, ...]

    @property
    def digest(self) -> str:
        """Of all overrides; tells a member from others."""
        return hashlib.sha256(json.dumps(sorted(self.overrides)).encode()).hexdigest()[:8]

    def folder_in(self, sweep: Path) -> Path:
        """Its run folder in the folder of a sweep: one that has its digest, else one named after its swept values."""
        there = sorted(sweep.glob(f"*-{self.digest}"))
        readable = "_".join(_readable(override) for override in self.swept)[:LONGEST_NAME] or "run"
        return there[0] if there else sweep / f"{readable}-{self.digest}"

    def __str__(self) -> str:
        return " ".join(self.swept or self.overrides) or "the job as it is"


def _readable(override: str) -> str:
    key, _, value = override.partition("=")
    return re.sub(r"[^\w.+]+", "-", f"{re.split('[./]', key)[-1]}-{value}").strip("-.")


def expand(overrides: Sequence[str]) -> list[Member]:
    """The members of a sweep, each once, the last override varying fastest.

    Raises:
        ValueError: an override that Hydra cannot parse (with Hydra's message), a sweep without an end (`interval`) or
            without a value, one that needs the job's folders (`glob`), a key that is given twice, or one that the
            sweep itself sets.
    """
    parsed = [_parse(text) for text in overrides]
    _check_keys(parsed)
    varies = [override.is_sweep_override() for override in parsed]
    members: dict[str, Member] = {}
    for chosen in itertools.product(*map(_values, parsed)):
        member = Member(overrides=chosen, swept=tuple(itertools.compress(chosen, varies)))
        members.setdefault(member.digest, member)
    return list(members.values())


def _parse(text: str) -> Override:
    key, equal, value = text.partition("=")
    if not equal and not text.startswith("~"):
        raise ValueError(f"{text}: write {text}=VALUE")
    if equal and not value.strip():
        raise ValueError(f"{text} has no value; for an empty text write \"{key}=''\", with the quotes")
    try:
        return OverridesParser.create().parse_override(text)
    except HydraException as error:
        raise ValueError(f"{text}: {' '.join(str(error).split())}") from None


def _check_keys(overrides: Sequence[Override]) -> None:
    """Each key once; `k`, `+k` and `++k` are the same."""
    keys = set()
    for override in overrides:
        if override.key_or_group in OWN_KEYS:
            raise ValueError(
                f"{override.input_line}: a sweep gives every member its own {override.key_or_group}; choose the folder "
                "of the whole sweep with --sweep-dir"
            )
        key = override.get_key_element().lstrip("+")
        if key in keys:
            raise ValueError(f"{key} is given twice; write all of its values in one override: {key}=A,B")
        keys.add(key)


def _values(override: Override) -> list[str]:
    """The overrides that one stands for: one for each of its values."""
    text, key = override.input_line, override.get_key_element()
    if not override.is_sweep_override():
        is_number = isinstance(override.value(), int | float)  # 1e-4 and 0.0001 are the same
        return [f"{key}={override.get_value_element_as_str()}" if is_number else text]
    try:
        values = [f"{key}={value}" for value in override.sweep_string_iterator()]
    except HydraException as error:
        raise ValueError(f"{text}: {' '.join(str(error).split())}") from None
    if not values:
        raise ValueError(f"{text} has no values")
    return values
