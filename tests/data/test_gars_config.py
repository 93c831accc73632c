"""The `janus.gars` block: part of the `janus` block, and one clear error for each thing a user can get wrong."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from omegaconf import OmegaConf

from fairchem_janus.config import JanusConfig
from fairchem_janus.data.gars_config import GarsConfig


def test_the_block_is_part_of_the_janus_block():
    node = OmegaConf.create({"gars": {"graphs_per_step": 8, "cost": {"per_atom": 1, "per_edge": 0.5}}})
    config = JanusConfig.from_mapping(node)
    assert config.gars == GarsConfig(graphs_per_step=8, cost={"per_atom": 1, "per_edge": 0.5})
    assert config.gars.cost_function(np.array([2]), np.array([4])) == [4.0]
    assert JanusConfig.from_mapping({"gars": None}).gars is None
    assert JanusConfig().gars is None


@pytest.mark.parametrize(
    ("block", "message"),
    [
        ({}, "janus.gars needs exactly one of graphs_per_step, atoms_per_step, edges_per_step.*got none"),
        ({"graphs_per_step": 4, "atoms_per_step": 4}, "got graphs_per_step and atoms_per_step"),
        ({"graph_per_step": 4}, "unknown key janus.gars.graph_per_step; did you mean janus.gars.graphs_per_step?"),
        ({"zzz": 4}, "unknown key janus.gars.zzz; known keys: graphs_per_step, "),
        (8, "janus.gars must be a block of keys such as {graphs_per_step: 64}, got 8"),
        ({"graphs_per_step": 0}, "janus.gars.graphs_per_step must be an integer of at least 1, got 0"),
        ({"graphs_per_step": 4, "max_atoms": 2.5}, "janus.gars.max_atoms must be an integer of at least 1, got 2.5"),
        ({"graphs_per_step": 4, "max_edges": True}, "janus.gars.max_edges must be an integer of at least 1, got True"),
        ({"graphs_per_step": 4, "incomplete": "pad"}, "janus.gars.incomplete must be one of short, drop, got 'pad'"),
        ({"graphs_per_step": 4, "method": "x"}, "janus.gars.method must be one of gars, sequential, got 'x'"),
        ({"graphs_per_step": 4, "shuffle": 1}, "janus.gars.shuffle must be true or false, got 1"),
        ({"graphs_per_step": 4, "seed": -1}, "janus.gars.seed must be an integer of at least 0, got -1"),
        ({"graphs_per_step": 4, "rank_budget": 0}, "janus.gars.rank_budget must be a positive number, got 0"),
        ({"graphs_per_step": 4, "cost": "time"}, r"janus.gars.cost must be atoms, edges or {per_atom: a, per_edge: b}"),
        ({"graphs_per_step": 4, "cost": {"per_atom": 1}}, "janus.gars.cost must be atoms, edges or"),
        ({"graphs_per_step": 4, "cost": {"per_atom": -1, "per_edge": 1}}, "two numbers, not negative"),
        ({"graphs_per_step": 4, "cost": {"per_atom": 0, "per_edge": 0}}, "not both zero"),
    ],
)
def test_a_bad_setting_is_named_with_what_is_allowed(block, message):
    with pytest.raises(ValueError, match=message):
        JanusConfig.from_mapping({"gars": block})


def test_prefetch_steps_must_be_positive():
    with pytest.raises(ValueError, match=r"janus.prefetch_steps must be an integer of at least 1, got 0"):
        JanusConfig.from_mapping({"prefetch_steps": 0})


def test_the_override_group_is_a_valid_block():
    file = Path(__file__).parents[2] / "hydra_configs" / "janus" / "gars.yaml"
    config = JanusConfig.from_mapping(OmegaConf.load(file).runner.janus)
    assert config.gars == GarsConfig(graphs_per_step=24)
