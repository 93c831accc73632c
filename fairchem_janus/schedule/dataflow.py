"""What an action waits for, and which messages follow from that.

For every micro-batch the four phases form one chain through the stages, down, up, down and up again, with each
backward phase also needing what its own stage kept (P = 3, stages from left to right)::

    FE_0 -> FE_1 -> FE_2          h[s+1]                       down
                     |
    FF_0 <- FF_1 <- FF_2          g[s], sums of fpos, fcell; E up        FF_s also needs FE_s
     | gate: the loss
    BF_0 -> BF_1 -> BF_2          v[s+1]; w_pos, w_cell, uE    down      BF_s also needs FF_s
                     |
    BE_0 <- BE_1 <- BE_2          u[s]                         up        BE_s also needs BF_s

A dependency between actions in different rows is a message. In a folded schedule that means: the link s -> s+1 carries
the outputs of FE and BF, the link s -> s-1 those of FF and BE. In an unfolded schedule FE_s -> FF_s (h[s], for the
recomputation) and BF_s -> BE_s (the second-order gradient of h[s], and uE on the last stage) may cross rows too.

Energy-only jobs use the same four actions: FF then only hands E up to the gate, BF only hands uE down. Evaluation
has FE and FF alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from fairchem_janus.schedule.action import Action, Phase, Schedule


@lru_cache(maxsize=1 << 16)
def dependencies(action: Action, num_stages: int) -> tuple[Action, ...]:
    """Return the actions whose results `action` needs, the neighbouring stage's first.

    All are actions of the same micro-batch. The gate is part of BF_0, so BF_0 needs FF_0 alone.
    """
    phase, stage, micro_batch = action.phase, action.stage, action.micro_batch
    last = num_stages - 1
    needed: list[tuple[Phase, int]] = []
    if phase is Phase.FE and stage > 0:
        needed = [(Phase.FE, stage - 1)]
    elif phase is Phase.FF:
        needed = [(Phase.FE, stage)] if stage == last else [(Phase.FF, stage + 1), (Phase.FE, stage)]
    elif phase is Phase.BF:
        needed = [(Phase.FF, 0)] if stage == 0 else [(Phase.BF, stage - 1), (Phase.FF, stage)]
    elif phase is Phase.BE:
        needed = [(Phase.BF, stage)] if stage == last else [(Phase.BE, stage + 1), (Phase.BF, stage)]
    return tuple(Action(p, s, micro_batch) for p, s in needed)


@dataclass(frozen=True, slots=True)
class Message:
    """The result of `producer`, sent from row `source` to row `target`, where `consumer` needs it."""

    producer: Action
    consumer: Action
    source: int
    target: int


def row_of_each_action(schedule: Schedule) -> dict[Action, int]:
    """Return the row in which each action of a schedule runs."""
    return {action: row for row, actions in enumerate(schedule.rows) for action in actions}


def messages(schedule: Schedule) -> dict[tuple[int, int], tuple[Message, ...]]:
    """Return, for every link (source row, target row) in use, its messages in the order in which they are sent.

    The receiver posts its receives on a link in this order, whatever the order in which it consumes them. A producer
    with two consumers in one row sends twice, in the order of the consumers in that row.
    """
    row_of = row_of_each_action(schedule)
    outgoing: dict[Action, list[Message]] = {}
    for target, actions in enumerate(schedule.rows):
        for consumer in actions:
            for producer in dependencies(consumer, schedule.num_stages):
                source = row_of.get(producer, target)
                if source != target:
                    outgoing.setdefault(producer, []).append(Message(producer, consumer, source, target))
    links: dict[tuple[int, int], list[Message]] = {}
    for actions in schedule.rows:
        for producer in actions:
            for message in outgoing.get(producer, ()):
                links.setdefault((message.source, message.target), []).append(message)
    return {link: tuple(sent) for link, sent in sorted(links.items())}


def executable_order(schedule: Schedule) -> Iterator[tuple[int, Action, tuple[Action, ...]]]:
    """Yield (row, action, what it needs) of every action, each after those it needs and those before it in its row.

    For a schedule that can run (`validate`).
    """
    done: set[Action] = set()
    position = [0] * len(schedule.rows)
    while len(done) < sum(map(len, schedule.rows)):
        for row, actions in enumerate(schedule.rows):
            while position[row] < len(actions):
                action = actions[position[row]]
                needed = dependencies(action, schedule.num_stages)
                if not done.issuperset(needed):
                    break
                yield row, action, needed
                done.add(action)
                position[row] += 1


def inbound(schedule: Schedule, row: int) -> dict[int, tuple[Message, ...]]:
    """Return the messages that reach `row`, keyed by the sending row, each list in the sender's order."""
    return {source: sent for (source, target), sent in messages(schedule).items() if target == row}
