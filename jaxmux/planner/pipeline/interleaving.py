"""Interleaves the hTasks of a bucket within a stage so that their collectives are hidden (MuxTune
3.4.2, Alg. 1).

hTasks do not depend on each other: while one waits for an all-reduce, the stage computes another.
The model is one compute stream and one communication stream. The compute stream takes whole
subgraphs in a given order; the collective at the end of a subgraph runs on the other stream, in the
order in which collectives are issued; what depends on the subgraph waits for both.
"""

import heapq
from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..errors import PlanningError
from .subgraphs import Subgraph

# Beginnings of an order that the search keeps, and subgraphs up to which it takes well below 1 s.
_BEAM_WIDTH = 16
_SEARCHED_SUBGRAPHS = 128


class Overlap(NamedTuple):
    """What an order of subgraphs takes.

    Attributes:
      seconds: until the last subgraph and the last collective have ended.
      exposed: seconds of these in which the compute stream has nothing to do.
    """

    seconds: float
    exposed: float


class Interleaving(NamedTuple):
    """The order in which a stage launches the subgraphs of a bucket.

    Attributes:
      order: every subgraph once.
      overlap: what it takes.
      sequential: what one hTask after another takes.
    """

    order: tuple[int, ...]
    overlap: Overlap
    sequential: Overlap


def interleave(subgraphs: Sequence[Subgraph]) -> Interleaving:
    """The best of Alg. 1's order, the one of a beam search, and the sequential one.

    Alg. 1 goes by depth and does not see how long a collective still takes: it is nearly optimal
    where hTasks are alike. The beam search, for up to 128 subgraphs, is for those that are not.

    Raises:
      PlanningError: the dependencies have a cycle.
    """
    sequential = sequential_order(subgraphs)
    orders = [priority_order(subgraphs), sequential]
    if len(subgraphs) <= _SEARCHED_SUBGRAPHS:
        orders.append(beam_order(subgraphs))
    overlaps = [run_order(subgraphs, order) for order in orders]
    best = min(range(len(orders)), key=lambda i: overlaps[i].seconds)
    return Interleaving(tuple(orders[best]), overlaps[best], overlaps[1])


def run_order(subgraphs: Sequence[Subgraph], order: Sequence[int]) -> Overlap:
    """Runs the subgraphs in this order on the two streams.

    Raises:
      PlanningError: a subgraph comes before one that it depends on.
    """
    streams = _Streams(0.0, 0.0, {})
    for index in order:
        missing = [i for i in subgraphs[index].after if i not in streams.done]
        if missing:
            raise PlanningError(f"subgraph {index} comes before {missing}, which it depends on")
        streams = streams.launch(index, subgraphs[index])
    seconds = max(streams.compute_free, streams.communication_free)
    return Overlap(seconds, seconds - sum(subgraph.compute for subgraph in subgraphs))


def sequential_order(subgraphs: Sequence[Subgraph]) -> list[int]:
    """One hTask after another, as far as dependencies between hTasks permit."""
    return _kahn(subgraphs, lambda index: (subgraphs[index].htask, index))


def priority_order(subgraphs: Sequence[Subgraph]) -> list[int]:
    """Alg. 1: of the subgraphs with in-degree zero, those of least depth, the longest one first."""
    depth = _depths(subgraphs)
    return _kahn(subgraphs, lambda index: (depth[index], -subgraphs[index].compute, index))


def beam_order(subgraphs: Sequence[Subgraph], width: int = _BEAM_WIDTH) -> list[int]:
    """The order of a beam search: of all beginnings of as many subgraphs it keeps the `width` from
    which the end may come soonest.

    A beginning's end is bounded from below by the computation that is left, and by the longest way
    from each subgraph that may come next.
    """
    tail = _longest_tails(subgraphs)

    def soonest_end(streams: _Streams) -> float:
        left = sum(s.compute for i, s in enumerate(subgraphs) if i not in streams.done)
        ways = (streams.ready(subgraphs[i]) + tail[i] for i in _open(subgraphs, streams))
        return max([streams.compute_free + left, streams.communication_free, *ways])

    beam = [_Streams(0.0, 0.0, {})]
    for _ in subgraphs:
        grown = {}
        for streams in beam:
            for index in _open(subgraphs, streams):
                after = streams.launch(index, subgraphs[index])
                grown[frozenset(after.done), *after[:2]] = after
        beam = heapq.nsmallest(width, grown.values(), key=soonest_end)
    return list(beam[0].done)


def _open(subgraphs: Sequence[Subgraph], streams: "_Streams") -> list[int]:
    """The subgraphs that may come next."""
    done = streams.done.keys()
    return [i for i, s in enumerate(subgraphs) if i not in done and done >= set(s.after)]


class _Streams(NamedTuple):
    """The two streams after some subgraphs.

    Attributes:
      compute_free: when the compute stream is free.
      communication_free: when the communication stream is.
      done: by subgraph launched, in their order, when its results are there.
    """

    compute_free: float
    communication_free: float
    done: dict[int, float]

    def ready(self, subgraph: Subgraph) -> float:
        """When the compute stream could start it."""
        return max([self.compute_free, *(self.done[i] for i in subgraph.after)])

    def launch(self, index: int, subgraph: Subgraph) -> "_Streams":
        end = self.ready(subgraph) + subgraph.compute
        if not subgraph.communication:
            return _Streams(end, self.communication_free, self.done | {index: end})
        arrival = max(end, self.communication_free) + subgraph.communication
        return _Streams(end, arrival, self.done | {index: arrival})


def _kahn(subgraphs: Sequence[Subgraph], key: Callable[[int], tuple]) -> list[int]:
    """Kahn's order over all graphs at once, from a queue by key."""
    waits = [len(subgraph.after) for subgraph in subgraphs]
    followers = _followers(subgraphs)
    queue = [(key(index), index) for index, count in enumerate(waits) if not count]
    heapq.heapify(queue)
    order = []
    while queue:
        _, index = heapq.heappop(queue)
        order.append(index)
        for follower in followers[index]:
            waits[follower] -= 1
            if not waits[follower]:
                heapq.heappush(queue, (key(follower), follower))
    if len(order) < len(subgraphs):
        stuck = sorted(set(range(len(subgraphs))) - set(order))
        raise PlanningError(f"the subgraphs {stuck} depend on each other in a cycle")
    return order


def _followers(subgraphs: Sequence[Subgraph]) -> list[list[int]]:
    followers: list[list[int]] = [[] for _ in subgraphs]
    for index, subgraph in enumerate(subgraphs):
        for source in subgraph.after:
            followers[source].append(index)
    return followers


def _depths(subgraphs: Sequence[Subgraph]) -> list[int]:
    depth = [0] * len(subgraphs)
    for index in sequential_order(subgraphs):
        depth[index] = max((depth[i] + 1 for i in subgraphs[index].after), default=0)
    return depth


def _longest_tails(subgraphs: Sequence[Subgraph]) -> list[float]:
    """Seconds from the start of each subgraph to the end of all that depends on it."""
    followers = _followers(subgraphs)
    tail = [0.0] * len(subgraphs)
    for index in reversed(sequential_order(subgraphs)):
        own = subgraphs[index].compute + subgraphs[index].communication
        tail[index] = own + max((tail[i] for i in followers[index]), default=0.0)
    return tail
