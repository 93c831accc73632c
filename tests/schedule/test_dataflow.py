"""Who waits for whom, and what travels on which link."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fairchem_janus.schedule import Action, Phase, dependencies, inbound, make_schedule, messages

FE, FF, BF, BE = Phase


def test_dependencies_of_the_three_stage_pipeline() -> None:
    expected = {
        Action(FE, 0, 5): (),
        Action(FE, 1, 5): (Action(FE, 0, 5),),
        Action(FF, 2, 5): (Action(FE, 2, 5),),
        Action(FF, 1, 5): (Action(FF, 2, 5), Action(FE, 1, 5)),
        Action(BF, 0, 5): (Action(FF, 0, 5),),
        Action(BF, 1, 5): (Action(BF, 0, 5), Action(FF, 1, 5)),
        Action(BE, 2, 5): (Action(BF, 2, 5),),
        Action(BE, 1, 5): (Action(BE, 2, 5), Action(BF, 1, 5)),
    }
    assert {action: dependencies(action, 3) for action in expected} == expected


def test_a_single_stage_waits_for_nobody_else() -> None:
    assert dependencies(Action(FF, 0, 0), 1) == (Action(FE, 0, 0),)
    assert dependencies(Action(BF, 0, 0), 1) == (Action(FF, 0, 0),)
    assert dependencies(Action(BE, 0, 0), 1) == (Action(BF, 0, 0),)


@settings(deadline=None)  # wall-clock limits fail on a busy machine
@given(num_stages=st.integers(1, 5), num_micro_batches=st.integers(1, 6), wave_size=st.integers(1, 6))
def test_links_carry_fe_and_bf_down_ff_and_be_up_in_the_senders_order(num_stages, num_micro_batches, wave_size) -> None:
    schedule = make_schedule("wavek", num_stages=num_stages, num_micro_batches=num_micro_batches, wave_size=wave_size)
    links = messages(schedule)
    assert set(links) == {(s, t) for s in range(num_stages) for t in range(num_stages) if abs(s - t) == 1}
    for (source, target), sent in links.items():
        carried = (FE, BF) if target > source else (FF, BE)
        assert [m.producer for m in sent] == [a for a in schedule.rows[source] if a.phase in carried]
        assert all(m.consumer == Action(m.producer.phase, target, m.producer.micro_batch) for m in sent)


def test_inbound_is_what_the_neighbours_send() -> None:
    schedule = make_schedule("gpipe_2nd", num_stages=3, num_micro_batches=2)
    assert inbound(schedule, 1) == {0: messages(schedule)[0, 1], 2: messages(schedule)[2, 1]}
    assert set(inbound(schedule, 0)) == {1}
