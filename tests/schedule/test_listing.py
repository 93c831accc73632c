"""`auto` and list scheduling: caps kept, never worse than the named families, and the figures that were promised."""

from __future__ import annotations

import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import DEFERRABLE_SHARE, Caps, Costs, Phase, auto, make_schedule, simulate, validate
from fairchem_janus.schedule.greedy import ListScheduler, Rules
from fairchem_janus.schedule.listing import chain_lags, wave_sizes

times = st.floats(0.2, 5.0)
caps_or_none = st.none() | st.integers(1, 6)


@st.composite
def job(draw) -> tuple[Costs, Caps]:
    """Costs and caps of all kinds, with a memory budget that holds at least one micro-batch."""
    num_stages, num_micro_batches = draw(st.integers(1, 4)), draw(st.integers(1, 7))
    scale = draw(st.lists(times, min_size=num_micro_batches, max_size=num_micro_batches))
    costs = Costs(
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        phase_times={phase: draw(st.lists(times, min_size=num_stages, max_size=num_stages)) for phase in Phase},
        micro_batch_scale=scale,
        link_latency=draw(st.sampled_from([0.0, 0.7])),
        link_bandwidth=2.0,
        message_sizes={phase: draw(st.floats(0, 1)) for phase in Phase},
        fe_graph_size=draw(times),
        ff_graph_size=draw(times),
        deferrable_share=draw(st.sampled_from([0.0, 0.5])),
    )
    one_micro_batch = max(scale) * (costs.fe_graph_sizes[0] + costs.ff_graph_sizes[0])
    budget = one_micro_batch * draw(st.sampled_from([1.0, 1.5, 4.0, float("inf")]))
    return costs, Caps(max_in_flight=draw(caps_or_none), max_ff_graphs=draw(caps_or_none), memory_budget=budget)


@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(problem=job(), seed=st.integers(0, 3))
def test_auto_is_valid_keeps_its_caps_and_is_never_worse_than_a_named_family(problem, seed) -> None:
    costs, caps = problem
    schedule = auto(costs, caps, seed=seed, num_trials=5)
    validate(schedule)
    result = simulate(schedule, costs, caps)
    assert max(result.peak_in_flight) <= (caps.max_in_flight or costs.num_micro_batches)
    assert max(result.peak_ff_graphs) <= (caps.max_ff_graphs or costs.num_micro_batches)
    assert max(result.peak_memory) <= caps.memory_budget * (1 + 1e-6)
    sizes = {"num_stages": costs.num_stages, "num_micro_batches": costs.num_micro_batches}
    rivals = [make_schedule("gpipe_2nd", **sizes)]
    rivals += [make_schedule("wavek", **sizes, wave_size=k) for k in range(1, costs.num_micro_batches + 1)]
    for rival in rivals:
        outcome = simulate(rival, costs, caps)
        keeps_caps = (
            max(outcome.peak_in_flight) <= (caps.max_in_flight or costs.num_micro_batches)
            and max(outcome.peak_ff_graphs) <= (caps.max_ff_graphs or costs.num_micro_batches)
            and max(outcome.peak_memory) <= caps.memory_budget
        )
        if keeps_caps and caps.memory_budget == float("inf"):
            assert result.makespan <= outcome.makespan * (1 + 1e-6)


@settings(deadline=None)
@given(problem=job(), data=st.data())
def test_list_scheduling_knows_the_makespan_of_what_it_writes(problem, data) -> None:
    costs, caps = problem
    steps = data.draw(st.lists(st.floats(0, 4), min_size=7, max_size=7))
    scheduler = ListScheduler(costs, caps)
    rules = Rules(lags=chain_lags(steps, costs.num_stages), patience=data.draw(st.sampled_from([0.0, 0.1, 1.0])))
    rows, makespan = scheduler.write(rules)
    schedule = make_schedule("gpipe_2nd", num_stages=costs.num_stages, num_micro_batches=costs.num_micro_batches)
    schedule = type(schedule)(costs.num_stages, costs.num_micro_batches, rows)
    validate(schedule)
    assert simulate(schedule, costs, caps).makespan == pytest.approx(makespan)
    assert scheduler.replay(schedule) == pytest.approx(makespan)
    assert scheduler.replay(schedule, give_up_above=makespan * 0.999) is None
    assert scheduler.write(rules, give_up_above=makespan * 0.999) is None


def test_lags_grow_along_the_chain() -> None:
    lags = chain_lags([2, 4, 6, 8, 1, 1, 1], 3)
    assert lags[0] == {"FE": 0, "FF": 7, "BF": 8, "BE": 23}
    assert lags[1] == {"FE": 1, "FF": 5, "BF": 11, "BE": 19}
    assert lags[2] == {"FE": 2, "FF": 3, "BF": 14, "BE": 15}


