"""GARS: every graph once, budgets kept, loads even, tags right; what packing gains on real and generated data."""

from __future__ import annotations

import os
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.data.balance import balance, compare, edges_over_ranks, histogram, packing_stats
from fairchem_janus.data.binning import greedy, smallest_cap
from fairchem_janus.data.cost import LinearCost, fit_cost
from fairchem_janus.data.frames import load_sizes
from fairchem_janus.data.gars import pack
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.families import make_schedule
from fairchem_janus.schedule.simulate import simulate

REAL_DATA = os.environ.get("JANUS_TEST_DATA")
needs_real_data = pytest.mark.skipif(not REAL_DATA, reason="JANUS_TEST_DATA is not set to the folder with real data")

graphs = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40)), min_size=1, max_size=60)
"""(atoms, edges per atom) of each graph."""


def split(drawn: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray]:
    sizes, density = np.array(drawn).T
    return sizes, sizes * density


def heavy_tail(num_graphs: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """2 to 500 atoms, log-normal with median 20; 5 to 44 edges per atom."""
    sizes = np.clip(np.round(np.exp(rng.normal(3.0, 1.1, num_graphs))), 2, 500).astype(int)
    return sizes, sizes * rng.integers(5, 45, num_graphs)


@pytest.fixture(scope="module")
def real() -> tuple[np.ndarray, np.ndarray]:
    columns = [load_sizes(file, 6.0) for file in sorted(Path(REAL_DATA).glob("*.extxyz"))]
    return tuple(np.concatenate(values) for values in zip(*columns, strict=True))


# ---- promises --------------------------------------------------------------------------------------------------------


@settings(max_examples=150, deadline=None)
@given(
    drawn=graphs,
    num_micro_batches=st.integers(1, 9),
    num_replicas=st.integers(1, 4),
    gp_size=st.integers(1, 4),
    cost=st.sampled_from(["atoms", "edges", LinearCost(per_atom=0.5, per_edge=0.1)]),
    method=st.sampled_from(["gars", "sequential"]),
    shuffle=st.booleans(),
    swap=st.booleans(),
    rank_budget=st.none() | st.integers(1, 500),
)
def test_every_graph_is_packed_exactly_once_and_micro_batches_add_up(
    drawn, num_micro_batches, num_replicas, gp_size, cost, method, shuffle, swap, rank_budget
):
    sizes, edges = split(drawn)
    packing = pack(
        sizes,
        num_micro_batches,
        num_replicas,
        gp_size,
        rank_budget,
        edges=edges,
        cost=cost,
        method=method,
        shuffle=shuffle,
        swap=swap,
    )
    costs = {"atoms": sizes, "edges": edges}[cost] if isinstance(cost, str) else cost(sizes, edges)
    assert len(packing.replicas) == num_replicas
    assert all(len(replica) <= num_micro_batches for replica in packing.replicas)
    assert packing.leftover == ()
    assert sorted(graph for m in packing.micro_batches for graph in m.graphs) == list(range(len(sizes)))
    for m in packing.micro_batches:
        chosen = list(m.graphs)
        assert chosen
        assert m.num_atoms == sizes[chosen].sum()
        assert m.num_edges == edges[chosen].sum()
        assert m.load == pytest.approx(costs[chosen].sum())
        budget = rank_budget or (np.ceil(m.load / gp_size) if isinstance(cost, str) else m.load / gp_size)
        fits = gp_size == 1 or (len(chosen) >= gp_size and costs[chosen].max() <= budget)
        assert m.tag == ("comm-free" if fits else "dist")
        if fits:
            assert len(m.local_bins) == gp_size
            assert all(m.local_bins), "a rank without atoms"
            assert sorted(graph for local in m.local_bins for graph in local) == sorted(chosen)
            assert all(list(local) == [g for g in chosen if g in local] for local in m.local_bins)
        else:
            assert m.local_bins == ()


@settings(max_examples=150, deadline=None)
@given(
    drawn=graphs,
    num_bins=st.integers(1, 8),
    max_atoms=st.none() | st.integers(1, 600),
    max_edges=st.none() | st.integers(0, 10_000),
    cost=st.sampled_from(["atoms", "edges"]),
    method=st.sampled_from(["gars", "sequential"]),
)
def test_a_budget_is_never_exceeded_and_leftovers_are_named(drawn, num_bins, max_atoms, max_edges, cost, method):
    sizes, edges = split(drawn)
    arguments = {"edges": edges, "cost": cost, "max_atoms": max_atoms, "max_edges": max_edges, "method": method}
    packing = pack(sizes, num_bins, return_leftover=True, **arguments)
    for m in packing.micro_batches:
        assert max_atoms is None or m.num_atoms <= max_atoms
        assert max_edges is None or m.num_edges <= max_edges
    used = [graph for m in packing.micro_batches for graph in m.graphs]
    assert sorted([*used, *packing.leftover]) == list(range(len(sizes)))
    if packing.leftover:
        with pytest.raises(ValueError, match=r"return_leftover=True"):
            pack(sizes, num_bins, **arguments)
    if method == "gars" and len(packing.micro_batches) < num_bins:  # an empty bin takes whatever fits at all
        for graph in packing.leftover:
            assert sizes[graph] > (max_atoms or np.inf) or edges[graph] > (np.inf if max_edges is None else max_edges)


@settings(max_examples=100, deadline=None)
@given(drawn=graphs, num_bins=st.integers(1, 8), num_replicas=st.integers(1, 3))
def test_no_bin_is_above_the_bound_of_list_scheduling_and_swaps_never_hurt(drawn, num_bins, num_replicas):
    sizes, _ = split(drawn)
    plain = pack(sizes, num_bins, num_replicas, swap=False)
    swapped = pack(sizes, num_bins, num_replicas)
    mean = sizes.sum() / plain.num_bins
    assert max(m.load for m in plain.micro_batches) <= mean + (1 - 1 / plain.num_bins) * sizes.max() + 1e-9
    assert max(m.load for m in swapped.micro_batches) <= max(m.load for m in plain.micro_batches)
    squares = [sum(m.load**2 for m in p.micro_batches) for p in (swapped, plain)]
    assert squares[0] <= squares[1]


@settings(max_examples=50, deadline=None)
@given(drawn=graphs, num_bins=st.integers(1, 8), seed=st.integers(0, 100))
def test_the_seed_decides_the_order_inside_the_bins_and_nothing_else(drawn, num_bins, seed):
    sizes, _ = split(drawn)
    packing = pack(sizes, num_bins, seed=seed)
    assert packing == pack(sizes, num_bins, seed=seed)
    other = pack(sizes, num_bins, seed=[seed, 1])
    assert [set(m.graphs) for m in packing.micro_batches] == [set(m.graphs) for m in other.micro_batches]
    descending = pack(sizes, num_bins, seed=seed, shuffle=False)
    assert [set(m.graphs) for m in descending.micro_batches] == [set(m.graphs) for m in packing.micro_batches]
    for m in descending.micro_batches:
        assert list(sizes[list(m.graphs)]) == sorted(sizes[list(m.graphs)], reverse=True)


def test_the_shuffle_mixes_sizes():
    sizes = np.arange(1, 201)
    first = [pack(sizes, 2, seed=seed).micro_batches[0].graphs for seed in range(3)]
    assert len(set(first)) == 3
    assert abs(np.corrcoef(np.arange(100), first[0])[0, 1]) < 0.4


def test_the_example_of_the_module_docstring():
    def sets(**arguments):
        return sorted(sorted(sizes[g] for g in m.graphs) for m in pack(sizes, 3, **arguments).micro_batches)

    sizes = [9, 7, 6, 5, 4, 3, 2]
    assert sets(swap=False) == [[2, 4, 7], [3, 9], [5, 6]]
    assert sets() == [[2, 4, 6], [3, 9], [5, 7]]


def test_replicas_are_balanced_too():
    sizes, _ = heavy_tail(2000, np.random.default_rng(0))
    loads = [sum(m.load for m in replica) for replica in pack(sizes, 8, 5).replicas]
    assert max(loads) / np.mean(loads) < 1.005


def test_the_default_rank_budget_is_rounded_up():
    # load 5 on 2 ranks: C_rank = 3, so the graph of 3 atoms still fits on one
    assert pack([3, 2], 1, gp_size=2).micro_batches[0].tag == "comm-free"
    assert pack([4, 1], 1, gp_size=2).micro_batches[0].tag == "dist"
    assert pack([4, 1], 1, gp_size=2, rank_budget=4).micro_batches[0].tag == "comm-free"


def test_fewer_graphs_than_ranks_are_dist_whatever_the_budget():
    assert pack([4, 4], 1, gp_size=3, rank_budget=1000).micro_batches[0].tag == "dist"


def test_at_gp_size_one_tags_change_nothing():
    for m in pack([90, 1, 1], 2, rank_budget=5).micro_batches:
        assert (m.tag, m.local_bins) == ("comm-free", (m.graphs,))


# ---- the sequential baseline -----------------------------------------------------------------------------------------


def test_sequential_packing_is_fairchems():
    from fairchem.core.datasets.samplers.max_atom_distributed_sampler import get_batches

    rng = np.random.default_rng(0)
    for cap in (20, 60, 300):
        sizes = rng.integers(1, 50, 80)
        expected, _, num_dropped = get_batches(sizes, np.arange(80), cap, 0)
        expected = [list(map(int, batch)) for batch in expected if len(batch)]
        packing = pack(sizes, len(expected), method="sequential", max_atoms=cap, return_leftover=True)
        assert [list(m.graphs) for m in packing.micro_batches] == expected
        assert len(packing.leftover) == num_dropped


@settings(max_examples=50, deadline=None)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=25), num_bins=st.integers(1, 6))
def test_the_baseline_gets_the_smallest_cap_that_suffices(sizes, num_bins):
    sizes = np.array(sizes)
    cap = smallest_cap(sizes, num_bins)
    brute = next(c for c in range(sizes.max(), 1000) if len(greedy(range(len(sizes)), [(sizes, c)])) <= num_bins)
    assert cap == brute


