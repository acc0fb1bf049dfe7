"""Cuts the graphs of hTasks into subgraphs, the units of orchestration (MuxTune 3.4.2)."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

from ..errors import PlanningError


class Operator(NamedTuple):
    """A node of the computational graph of an hTask on one device.

    Attributes:
      seconds: its latency.
      after: indices of the operators whose results it takes, all of them before it.
      is_collective: it runs on the communication stream.
      is_adapter: it belongs to a small-scale adapter.
    """

    seconds: float
    after: tuple[int, ...] = ()
    is_collective: bool = False
    is_adapter: bool = False


class Block(NamedTuple):
    """Half a decoder layer, attention or MLP, forward or backward, under tensor parallelism.

    Attributes:
      projection: seconds of the norm and the frozen column-parallel linears.
      adapter: seconds of their adapters, which take the same input.
      rest: seconds from there through the row-parallel linear.
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
      communication: seconds of the collective on the communication stream; 0 for none.
      after: indices of the subgraphs that it depends on, their collectives included. They may be
        of another hTask, where adapters are fused across hTasks (3.4.3).
    """

    htask: int
    compute: float
    communication: float = 0.0
    after: tuple[int, ...] = ()


def graph_of(blocks: Sequence[Block]) -> list[Operator]:
    """The graph of an hTask that goes through these blocks one after another."""
    operators: list[Operator] = []
    for block in blocks:
        before = (len(operators) - 1,) if operators else ()
        first = len(operators)
        operators += [
            Operator(block.projection, before),
            Operator(block.adapter, before, is_adapter=True),
            Operator(block.rest, (first, first + 1)),
            Operator(block.all_reduce, (first + 2,), is_collective=True),
        ]
    return operators


def segment(graphs: Sequence[Sequence[Operator]]) -> list[Subgraph]:
    """Cuts the graph of each hTask into subgraphs, as large as its dependencies let them be.

    Consecutive compute operators are clustered and a collective is appended to the operator that it
    depends on, which ends the cluster. An adapter's operators are a subgraph by themselves.

    Args:
      graphs: for each hTask its operators, each after those that it depends on.

    Raises:
      PlanningError: an operator depends on a later one, a collective not on exactly one compute
        operator, or two collectives on the same one.
    """
    subgraphs: list[Subgraph] = []
    for htask, operators in enumerate(graphs):
        _append_graph(subgraphs, htask, operators)
    return subgraphs


def _append_graph(subgraphs: list[Subgraph], htask: int, operators: Sequence[Operator]) -> None:
    consumers = defaultdict(int)
    for operator in operators:
        for source in operator.after:
            consumers[source] += 1
    home: list[int] = []
    for index, operator in enumerate(operators):
        where = f"hTask {htask}, operator {index}"
        if any(not 0 <= source < index for source in operator.after):
            raise PlanningError(f"{where}: takes {operator.after}, expected operators before it")
        if operator.is_collective:
            home.append(_append_collective(subgraphs, operators, home, index, where))
            continue
        if len(operator.after) == 1 and consumers[operator.after[0]] == 1:
            source = operator.after[0]
            joined = subgraphs[home[source]]
            alike = operators[source].is_adapter == operator.is_adapter
            if alike and not joined.communication:
                subgraphs[home[source]] = joined._replace(compute=joined.compute + operator.seconds)
                home.append(home[source])
                continue
        after = tuple(sorted({home[source] for source in operator.after}))
        home.append(len(subgraphs))
        subgraphs.append(Subgraph(htask, operator.seconds, 0.0, after))


def _append_collective(
    subgraphs: list[Subgraph],
    operators: Sequence[Operator],
    home: Sequence[int],
    index: int,
    where: str,
) -> int:
    sources = operators[index].after
    if len(sources) != 1 or operators[sources[0]].is_collective:
        raise PlanningError(
            f"{where}: a collective takes {sources}, expected exactly one compute operator"
        )
    found = subgraphs[home[sources[0]]]
    if found.communication:
        raise PlanningError(f"{where}: operator {sources[0]} already has a collective")
    subgraphs[home[sources[0]]] = found._replace(communication=operators[index].seconds)
    return home[sources[0]]
