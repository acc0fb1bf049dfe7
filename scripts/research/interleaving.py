"""Interleaves the hTasks of a bucket within a stage to hide collectives (MuxTune 3.4.2, Alg. 1).

`segment` cuts the computational graphs of hTasks into subgraphs, and `interleave` orders them.
hTasks do not depend on each other, so a stage can compute one hTask while another waits for its
all-reduce. The model of a stage is a compute stream and a communication stream. The compute stream
runs whole subgraphs in a given order. The collective at the end of a subgraph runs on the
communication stream, in the order in which collectives are issued. A subgraph starts when all
subgraphs that it depends on have ended, including their collectives.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter
from typing import NamedTuple

import numpy as np
from planner_costs import (
    ATTENTION_IN,
    ATTENTION_OUT,
    MLP_IN,
    MLP_OUT,
    adapter_seconds,
    all_reduce_seconds,
    attention_seconds,
    linear_seconds,
)

from jaxmux.planner import PlanningError


class Operator(NamedTuple):
    """An operator of the computational graph of an hTask on one device.

    Attributes:
      seconds: its latency.
      after: indices of the operators whose results it takes, all of them smaller than its own.
      is_collective: whether it runs on the communication stream.
      is_adapter: whether it belongs to an adapter, which MuxTune isolates in a subgraph.
    """

    seconds: float
    after: tuple[int, ...] = ()
    is_collective: bool = False
    is_adapter: bool = False


class Block(NamedTuple):
    """Half a decoder layer, attention or MLP, forward or backward, under tensor parallelism.

    Attributes:
      projection: seconds of the norm and the frozen column-parallel linears.
      adapter: seconds of the adapters of these linears, which take the same input.
      rest: seconds of all that follows, through the row-parallel linear.
      all_reduce: seconds of the collective at the end; 0 without tensor parallelism.
    """

    projection: float
    adapter: float
    rest: float
    all_reduce: float


class Subgraph(NamedTuple):
    """Compute operators that run one after another, and the collective that follows them.

    Attributes:
      htask: index of the hTask whose graph it belongs to.
      compute: seconds on the compute stream.
      communication: seconds of the collective on the communication stream; 0 for no collective.
      after: indices of the subgraphs that it depends on, including their collectives. They belong
        to another hTask where adapters are fused across hTasks (MuxTune 3.4.3).
    """

    htask: int
    compute: float
    communication: float = 0.0
    after: tuple[int, ...] = ()


def graph_of(blocks: Sequence[Block]) -> list[Operator]:
    """Returns the graph of an hTask that passes through the blocks one after another."""
    operators: list[Operator] = []
    for block in blocks:
        previous = (len(operators) - 1,) if operators else ()
        first = len(operators)
        operators += [
            Operator(block.projection, previous),
            Operator(block.adapter, previous, is_adapter=True),
            Operator(block.rest, (first, first + 1)),
            Operator(block.all_reduce, (first + 2,), is_collective=True),
        ]
    return operators


def segment(graphs: Sequence[Sequence[Operator]]) -> list[Subgraph]:
    """Cuts the graph of each hTask into subgraphs, each as large as the dependencies allow.

    Consecutive compute operators become one subgraph. A collective is added to the subgraph of the
    operator that it depends on and ends that subgraph. The operators of an adapter become a
    subgraph of their own.

    Args:
      graphs: for each hTask, its operators in an order that keeps the dependencies.

    Returns:
      The subgraphs of all hTasks, each after those that it depends on.

    Raises:
      PlanningError: an operator depends on a later one, a collective does not depend on exactly one
        compute operator, or two collectives depend on the same one.
    """
    subgraphs: list[Subgraph] = []
    for htask, operators in enumerate(graphs):
        _append_graph(subgraphs, htask, operators)
    return subgraphs


def _append_graph(subgraphs: list[Subgraph], htask: int, operators: Sequence[Operator]) -> None:
    consumers = Counter(source for operator in operators for source in operator.after)
    # For each operator, the index of its subgraph.
    subgraph_of: list[int] = []
    for index, operator in enumerate(operators):
        where = f"hTask {htask}, operator {index}"
        if any(not 0 <= source < index for source in operator.after):
            raise PlanningError(f"{where}: takes {operator.after}, expected operators before it")
        if operator.is_collective:
            subgraph_of.append(_append_collective(subgraphs, operators, subgraph_of, index, where))
            continue
        if len(operator.after) == 1 and consumers[operator.after[0]] == 1:
            (source,) = operator.after
            previous = subgraphs[subgraph_of[source]]
            same_kind = operators[source].is_adapter == operator.is_adapter
            if same_kind and not previous.communication:
                subgraphs[subgraph_of[source]] = previous._replace(
                    compute=previous.compute + operator.seconds
                )
                subgraph_of.append(subgraph_of[source])
                continue
        after = tuple(sorted({subgraph_of[source] for source in operator.after}))
        subgraph_of.append(len(subgraphs))
        subgraphs.append(Subgraph(htask, operator.seconds, 0.0, after))


def _append_collective(
    subgraphs: list[Subgraph],
    operators: Sequence[Operator],
    subgraph_of: Sequence[int],
    index: int,
    where: str,
) -> int:
    """Adds a collective to the subgraph that it depends on; returns the subgraph's index."""
    sources = operators[index].after
    if len(sources) != 1 or operators[sources[0]].is_collective:
        raise PlanningError(
            f"{where}: a collective takes {sources}, expected exactly one compute operator"
        )
    target = subgraph_of[sources[0]]
    if subgraphs[target].communication:
        raise PlanningError(f"{where}: operator {sources[0]} already has a collective")
    subgraphs[target] = subgraphs[target]._replace(communication=operators[index].seconds)
    return target


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