# ---- odd and bad input -----------------------------------------------------------------------------------------------


def test_one_graph():
    packing = pack([7], 4, 2, gp_size=2, edges=[12])
    assert [m.graphs for m in packing.micro_batches] == [(0,)]
    assert packing_stats(packing, [7], [12])["max_over_mean_atoms"] == 1


def test_more_bins_than_graphs_gives_one_graph_each_to_as_many_replicas_as_there_are():
    packing = pack([5, 4, 3], 4, 2)
    assert sorted(m.graphs for m in packing.micro_batches) == [(0,), (1,), (2,)]
    assert all(packing.replicas)
    assert packing_stats(packing, [5, 4, 3], [0, 0, 0])["max_over_mean_atoms"] == pytest.approx(5 / 4)


def test_all_graphs_equal():
    assert {len(m.graphs) for m in pack([10] * 24, 4, 2).micro_batches} == {3}


def test_one_giant_graph_has_a_bin_of_its_own_and_the_floor_says_so():
    sizes = np.array([500, *[10] * 70])
    packing = pack(sizes, 8)
    assert (0,) in [m.graphs for m in packing.micro_batches]
    stats = packing_stats(packing, sizes, sizes)
    assert stats["max_over_mean_atoms"] == stats["floor_atoms"] == pytest.approx(500 / 150)


