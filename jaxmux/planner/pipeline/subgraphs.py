"""Cuts the computational graphs of hTasks into subgraphs, which are scheduled (MuxTune 3.4.2)."""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import PlanningError


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
