"""The pairwise generator behind the option matrix."""

from __future__ import annotations

import pytest

from tests.integration.pairwise import Assignment, all_pairs, pairs_of, pairwise

OPTIONS = {"colour": ("red", "green", "blue"), "size": ("S", "M"), "shape": ("cube", "ball", "cone"), "new": ("y", "n")}


def anything(case: Assignment) -> bool:
    return True


def no_small_balls(case: Assignment) -> bool:
    return not (case.get("size") == "S" and case.get("shape") == "ball")


@pytest.mark.parametrize("allowed", [anything, no_small_balls])
def test_every_allowed_pair_occurs_in_an_allowed_assignment_of_all_options(allowed) -> None:
    cases = pairwise(OPTIONS, allowed=allowed, seed=0)
    assert all(case.keys() == OPTIONS.keys() and allowed(case) for case in cases)
    assert {pair for case in cases for pair in pairs_of(case)} == set(all_pairs(OPTIONS, allowed))


def test_the_set_is_much_smaller_than_all_combinations() -> None:
    assert 9 <= len(pairwise(OPTIONS, allowed=anything, seed=0)) <= 12 < 36


def test_same_seed_gives_the_same_cases() -> None:
    first, again = (pairwise(OPTIONS, allowed=no_small_balls, seed=3) for _ in range(2))
    assert first == again
    assert first != pairwise(OPTIONS, allowed=no_small_balls, seed=4)


def test_a_pair_that_cannot_be_completed_is_named() -> None:
    def impossible(case: Assignment) -> bool:
        return not (case.get("colour") == "red" and case.get("size") == "S" and "new" in case)

    with pytest.raises(ValueError, match=r"\{'colour': 'red', 'size': 'S'\} is in no allowed assignment"):
        pairwise(OPTIONS, allowed=impossible, seed=0)
