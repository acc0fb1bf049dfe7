"""Interleaves the hTasks of a bucket within a stage to hide collectives (MuxTune 3.4.2, Alg. 1).

hTasks do not depend on each other, so a stage can compute one hTask while another waits for its
all-reduce. The model of a stage is a compute stream and a communication stream. The compute stream
runs whole subgraphs in a given order. The collective at the end of a subgraph runs on the
communication stream, in the order in which collectives are issued. A subgraph starts when all
subgraphs that it depends on have ended, including their collectives.
"""

import heapq
from collections.abc import Callable, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

from ..errors import PlanningError
from .subgraphs import Subgraph

# The beam search keeps this many partial orders. It is used for at most this many subgraphs, with
# which it takes well below a second.
_BEAM_WIDTH = 16
_SEARCHED_SUBGRAPHS = 128


class Overlap(NamedTuple):
    """The time of an order of subgraphs.

    Attributes:
      seconds: time until the last subgraph and the last collective have ended.
      exposed: part of these seconds in which the compute stream is idle.
    """

    seconds: float
    exposed: float


class Interleaving(NamedTuple):
    """The order in which a stage launches the subgraphs of a bucket.

    Attributes:
      order: index of every subgraph once.
      overlap: time of this order.
      sequential: time of one hTask after another, for comparison.
    """

    order: tuple[int, ...]
    overlap: Overlap
    sequential: Overlap


def interleave(subgraphs: Sequence[Subgraph]) -> Interleaving:
    """Returns the fastest of three orders: Alg. 1's, a beam search's and the sequential one.

    Alg. 1 considers depth and computation but not how long a collective still takes. It is nearly
    optimal where the hTasks are alike; where they are not, the beam search is better. The search is
    left out for more than 128 subgraphs.

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
    """Simulates the two streams for one order of the subgraphs.

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
    """Returns one hTask after another, except where hTasks depend on each other.

    Raises:
      PlanningError: the dependencies have a cycle.
    """
    return _topological_order(subgraphs, lambda index: (subgraphs[index].htask, index))


def priority_order(subgraphs: Sequence[Subgraph]) -> list[int]:
    """Returns the order of Alg. 1: of the subgraphs whose dependencies are done, one of least depth
    comes next, and of those the one with the longest computation.

    Raises:
      PlanningError: the dependencies have a cycle.
    """
    depth = _depths(subgraphs)
    return _topological_order(
        subgraphs, lambda index: (depth[index], -subgraphs[index].compute, index)
    )


def beam_order(subgraphs: Sequence[Subgraph], width: int = _BEAM_WIDTH) -> list[int]:
    """Returns the order that a beam search finds.

    Of all partial orders of n subgraphs the search keeps the `width` with the smallest lower bound
    on the time of a full order. The bound is the largest of: the time at which the compute stream
    is free plus all computation that is left; the time at which the communication stream is free;
    and, for each subgraph that may come next, the time at which it can start plus the longest chain
    of dependent subgraphs from there.
    """
    tail = _longest_tails(subgraphs)

    def least_seconds(streams: _Streams) -> float:
        left = sum(s.compute for i, s in enumerate(subgraphs) if i not in streams.done)
        chains = (streams.start(subgraphs[i]) + tail[i] for i in _launchable(subgraphs, streams))
        return max([streams.compute_free + left, streams.communication_free, *chains])

    beam = [_Streams(0.0, 0.0, {})]
    for _ in subgraphs:
        grown = {}
        for streams in beam:
            for index in _launchable(subgraphs, streams):
                after = streams.launch(index, subgraphs[index])
                grown[frozenset(after.done), *after[:2]] = after
        beam = heapq.nsmallest(width, grown.values(), key=least_seconds)
    return list(beam[0].done)


def _launchable(subgraphs: Sequence[Subgraph], streams: "_Streams") -> list[int]:
    """The subgraphs that are not launched and depend only on launched ones."""
    done = streams.done.keys()
    return [i for i, s in enumerate(subgraphs) if i not in done and done >= set(s.after)]


class _Streams(NamedTuple):
    """The state of the two streams after some subgraphs are launched.

    Attributes:
      compute_free: time in seconds at which the compute stream is free.
      communication_free: time in seconds at which the communication stream is free.
      done: by launched subgraph, in the order of launches, the time at which its result is there.
    """

    compute_free: float
    communication_free: float
    done: dict[int, float]

    def start(self, subgraph: Subgraph) -> float:
        """The time at which the compute stream could start a subgraph."""
        return max([self.compute_free, *(self.done[i] for i in subgraph.after)])

    def launch(self, index: int, subgraph: Subgraph) -> "_Streams":
        end = self.start(subgraph) + subgraph.compute
        if not subgraph.communication:
            return _Streams(end, self.communication_free, self.done | {index: end})
        arrival = max(end, self.communication_free) + subgraph.communication
        return _Streams(end, arrival, self.done | {index: arrival})


def _topological_order(subgraphs: Sequence[Subgraph], key: Callable[[int], tuple]) -> list[int]:
    """Kahn's algorithm over all graphs at once: the launchable subgraph of least key comes next."""
    sorter = TopologicalSorter({i: subgraph.after for i, subgraph in enumerate(subgraphs)})
    # After the error, the sorter still yields all subgraphs that no cycle holds back.
    with suppress(CycleError):
        sorter.prepare()
    queue, order = [], []
    while sorter.is_active():
        for index in sorter.get_ready():
            heapq.heappush(queue, (key(index), index))
        _, index = heapq.heappop(queue)
        order.append(index)
        sorter.done(index)
    if len(order) < len(subgraphs):
        stuck = sorted(set(range(len(subgraphs))) - set(order))
        raise PlanningError(f"the subgraphs {stuck} depend on each other in a cycle")
    return order


def _depths(subgraphs: Sequence[Subgraph]) -> list[int]:
    """For each subgraph, the length of the longest chain of dependencies before it."""
    depth = [0] * len(subgraphs)
    for index in sequential_order(subgraphs):
        depth[index] = max((depth[i] + 1 for i in subgraphs[index].after), default=0)
    return depth


def _longest_tails(subgraphs: Sequence[Subgraph]) -> list[float]:
    """For each subgraph, the seconds of the longest chain of dependent subgraphs from its start."""
    tail = [0.0] * len(subgraphs)
    for index in reversed(sequential_order(subgraphs)):
        subgraph = subgraphs[index]
        # So far it is the longest tail of those that depend on this subgraph.
        tail[index] += subgraph.compute + subgraph.communication
        for source in subgraph.after:
            tail[source] = max(tail[source], tail[index])
    return tail
