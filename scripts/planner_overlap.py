"""Collectives of tensor parallelism that interleaved hTasks hide or expose (MuxTune 3.4.2)."""

from collections.abc import Iterator, Sequence

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

from jaxmux.planner.pipeline.interleaving import interleave, run_order
from jaxmux.planner.pipeline.subgraphs import Block, Subgraph, graph_of, segment

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
