"""GARSBatchSampler: each graph once an epoch or reported, the same steps at any D, resumable at every step."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.data.gars_sampler import GARSBatchSampler
from fairchem_janus.data.sampler import MicroBatchPlan
from tests.data.rows import sampler


def epoch_of(made: GARSBatchSampler, epoch: int = 0, start: int = 0) -> list[list[MicroBatchPlan]]:
    made.set_epoch_and_start_iteration(epoch, start)
    return list(made)


def graphs_of(step) -> list[int]:
    return [graph for plan in step for graph in plan.graphs]


graphs = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=50)
"""(atoms, edges per atom) of each graph."""

global_batches = st.one_of(
    st.builds(
        lambda n, incomplete: {"graphs_per_step": n, "incomplete": incomplete},
        st.integers(1, 60),
        st.sampled_from(["short", "drop"]),
    ),
    st.builds(lambda n: {"atoms_per_step": n}, st.integers(1, 20_000)),
    st.builds(lambda n: {"edges_per_step": n}, st.integers(1, 200_000)),
)
budgets = st.fixed_dictionaries({}, optional={"max_atoms": st.integers(1, 400), "max_edges": st.integers(0, 9000)})


def make_all(drawn, D, N, G, arguments) -> list[GARSBatchSampler] | None:
    """The samplers of all replicas; None where there is rightly none."""
    sizes, density = np.array(drawn).T
    try:
        return [sampler(sizes, D, d, N, sizes * density, gp_size=G, **arguments) for d in range(D)]
    except ValueError as error:
        reasons = ("no graph is left", "make no global batch", "no graph has an edge")
        if not any(reason in str(error) for reason in reasons):
            raise
        return None


# ---- promises --------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    drawn=graphs,
    D=st.integers(1, 4),
    N=st.integers(1, 5),
    G=st.integers(1, 3),
    arguments=global_batches,
    budget=budgets,
    cost=st.sampled_from(["atoms", "edges", {"per_atom": 0.5, "per_edge": 0.1}]),
    method=st.sampled_from(["gars", "sequential"]),
    epoch=st.integers(0, 3),
)
def test_every_graph_is_used_once_an_epoch_or_reported(drawn, D, N, G, arguments, budget, cost, method, epoch):
    budget = {name: limit for name, limit in budget.items() if limit}
    made = make_all(drawn, D, N, G, {**arguments, **budget, "cost": cost, "method": method})
    if made is None:
        return
    sizes, density = np.array(drawn).T
    edges = sizes * density
    dropped = []
    for replica in made:
        replica.on_drop = lambda number, left: dropped.append((number, left.tolist()))
    epochs = [epoch_of(replica, epoch) for replica in made]
    assert {len(steps) for steps in epochs} == {len(made[0])}
    assert all(number == epoch and left == dropped[0][1] for number, left in dropped)
    left_out = dropped[0][1] if dropped else []
    used = [graph for steps in epochs for step in steps for graph in graphs_of(step)]
    assert sorted([*used, *left_out, *made[0].over_budget.tolist()]) == list(range(len(drawn)))
    for graph in made[0].over_budget:
        assert sizes[graph] > budget.get("max_atoms", np.inf) or edges[graph] > budget.get("max_edges", np.inf)
    if arguments.get("incomplete") == "drop":
        assert len(left_out) < arguments["graphs_per_step"]
    else:
        assert not left_out
    for step in zip(*epochs, strict=True):
        assert any(step), "a step without a graph"
        for plan in (plan for replica in step for plan in replica):
            assert plan.graphs
            assert sizes[list(plan.graphs)].sum() <= budget.get("max_atoms", np.inf)
            assert edges[list(plan.graphs)].sum() <= budget.get("max_edges", np.inf)
            assert plan.num_edges in (None, edges[list(plan.graphs)].sum())
            check_tag(plan, G)
        if not budget:
            assert all(len(replica) <= N for replica in step)


def check_tag(plan: MicroBatchPlan, G: int) -> None:
    assert plan.tag in ("comm-free", "dist")
    if plan.tag == "comm-free":
        assert len(plan.local_bins) == G
        assert all(plan.local_bins), "a rank without atoms"
        assert sorted(place for members in plan.local_bins for place in members) == list(range(len(plan.graphs)))
    else:
        assert G > 1
        assert plan.local_bins == ()


@settings(max_examples=80, deadline=None)
@given(drawn=graphs, N=st.integers(1, 5), arguments=global_batches, budget=budgets, epoch=st.integers(0, 3))
def test_the_graphs_of_a_step_do_not_depend_on_replicas_or_micro_batches(drawn, N, arguments, budget, epoch):
    budget = {name: limit for name, limit in budget.items() if limit}
    expected = None
    for D, own_N, G in ((1, N, 1), (2, N, 2), (3, N + 1, 1)):
        made = make_all(drawn, D, own_N, G, {**arguments, **budget})
        if made is None:
            assert expected is None
            return
        epochs = [epoch_of(replica, epoch) for replica in made]
        steps = [sorted(g for replica in step for g in graphs_of(replica)) for step in zip(*epochs, strict=True)]
        assert expected is None or steps == expected
        expected = steps


@settings(max_examples=50, deadline=None)
@given(
    drawn=graphs,
    D=st.integers(1, 3),
    arguments=global_batches,
    cost=st.sampled_from(["atoms", "edges"]),
    epoch=st.integers(0, 3),
    data=st.data(),
)
def test_a_resumed_sampler_goes_on_bit_for_bit(drawn, D, arguments, cost, epoch, data):
    made = make_all(drawn, D, 3, 2, {**arguments, "cost": cost})
    if made is None:
        return
    start = data.draw(st.integers(0, len(made[0])))
    again = make_all(drawn, D, 3, 2, {**arguments, "cost": cost})
    for replica, resumed in zip(made, again, strict=True):
        epoch_of(replica, epoch + 1)  # what was iterated before leaves no trace
        assert epoch_of(resumed, epoch, start) == epoch_of(replica, epoch)[start:]


def test_an_epoch_has_an_order_of_its_own_unless_told_not_to():
    sizes = np.arange(1, 41)
    made = sampler(sizes, graphs_per_step=10)
    orders = [[sorted(graphs_of(step)) for step in epoch_of(made, epoch)] for epoch in (0, 1, 0)]
    assert orders[0] == orders[2] != orders[1]
    other = sampler(sizes, graphs_per_step=10, seed=1)
    assert [sorted(graphs_of(step)) for step in epoch_of(other)] != orders[0]
    fixed = sampler(sizes, graphs_per_step=10, shuffle=False)
    for epoch in (0, 1):
        assert [sorted(graphs_of(step)) for step in epoch_of(fixed, epoch)] == np.arange(40).reshape(4, 10).tolist()


@pytest.mark.parametrize("unit", ["atoms", "edges"])
def test_steps_by_atoms_or_edges_have_equal_shares(unit):
    rng = np.random.default_rng(0)
    sizes = np.clip(np.round(np.exp(rng.normal(3.0, 1.1, 3000))), 2, 500).astype(int)
    edges = sizes * rng.integers(5, 45, 3000)
    values = {"atoms": sizes, "edges": edges}[unit]
    wanted = int(values.sum() / 20.4)
    made = sampler(sizes, 2, 0, 4, edges, **{f"{unit}_per_step": wanted})
    assert len(made) == 20
    for epoch in range(3):
        steps, left = made.global_batches(epoch)
        assert len(left) == 0
        totals = np.array([values[step].sum() for step in steps])
        assert np.abs(totals - values.sum() / 20).max() <= values.max()


def test_gars_evens_out_what_a_step_has():
    rng = np.random.default_rng(0)
    sizes = np.clip(np.round(np.exp(rng.normal(3.0, 1.1, 2048))), 2, 500).astype(int)

    def worst(method: str) -> float:
        made = [sampler(sizes, 2, d, 4, graphs_per_step=256, method=method) for d in range(2)]
        ratios = []
        for step in zip(*map(epoch_of, made), strict=True):
            loads = [sizes[list(plan.graphs)].sum() for replica in step for plan in replica]
            ratios.append(max(loads) / np.mean(loads))
        return max(ratios)

    assert worst("gars") < 1.01 < 1.05 < worst("sequential")


def test_both_methods_have_the_same_graphs_in_a_step():
    sizes = np.random.default_rng(0).integers(1, 60, 200)
    steps = [
        [sorted(graphs_of(step)) for step in epoch_of(sampler(sizes, graphs_per_step=32, method=method))]
        for method in ("gars", "sequential")
    ]
    assert steps[0] == steps[1]


def test_more_micro_batches_rather_than_a_broken_budget():
    # 2 bins of 10 hold 6 + 3 and 6 + 3 at the most; 18 atoms would fit by their sum, 6 6 6 do not
    steps = epoch_of(sampler([6, 6, 6], graphs_per_step=3, max_atoms=10))
    assert [[len(plan.graphs) for plan in step] for step in steps] == [[1, 1, 1]]
    steps = epoch_of(sampler([1] * 100, N=1, graphs_per_step=100, max_atoms=10))
    assert len(steps[0]) == 10


# ---- odd data --------------------------------------------------------------------------------------------------------


def test_an_empty_data_set_is_an_error():
    with pytest.raises(ValueError, match="the data set is empty"):
        sampler([], graphs_per_step=4)


def test_one_graph_leaves_the_other_replicas_with_nothing():
    steps = [epoch_of(sampler([7], 3, d, 2, graphs_per_step=4)) for d in range(3)]
    assert [len(replica) for replica in steps] == [1, 1, 1]
    assert sorted(len(replica[0]) for replica in steps) == [0, 0, 1]


def test_all_graphs_equal():
    for step in epoch_of(sampler([10] * 24, N=4, graphs_per_step=12)):
        assert [len(plan.graphs) for plan in step] == [3, 3, 3, 3]


def test_one_giant_among_small_ones_in_steps_by_atoms():
    """The giant has the share of four steps; each of them still gets a graph, and every graph is used."""
    sizes = [5] * 20 + [400]
    made = sampler(sizes, atoms_per_step=100)
    for epoch in range(5):
        steps, _ = made.global_batches(epoch)
        assert len(steps) == len(made) == 5
        assert all(len(step) for step in steps)
        assert sorted(np.concatenate(steps)) == list(range(21))


def test_more_micro_batches_than_graphs():
    (step,) = epoch_of(sampler([5, 4, 3], N=8, graphs_per_step=3))
    assert sorted(plan.graphs for plan in step) == [(0,), (1,), (2,)]


def test_single_atoms_without_edges():
    steps = epoch_of(sampler([1] * 12, N=3, edges=[0] * 12, graphs_per_step=6, cost="edges"))
    assert [[len(plan.graphs) for plan in step] for step in steps] == [[2, 2, 2], [2, 2, 2]]
    assert all(plan.num_edges == 0 for step in steps for plan in step)
    with pytest.raises(ValueError, match="no graph has an edge"):
        sampler([1] * 12, edges=[0] * 12, edges_per_step=6)


def test_all_graphs_above_the_budget_is_an_error():
    with pytest.raises(ValueError, match=r"all 2 exceed the budget of a micro-batch \(4 atoms\); the smallest has 5"):
        sampler([5, 6], graphs_per_step=1, max_atoms=4)


def test_dropping_the_only_step_is_an_error():
    with pytest.raises(ValueError, match="the 3 graphs make no global batch of graphs_per_step=4, and incomplete=drop"):
        sampler([5, 6, 7], graphs_per_step=4, incomplete="drop")


def test_a_rank_outside_the_replicas_is_an_error():
    with pytest.raises(ValueError, match="rank must be 0 to 1 for 2 replicas, got 2"):
        sampler([5], 2, 2, graphs_per_step=4)