def test_the_same_seed_gives_the_same_schedule_and_another_may_not() -> None:
    costs = Costs(num_stages=4, num_micro_batches=12, micro_batch_scale=[1 + m % 3 / 10 for m in range(12)])
    first, again, other = (auto(costs, Caps(max_in_flight=6), seed=seed, num_trials=60) for seed in (0, 0, 1))
    assert first == again
    assert first.rows != other.rows


def test_a_search_without_trials_is_an_error() -> None:
    with pytest.raises(ValueError, match="num_trials must be at least 1, got 0"):
        auto(Costs(num_stages=2, num_micro_batches=2), num_trials=0)


def test_phases_may_take_no_time() -> None:
    """As FF and BF do in an energy-only job, where they only pass numbers on."""
    costs = Costs(num_stages=3, num_micro_batches=6, phase_times={"FE": 1, "FF": 0, "BF": 0, "BE": 2})
    assert simulate(auto(costs), costs).makespan == pytest.approx(6 * 3 + 2 * 3)
    nothing = Costs(num_stages=2, num_micro_batches=2, phase_times=dict.fromkeys(Phase, 0))
    assert simulate(auto(nothing), nothing).bubble_ratio == 0


def test_a_memory_budget_below_one_micro_batch_is_an_error() -> None:
    costs = Costs(num_stages=2, num_micro_batches=2, fe_graph_size=[1, 3], ff_graph_size=2, micro_batch_scale=[1, 2])
    with pytest.raises(
        ValueError, match="stage 1 needs 10 for the graphs of the largest micro-batch, above the memory"
    ):
        auto(costs, Caps(memory_budget=8))


def test_a_smaller_memory_budget_means_fewer_graphs() -> None:
    costs = Costs(num_stages=4, num_micro_batches=12, fe_graph_size=1, ff_graph_size=2)
    free, tight = (
        simulate(auto(costs, Caps(memory_budget=budget), num_trials=20), costs) for budget in (float("inf"), 7.0)
    )
    assert max(tight.peak_memory) <= 7 < max(free.peak_memory)
    assert tight.makespan > free.makespan


def test_wave_sizes_are_dense_first_and_end_with_the_largest() -> None:
    assert wave_sizes(12) == list(range(1, 13))
    assert wave_sizes(70) == [*range(1, 33), *range(34, 65, 2), 66, 69, 70]


PROMISED = {
    "N12-8": (12, 8, 0.0, 0.10),
    "N12-12": (12, 12, 0.0, 0.091),
    "N32-8": (32, 8, 0.0, 0.042),
    "N32-12": (32, 12, 0.0, 0.037),
    "N12-8-split": (12, 8, DEFERRABLE_SHARE, 0.030),
    "N32-8-split": (32, 8, DEFERRABLE_SHARE, 0.012),
}


@pytest.mark.parametrize(("num_micro_batches", "max_in_flight", "share", "bubble"), PROMISED.values(), ids=PROMISED)
def test_auto_reaches_the_promised_bubble(num_micro_batches, max_in_flight, share, bubble) -> None:
    costs = Costs(num_stages=4, num_micro_batches=num_micro_batches, deferrable_share=share)
    caps = Caps(max_in_flight=max_in_flight)
    result = simulate(auto(costs, caps), costs, caps)
    assert result.bubble_ratio <= bubble
    assert max(result.peak_in_flight) <= max_in_flight


@pytest.mark.parametrize(("num_micro_batches", "bubble"), [(12, 0.155), (32, 0.075)])
def test_wavek_with_the_best_wave_reaches_the_promised_bubble(num_micro_batches, bubble) -> None:
    costs = Costs(num_stages=4, num_micro_batches=num_micro_batches)
    sizes = {"num_stages": 4, "num_micro_batches": num_micro_batches}
    results = {k: simulate(make_schedule("wavek", **sizes, wave_size=k), costs) for k in wave_sizes(num_micro_batches)}
    assert min(result.bubble_ratio for result in results.values()) <= bubble
    assert all(max(result.peak_in_flight) <= 2 * k for k, result in results.items())


@pytest.mark.parametrize("seed", range(2))
def test_auto_stays_below_15_percent_with_uneven_micro_batches(seed: int) -> None:
    rng = random.Random(seed)
    costs = Costs(num_stages=4, num_micro_batches=12, micro_batch_scale=[rng.uniform(0.7, 1.3) for _ in range(12)])
    caps = Caps(max_in_flight=8)
    assert simulate(auto(costs, caps, num_trials=300), costs, caps).bubble_ratio < 0.15


def test_auto_takes_less_than_ten_seconds_for_64_micro_batches_on_8_stages() -> None:
    costs = Costs(num_stages=8, num_micro_batches=64)
    begin = time.process_time()
    auto(costs, Caps(max_in_flight=16))
    assert time.process_time() - begin < 10
