"""The `janus` block: defaults, and one clear error for each thing a user can get wrong."""

from __future__ import annotations

from typing import Any

import pytest
from omegaconf import OmegaConf

from fairchem_janus.config import SCHEDULES, SPLITS, JanusConfig
from fairchem_janus.schedule import FAMILIES, make_schedule


def test_an_absent_block_is_one_stage_and_one_micro_batch() -> None:
    config = JanusConfig.from_mapping(None)
    assert (config.pipeline_size, config.num_micro_batches, config.wave_size) == (1, 1, 1)
    assert (config.schedule, config.split, config.oversize) == ("wavek", "merged", "warn")
    assert config.debug_checksums is False


def test_a_wave_is_as_long_as_the_pipeline_unless_given() -> None:
    assert JanusConfig(pipeline_size=3, num_micro_batches=6).wave_size == 3
    assert JanusConfig(pipeline_size=3, num_micro_batches=6, wave_size=2).wave_size == 2


def test_reads_a_hydra_node() -> None:
    node = OmegaConf.create(
        {"janus": {"pipeline_size": 2, "num_micro_batches": "${n}", "schedule": "gpipe_2nd"}, "n": 5}
    )
    config = JanusConfig.from_mapping(node.janus)
    assert (config.pipeline_size, config.num_micro_batches, config.schedule) == (2, 5, "gpipe_2nd")


def test_every_schedule_it_accepts_can_be_made() -> None:
    assert set(SCHEDULES) <= set(FAMILIES)
    for name in SCHEDULES:
        assert make_schedule(name, num_stages=2, num_micro_batches=3).num_stages == 2


@pytest.mark.parametrize("block", [{"schedule": "auto"}, {"wave_size": "auto"}])
def test_two_keys_let_the_run_choose(block: dict[str, Any]) -> None:
    assert JanusConfig.from_mapping(block).chooses and not JanusConfig.from_mapping(None).chooses


def test_a_partition_from_yaml_is_a_plain_list() -> None:
    partition = JanusConfig.from_mapping(OmegaConf.create({"partition": [1, 3]})).partition
    assert partition == [1, 3] and type(partition) is list


@pytest.mark.parametrize("split", SPLITS)
def test_accepts_every_split(split: str) -> None:
    assert JanusConfig(split=split).split == split


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({"pipeline_size": 0}, "janus.pipeline_size must be an integer of at least 1, got 0"),
        ({"pipeline_size": None}, "janus.pipeline_size must be an integer of at least 1, got None"),
        ({"pipeline_size": True}, "janus.pipeline_size must be an integer of at least 1, got True"),
        ({"num_micro_batches": 0}, "janus.num_micro_batches must be an integer of at least 1, got 0"),
        ({"num_micro_batches": -3}, "janus.num_micro_batches must be an integer of at least 1, got -3"),
        ({"num_micro_batches": 2.5}, "janus.num_micro_batches must be an integer of at least 1, got 2.5"),
        ({"num_micro_batches": "4"}, "janus.num_micro_batches must be an integer of at least 1, got '4'"),
        ({"wave_size": 0}, "janus.wave_size must be an integer of at least 1, got 0"),
        ({"split": "late"}, "janus.split must be one of merged, eager, got 'late'"),
        ({"oversize": "drop"}, "janus.oversize must be one of warn, error, got 'drop'"),
        ({"on_nan": "zero"}, "janus.on_nan must be one of error, skip, got 'zero'"),
        ({"prefetch_steps": 0}, "janus.prefetch_steps must be an integer of at least 1, got 0"),
        ({"debug_checksums": "yes"}, "janus.debug_checksums must be true or false, got 'yes'"),
        ({"trace": 1}, "janus.trace must be true or false, got 1"),
        ({"max_in_flight": 0}, "janus.max_in_flight must be an integer of at least 1, got 0"),
        ({"max_ff_graphs": 1.5}, "janus.max_ff_graphs must be an integer of at least 1, got 1.5"),
        ({"profile_steps": -1}, "janus.profile_steps must be an integer of at least 0, got -1"),
        (
            {"schedule": "auto", "profile_steps": 0},
            "janus.profile_steps must be an integer of at least 1 for what `auto` chooses, got 0",
        ),
        (
            {"schedule": "gpipe_2nd", "wave_size": "auto"},
            "janus.wave_size=auto chooses k of schedule wavek, but janus.schedule=gpipe_2nd",
        ),
        (
            {"schedule": "auto", "memory_budget_gib": 0},
            "janus.memory_budget_gib must be a positive number, got 0",
        ),
        (
            {"memory_budget_gib": 8},
            "janus.memory_budget_gib is for schedule auto or wave_size auto; janus.schedule=wavek is kept whatever it "
            "takes. Limit it with janus.max_in_flight",
        ),
        (
            {"partition": [2, "2"]},
            "janus.partition must be a list of integers such as [5, 6, 6, 5], got [2, '2']",
        ),
        ({"partition": "2,2"}, "janus.partition must be a list of integers such as [5, 6, 6, 5], got '2,2'"),
    ],
)
def test_a_bad_value_is_named_with_what_is_allowed(block: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as caught:
        JanusConfig.from_mapping(block)
    assert str(caught.value) == message


def test_an_unknown_schedule_is_answered_with_all_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        JanusConfig(schedule="zb")
    assert str(caught.value).startswith(f"janus.schedule must be one of {', '.join(SCHEDULES)}")
    assert str(caught.value).endswith("got 'zb'")


def test_several_stages_need_a_number_of_micro_batches() -> None:
    with pytest.raises(ValueError) as caught:
        JanusConfig.from_mapping({"pipeline_size": 4})
    assert "janus.num_micro_batches is required when janus.pipeline_size is 4" in str(caught.value)
    assert "+runner.janus.num_micro_batches=8" in str(caught.value)


def test_a_misspelt_key_is_answered_with_the_nearest_one() -> None:
    with pytest.raises(ValueError) as caught:
        JanusConfig.from_mapping({"num_microbatches": 4})
    assert str(caught.value) == "unknown key janus.num_microbatches; did you mean janus.num_micro_batches?"


def test_an_unlike_key_is_answered_with_all_known_ones() -> None:
    with pytest.raises(ValueError) as caught:
        JanusConfig.from_mapping({"zzz": 4})
    assert str(caught.value).startswith("unknown key janus.zzz; known keys: pipeline_size, num_micro_batches, schedule")
