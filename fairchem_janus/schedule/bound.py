"""The time that no order of the actions can beat.

A rank starts when the first micro-batch has come down to it, then has all its work to do, and when it is done the last
gradient still has to travel up. With equal stages the last rank is the worst, and a step takes at least

    N*T + (P-1)*(tFE + tBE)                  T = tFE + tFF + tBF + tBE        (design section 7)

The general form takes for every rank: the earliest possible start of anything on it + its work + the shortest way from
anything on it to the end of the step. Ways are those of the smallest micro-batch, links included. Deferred parameter
gradients can be done during the way to the end, so they lengthen a step only where they take longer than that. And no
step is shorter than the chain of phases of its largest micro-batch.
"""

from __future__ import annotations

from fairchem_janus.schedule.action import Action, Schedule
from fairchem_janus.schedule.clock import Work, works_of
from fairchem_janus.schedule.costs import Costs
from fairchem_janus.schedule.dataflow import dependencies, row_of_each_action


def lower_bound(schedule: Schedule, costs: Costs) -> float:
    """Return a time that no schedule with the same actions in each row can beat; `schedule` must be complete."""
    scales = costs.scales
    row_of = row_of_each_action(schedule)
    works = works_of(schedule, costs)
    smallest, largest = scales.index(min(scales)), scales.index(max(scales))
    heads, tails = _ways(smallest, schedule.num_stages, costs, row_of, works)
    chain_heads, chain_tails = _ways(largest, schedule.num_stages, costs, row_of, works)
    bounds = [head + works[action].duration + chain_tails[action] for action, head in chain_heads.items()]
    for row, actions in enumerate(schedule.rows):
        if actions:
            blocking = sum(works[action].duration for action in actions)
            deferred = sum(works[action].deferred for action in actions)
            head = min(heads[a] for a in heads if row_of[a] == row)
            tail = min(tails[a] for a in tails if row_of[a] == row)
            bounds.append(head + blocking + max(deferred, tail))
    return max(bounds, default=0.0)


def _ways(
    micro_batch: int, num_stages: int, costs: Costs, row_of: dict[Action, int], works: dict[Action, Work]
) -> tuple[dict[Action, float], dict[Action, float]]:
    """Return, for each action of a micro-batch, the least time from the step's start to it and from it to the end."""
    actions = [action for action in row_of if action.micro_batch == micro_batch]
    heads: dict[Action, float] = {}
    tails = dict.fromkeys(actions, 0.0)

    def gap(producer: Action, consumer: Action) -> float:
        """Return the time between the end of an action and the start of one that needs it."""
        if row_of[producer] == row_of[consumer]:
            return 0.0
        return costs.transfer_time(producer.phase, micro_batch) + costs.link_latency

    def head(action: Action) -> float:
        if action not in heads:
            heads[action] = max(
                (head(a) + works[a].duration + gap(a, action) for a in dependencies(action, num_stages)), default=0.0
            )
        return heads[action]

    for action in sorted(actions, key=head, reverse=True):
        for a in dependencies(action, num_stages):
            tails[a] = max(tails[a], gap(a, action) + works[action].duration + tails[action])
    return heads, tails
