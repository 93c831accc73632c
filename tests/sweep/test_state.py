"""What a member's folder and console log tell."""

from __future__ import annotations

import pytest

from fairchem_janus.sweep.state import last_error

HYDRA = """Traceback (most recent call last):
  File "hydra/_internal/config_loader_impl.py", line 391, in _apply_overrides_to_config
omegaconf.errors.ConfigAttributeError: Key 'lrr' is not in struct
    full_key: lrr
    object_type=dict

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "fairchem", line 8, in <module>
hydra.errors.ConfigCompositionException: Could not override 'lrr'.
To append to your config use +lrr=1
"""

ELASTIC = """[rank1]: Traceback (most recent call last):
[rank1]:   File "runner.py", line 3, in run
[rank1]: fairchem_janus.engine.PhaseError: rank 1 (d=0 p=1 g=0), stage 1, FE of micro-batch 0
W1130 01:02:03.000000 12 torch/distributed/elastic/multiprocessing/api.py:900] Sending process 13 closing signal SIGTERM
Traceback (most recent call last):
torch.distributed.elastic.multiprocessing.errors.ChildFailedError:
============================================================
fairchem_janus FAILED
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        (
            HYDRA,
            "hydra.errors.ConfigCompositionException: Could not override 'lrr'. To append to your config use +lrr=1",
        ),
        (ELASTIC, "fairchem_janus.engine.PhaseError: rank 1 (d=0 p=1 g=0), stage 1, FE of micro-batch 0"),
        ("ValueError: a\nINFO:root:more\nKeyError: 'b'\n", "KeyError: 'b'"),
        ("AssertionError\n", "AssertionError"),
        ("ValueError: a\n==========\n", "ValueError: a"),
        ("bash: out of tea\n\n", "exit status 3; bash: out of tea"),
        ("", "exit status 3"),
        (f"ValueError: {'x' * 1000}", f"ValueError: {'x' * 285}..."),
    ],
)
def test_the_last_error_of_a_log(log: str, error: str) -> None:
    assert last_error(log, 3) == error


def test_a_signal_is_named() -> None:
    assert last_error("", -9) == "signal 9"
