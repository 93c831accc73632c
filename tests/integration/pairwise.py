"""A small set of combinations in which every pair of values of two options occurs."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

Assignment = dict[str, str]
Options = Mapping[str, Sequence[str]]

_CANDIDATES = 20
"""Assignments tried for each case; more make the set a little smaller and take longer."""


def pairwise(options: Options, *, allowed: Callable[[Assignment], bool], seed: int) -> list[Assignment]:
    """Greedy all-pairs set, the assignments with most new pairs first.

    Args:
        allowed: whether an assignment, of some of the options, is possible; one that is not must not become possible
            by adding to it.

    Raises:
        ValueError: a pair is allowed by itself but in no assignment of all options.
    """
    rng = random.Random(seed)
    missing = dict.fromkeys(all_pairs(options, allowed))
    cases: list[Assignment] = []
    while missing:
        start = next(iter(missing))
        found = [_extend(dict(start), options, allowed, missing, rng) for _ in range(_CANDIDATES)]
        complete = [case for case in found if case is not None]
        if not complete:
            raise ValueError(f"{dict(start)} is in no allowed assignment of all options")
        best = max(complete, key=lambda case: sum(pair in missing for pair in pairs_of(case)))
        for pair in pairs_of(best):
            missing.pop(pair, None)
        cases.append({name: best[name] for name in options})
    return cases


Pair = tuple[tuple[str, str], tuple[str, str]]


def pairs_of(case: Assignment) -> list[Pair]:
    """Pairs of (option, value) in an assignment, each in one fixed order."""
    return list(combinations(sorted(case.items()), 2))


def all_pairs(options: Options, allowed: Callable[[Assignment], bool]) -> list[Pair]:
    """Every allowed pair of values of two options."""
    values = sorted((name, value) for name, choices in options.items() for value in choices)
    return [(a, b) for a, b in combinations(values, 2) if a[0] != b[0] and allowed(dict([a, b]))]


def _extend(
    case: Assignment,
    options: Options,
    allowed: Callable[[Assignment], bool],
    missing: Mapping[Pair, None],
    rng: random.Random,
) -> Assignment | None:
    """Give the other options, in random order, the value that covers most missing pairs; None in a dead end."""
    rest = [name for name in options if name not in case]
    rng.shuffle(rest)
    for name in rest:
        choices = [value for value in options[name] if allowed(case | {name: value})]
        if not choices:
            return None
        rng.shuffle(choices)

        def gain(value: str, name: str = name) -> int:
            new = (name, value)
            return sum((min(new, old), max(new, old)) in missing for old in case.items())

        case[name] = max(choices, key=gain)
    return case