def test_single_atoms_without_edges_are_dealt_out_evenly():
    packing = pack([1] * 12, 4, gp_size=3, edges=[0] * 12, cost="edges")
    assert {len(m.graphs) for m in packing.micro_batches} == {3}
    assert all(m.load == 0 and m.tag == "comm-free" and all(m.local_bins) for m in packing.micro_batches)
    stats = packing_stats(packing, [1] * 12, [0] * 12)
    assert (stats["max_over_mean_edges"], stats["floor_edges"], stats["cv_edges"]) == (1, 1, 0)


def test_graphs_without_edges_beside_others():
    edges = np.array([0, 0, 0, 0, 900, 800])
    packing = pack([1, 1, 1, 1, 30, 30], 2, edges=edges, cost="edges")
    assert sorted(m.num_edges for m in packing.micro_batches) == [800, 900]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sizes": []}, "no graphs to pack"),
        ({"sizes": [3, float("nan")]}, "sizes of graph 1 is nan"),
        ({"sizes": [3, 0]}, "sizes of graph 1 is 0"),
        ({"sizes": [3, 2.5]}, "sizes of graph 1 is 2.5; it must be a whole number"),
        ({"sizes": [[3, 2]]}, r"one number per graph, not an array of shape \(1, 2\)"),
        ({"sizes": ["a"]}, "sizes must be numbers"),
        ({"edges": [1, -1, 4]}, "edges of graph 1 is -1"),
        ({"edges": [1, 2]}, "one number for each of 3 graphs"),
        ({"cost": "edges"}, "needs `edges`"),
        ({"max_edges": 5}, "needs `edges`"),
        ({"cost": "time"}, "unknown cost 'time'"),
        ({"cost": lambda atoms, edges: [1.0, np.nan, 2.0]}, "cost of graph 1 is nan"),
        ({"cost": lambda atoms, edges: [1.0]}, "one number for each of 3 graphs"),
        ({"method": "best"}, "unknown method 'best'"),
        ({"num_micro_batches": 0}, "num_micro_batches must be at least 1"),
        ({"num_replicas": 0}, "num_replicas must be at least 1"),
        ({"gp_size": 0}, "gp_size must be at least 1"),
        ({"max_atoms": float("nan")}, "max_atoms must be a number >= 0, not nan"),
        ({"edges": [1, 1, 1], "max_edges": -1}, "max_edges must be a number >= 0, not -1"),
        ({"rank_budget": 0}, "rank_budget must be positive"),
        ({"rank_budget": float("nan")}, "rank_budget must be positive"),
        ({"max_atoms": 4}, "1 graphs exceed the budget of a micro-batch .4 atoms. on their own, the first is graph 0"),
        ({"max_atoms": 5}, "1 graphs found no room in 2 micro-batches of 5 atoms"),
    ],
)
def test_bad_arguments_say_what_is_wrong(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(**{"sizes": [5, 3, 3], "num_micro_batches": 2, **arguments})


def test_every_graph_too_large_leaves_no_micro_batch():
    packing = pack([5, 6], 2, max_atoms=4, return_leftover=True)
    assert (packing.micro_batches, packing.leftover) == ((), (0, 1))


# ---- fitted cost -----------------------------------------------------------------------------------------------------


def test_a_fitted_cost_finds_the_coefficients_and_packs_by_them():
    rng = np.random.default_rng(0)
    sizes, edges = heavy_tail(400, rng)
    bins = [list(m.graphs) for m in pack(sizes, 40, edges=edges).micro_batches]
    atoms_of, edges_of = (np.array([values[b].sum() for b in bins]) for values in (sizes, edges))
    times = 0.01 + 1e-4 * atoms_of + 3e-5 * edges_of
    cost = fit_cost(atoms_of, edges_of, times * rng.normal(1, 0.001, len(times)))
    assert cost.per_edge == pytest.approx(3e-5, rel=0.02)
    loads = [m.load for m in pack(sizes, 8, edges=edges, cost=cost).micro_batches]
    assert max(loads) / np.mean(loads) < 1.01
    assert sum(loads) == pytest.approx(cost.per_atom * sizes.sum() + cost.per_edge * edges.sum())


def test_fitted_coefficients_are_never_negative():
    cost = fit_cost([10, 20, 30, 40], [400, 300, 200, 100], [4.1, 3.0, 2.1, 1.0])
    assert cost.per_atom == 0
    assert cost.per_edge > 0


@pytest.mark.parametrize(
    ("atoms", "edges", "times", "message"),
    [
        ([1, 2], [1, 2], [1, 2], "at least 3"),
        ([1, 2, 3], [1, 2], [1, 2, 3], "of one length"),
        ([1, 2, 3], [1, 2, 3], [1, np.nan, 3], "must be finite"),
        ([1, 2, 3], [1, 2, 3], [3, 2, 1], "do not grow"),
    ],
)
def test_a_cost_that_cannot_be_fitted_says_why(atoms, edges, times, message):
    with pytest.raises(ValueError, match=message):
        fit_cost(atoms, edges, times)


def test_a_linear_cost_refuses_nonsense():
    with pytest.raises(ValueError, match="not negative"):
        LinearCost(per_atom=-1.0, per_edge=1.0)
    with pytest.raises(ValueError, match="give `edges`"):
        pack([1, 2], 1, cost=LinearCost(per_atom=1.0, per_edge=1.0))


# ---- numbers ---------------------------------------------------------------------------------------------------------


def test_balance_and_its_floor():
    assert balance([4, 2], largest=4, num_bins=2) == pytest.approx((4 / 3, 4 / 3, 1 / 3))
    assert balance([4, 2], largest=4, num_bins=3) == pytest.approx((2, 2, np.std([4, 2, 0]) / 2))
    assert balance([], largest=0, num_bins=0) == (1, 1, 0)


def test_edges_over_ranks_follows_the_order_of_a_dist_micro_batch():
    sizes, edges = np.array([30, 10, 10, 10]), np.array([300, 0, 0, 0])
    m = pack(sizes, 1, gp_size=2, edges=edges, shuffle=False, rank_budget=1).micro_batches[0]
    assert m.tag == "dist"
    assert edges_over_ranks(m, sizes, edges, 2) == pytest.approx(2)
    local = pack([5, 5, 5, 5], 1, gp_size=2, edges=[1, 1, 1, 1]).micro_batches[0]
    assert edges_over_ranks(local, np.array([5] * 4), np.array([1] * 4), 2) == pytest.approx(1)


def test_a_histogram_counts_everything():
    lines = histogram([1, 1, 2, 9], num_bins=4).splitlines()
    assert [int(line.split()[3]) for line in lines] == [3, 0, 0, 1]
    assert histogram([]) == "(nothing to show)"


@pytest.mark.parametrize("arguments", [{"num_replicas": 8, "gp_size": 4}, {"num_replicas": 8, "cost": "edges"}])
def test_a_hundred_thousand_graphs_take_less_than_a_second(arguments):
    sizes, edges = heavy_tail(100_000, np.random.default_rng(0))
    times = []
    for _ in range(3):
        start = time.perf_counter()
        pack(sizes, 16, edges=edges, **arguments)
        times.append(time.perf_counter() - start)
    assert min(times) < 1


def check_numbers(sizes, edges, *, num_micro_batches, graphs_per_step, num_replicas=1):
    """Within 5 % of the floor, in every step; CV at a fifth of sequential packing or less."""
    result = compare(
        sizes,
        edges,
        num_micro_batches=num_micro_batches,
        graphs_per_step=graphs_per_step,
        num_replicas=num_replicas,
        gp_size=2,
    )
    for name, load in (("gars", "atoms"), ("gars_no_shuffle", "atoms"), ("gars_edges", "edges")):
        for step in result[name].per_step:
            assert step[f"max_over_mean_{load}"] <= 1.05 * step[f"floor_{load}"]
        if result[name].mean[f"floor_{load}"] < 1.01:
            assert result["sequential"].mean[f"cv_{load}"] >= 5 * result[name].mean[f"cv_{load}"]


@pytest.mark.parametrize(
    ("num_micro_batches", "num_replicas", "graphs_per_step"), [(4, 1, 64), (8, 1, 64), (16, 2, 512)]
)
def test_loads_reach_the_floor_on_a_heavy_tail(num_micro_batches, num_replicas, graphs_per_step):
    sizes, edges = heavy_tail(4096, np.random.default_rng(1))
    check_numbers(
        sizes,
        edges,
        num_micro_batches=num_micro_batches,
        num_replicas=num_replicas,
        graphs_per_step=graphs_per_step,
    )


@needs_real_data
@pytest.mark.parametrize(
    ("num_micro_batches", "num_replicas", "graphs_per_step"), [(8, 1, 64), (8, 2, 128), (16, 2, 256)]
)
def test_loads_reach_the_floor_on_crystals_with_molecules(real, num_micro_batches, num_replicas, graphs_per_step):
    check_numbers(
        *real, num_micro_batches=num_micro_batches, num_replicas=num_replicas, graphs_per_step=graphs_per_step
    )


def step_time(edges_of_micro_batches: list[list[int]]) -> float:
    """WaveK on 4 stages, times proportional to edges; the step ends with its slowest replica."""
    makespans = []
    for scales in edges_of_micro_batches:
        schedule = make_schedule("wavek", num_stages=4, num_micro_batches=len(scales))
        costs = Costs(num_stages=4, num_micro_batches=len(scales), micro_batch_scale=[float(scale) for scale in scales])
        makespans.append(simulate(schedule, costs).makespan)
    return max(makespans)


def simulated_gains(sizes, edges) -> tuple[float, float]:
    """Mean gain in step time of GARS by edges at P = 4, D = 2, N = 16 and 256 graphs a step: over sequential packing
    (fairchem's greedy with the best cap), and over a fixed number of graphs per micro-batch.
    """
    order = np.random.default_rng(0).permutation(len(sizes))
    times = []
    for step in range(4):
        chosen = order[step * 256 : (step + 1) * 256]
        own_sizes, own_edges = sizes[chosen], edges[chosen]
        packings = [
            pack(own_sizes, 16, 2, edges=own_edges, **arguments)
            for arguments in ({"cost": "edges"}, {"method": "sequential"})
        ]
        fixed = own_edges.reshape(32, 8).sum(axis=1).tolist()
        times.append(
            [step_time([[m.num_edges for m in r] for r in p.replicas]) for p in packings]
            + [step_time([fixed[::2], fixed[1::2]])]
        )
    gars, sequential, fixed_count = np.mean(times, axis=0)
    return 1 - gars / sequential, 1 - gars / fixed_count


def test_simulated_step_on_a_heavy_tail_gains_a_tenth_over_fixed_counts():
    over_sequential, over_fixed_count = simulated_gains(*heavy_tail(1024, np.random.default_rng(2)))
    assert over_sequential > 0.03
    assert over_fixed_count > 0.10


@needs_real_data
def test_simulated_step_on_crystals_with_molecules_gains_a_tenth_over_fixed_counts(real):
    over_sequential, over_fixed_count = simulated_gains(*real)
    assert over_sequential > 0.03
    assert over_fixed_count > 0.10