# For each hTask of a bucket, the tokens of the sequences of its microbatch.
OVERLAPS = {
    "2 like hTasks": [[512] * 8] * 2,
    "4 like hTasks": [[512] * 4] * 4,
    "3 unlike hTasks": [[256] * 4, [512] * 8, [2048] * 4],
}


def decoder_subgraphs(
    htask_lengths: Sequence[Sequence[int]], layers: int, tp: int
) -> list[Subgraph]:
    """Returns the subgraphs of the forward pass of some decoder layers.

    Args:
      htask_lengths: for each hTask, which is one task, the tokens of its sequences.
      layers: number of decoder layers.
      tp: tensor-parallel devices.
    """
    graphs = []
    for lengths in htask_lengths:
        total = sum(lengths)
        attention = float(attention_seconds(lengths, tp)[0])
        blocks = [
            Block(
                linear_seconds(total, into, tp),
                adapter_seconds([total], into, tp),
                middle + linear_seconds(total, out, tp),
                all_reduce_seconds(total, tp),
            )
            for into, out, middle in (
                (ATTENTION_IN, ATTENTION_OUT, attention),
                (MLP_IN, MLP_OUT, 0.0),
            )
        ]
        graphs.append(graph_of(blocks * layers))
    return segment(graphs)


def interleaving_gap(instances: int) -> tuple[float, float]:
    """Returns the mean and the largest gap of `interleave` to the best of all orders.

    Args:
      instances: number of random graphs, of 8 subgraphs each.
    """
    gaps = []
    for seed in range(instances):
        subgraphs = _random_subgraphs(seed)
        best = min(run_order(subgraphs, order).seconds for order in _all_orders(subgraphs))
        gaps.append(interleave(subgraphs).overlap.seconds / best - 1)
    return float(np.mean(gaps)), max(gaps)


def _random_subgraphs(seed: int) -> list[Subgraph]:
    """Two hTasks of four subgraphs each, with short and long collectives."""
    rng = np.random.default_rng(seed)
    subgraphs: list[Subgraph] = []
    for htask in range(2):
        first = len(subgraphs)
        for index in range(first, first + 4):
            after = () if index == first else (int(rng.integers(first, index)),)
            compute, communication = 0.2 + rng.random(), rng.random() * rng.choice([0, 0.3, 1, 2])
            subgraphs.append(Subgraph(htask, float(compute), float(communication), after))
    return subgraphs


def _all_orders(
    subgraphs: Sequence[Subgraph], begun: tuple[int, ...] = ()
) -> Iterator[tuple[int, ...]]:
    """Yields every order that keeps the dependencies and begins with `begun`."""
    if len(begun) == len(subgraphs):
        yield begun
    for index, subgraph in enumerate(subgraphs):
        if index not in begun and set(subgraph.after) <= set(begun):
            yield from _all_orders(subgraphs, (*begun, index))
