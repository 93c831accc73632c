"""What a resumed run draws is what the uninterrupted one drew."""

from __future__ import annotations

import random

import numpy as np
import torch

from fairchem_janus.checkpoint.random_state import RandomState

CPU = torch.device("cpu")


def draw() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))  # noqa: NPY002 - that generator is meant


def test_the_batch_in_hand_is_drawn_again() -> None:
    """Saved after a batch was fetched: a resumed run fetches it once more."""
    state = RandomState(CPU)
    state.before_batch()
    batch = draw()
    saved = state.state()
    state.batch_in_use()
    step = draw()

    resumed = RandomState(CPU)
    resumed.load(saved)
    draw()  # whatever is drawn on the way, such as the seed of an iterator over the loader
    resumed.before_batch()
    assert draw() == batch
    assert draw() == step


def test_after_the_last_step_the_present_state_is_saved() -> None:
    state = RandomState(CPU)
    state.before_batch()
    draw()
    state.batch_in_use()
    draw()
    saved = state.state()
    expected = draw()
    state.load(saved)
    state.before_batch()
    assert draw() == expected


def test_a_run_that_takes_no_step_saves_what_it_loaded() -> None:
    saved = RandomState(CPU).state()
    expected = draw()
    idle = RandomState(CPU)
    idle.load(saved)
    draw()
    resumed = RandomState(CPU)
    resumed.load(idle.state())
    resumed.before_batch()
    assert draw() == expected
