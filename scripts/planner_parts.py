"""How near the planner's parts are to the optimum, and how long they take."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pulp
from planner_bubbles import shape_of
from planner_costs import (
    ATTENTION_IN,
    ATTENTION_OUT,
    MLP_IN,
    MLP_OUT,
    adapter_seconds,
    all_reduce_seconds,
    attention_seconds,
    cost_models,
    linear_seconds,
    llama,
)

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing.microbatches import pack_greedily, pack_rounds
from jaxmux.planner.pipeline.buckets import balance_gap, balanced_buckets, candidate_buckets
from jaxmux.planner.pipeline.fusion import fuse_tasks
from jaxmux.planner.pipeline.interleaving import interleave, run_order
from jaxmux.planner.pipeline.make_plan import ShapeRequest, TaskLoad, make_plan, shared_pool
from jaxmux.planner.pipeline.pipeline_plan import Round
from jaxmux.planner.pipeline.subgraphs import Block, Subgraph, graph_of, segment

Loads = Sequence[float]


def timed[Result](call: Callable[[], Result]) -> tuple[Result, float]:
    """What it returns, and the seconds until then."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def fusion_gap(tasks: int, instances: int) -> float:
    """The largest difference between F* and brute force over all contiguous partitions."""
    gaps = []
    for seed in range(instances):
        rng = np.random.default_rng(seed)
        tokens = sorted(rng.integers(64, 4096, tasks).tolist())
        cost = dict(_contiguous_costs(rng, tasks))
        stages = int(rng.integers(1, 9))
        totals = []
        for cuts in range(2 ** (tasks - 1)):
            ends = [i + 1 for i in range(tasks - 1) if cuts >> i & 1] + [tasks]
            parts = [tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
            totals.append(cost[parts[0]] + sum(cost[part] for part in parts[1:]) / stages)
        found = fuse_tasks(tokens, cost.__getitem__, stages).latency
        gaps.append(abs(found / min(totals) - 1))
    return max(gaps)


def _contiguous_costs(rng: np.random.Generator, tasks: int):
    for end in range(1, tasks + 1):
        for start in range(end):
            yield tuple(range(start, end)), float((end - start) ** 0.7 + rng.random())


def fusion_seconds(tasks: int) -> float:
    tokens = np.random.default_rng(0).integers(64, 4096, tasks).tolist()

    def latency(htask: tuple[int, ...]) -> float:
        sizes = [tokens[task] for task in htask]
        return linear_seconds(sum(sizes)) + adapter_seconds(sizes)

    return timed(lambda: fuse_tasks(tokens, latency, stages=4))[1]


def random_loads(htasks: int, seed: int) -> list[float]:
    return np.random.default_rng([htasks, seed]).lognormal(0, 0.7, htasks).tolist()


def bucket_gaps(htasks: int, instances: int) -> tuple[float, float]:
    """Of Eq. 7's variance, and of the largest bucket of any candidate, above brute force: the most
    over instances and numbers of buckets."""
    variance_gaps, largest_gaps = [], []
    for seed in range(instances):
        loads = random_loads(htasks, seed)
        least = np.full((2, htasks + 1), np.inf)
        for partition in partitions(range(htasks)):
            held = [sum(loads[i] for i in bucket) for bucket in partition]
            found = np.array([np.square(held).sum(), max(held)])
            least[:, len(held)] = np.minimum(least[:, len(held)], found)
        for buckets in balanced_buckets(loads):
            squares = sum(sum(loads[i] for i in bucket) ** 2 for bucket in buckets)
            variance_gaps.append(squares / least[0, len(buckets)] - 1)
        for buckets in candidate_buckets(loads):
            largest = max(sum(loads[i] for i in bucket) for bucket in buckets)
            largest_gaps.append(largest / least[1, len(buckets)] - 1)
    return max(variance_gaps), max(largest_gaps)


def largest_bucket_gap(htasks: int) -> float:
    """Of the largest bucket of any candidate, above max(mean, largest hTask), or, where that leaves
    more than 1% open, above the optimum of a mixed-integer program solved to 0.1%."""
    loads = random_loads(htasks, seed=htasks + 1)
    gaps = []
    for buckets in candidate_buckets(loads):
        gap = balance_gap(loads, buckets)
        if gap > 0.01:
            largest = max(sum(loads[i] for i in bucket) for bucket in buckets)
            gap = largest / least_largest_bucket(loads, len(buckets)) - 1
        gaps.append(gap)
    return max(gaps)


def least_largest_bucket(loads: Loads, count: int) -> float:
    """A lower bound, to 0.1%, on the largest of so many buckets, by a mixed-integer program."""
    problem = pulp.LpProblem("buckets", pulp.LpMinimize)
    largest = problem.add_variable("largest", max(max(loads), sum(loads) / count))
    order = sorted(range(len(loads)), key=lambda i: -loads[i])
    # Of equal buckets, the n-th longest hTask may only open the n-th.
    holds = {
        (i, bucket): problem.add_variable(f"x{i}_{bucket}", cat="Binary")
        for n, i in enumerate(order)
        for bucket in range(min(n + 1, count))
    }
    problem.setObjective(largest + 0)
    for i in order:
        own = [holds[i, bucket] for bucket in range(count) if (i, bucket) in holds]
        problem.addConstraint(pulp.lpSum(own) == 1)
    for bucket in range(count):
        held = [loads[i] * holds[i, bucket] for i in order if (i, bucket) in holds]
        problem.addConstraint(pulp.lpSum(held) - largest <= 0)
    return problem.solve(pulp.HiGHS(msg=False, gapRel=1e-3, timeLimit=10)).best_bound


def bound_on_bucket_gap(htasks: int) -> float:
    """Of the buckets for P = 2 ... htasks / 4, the worst against max(mean, largest hTask)."""
    loads = random_loads(htasks, seed=0)
    return max(balance_gap(loads, b) for b in balanced_buckets(loads)[1 : htasks // 4])


class Packing(NamedTuple):
    """Microbatches of some rounds, those of greedy packing, how far above the lower bound the
    former are, and milliseconds a sample of packing in one process."""

    microbatches: int
    greedy: int
    gap: float
    milliseconds: float


def packing(rounds: Sequence[Round], tokens: int) -> Packing:
    shape = shape_of(rounds, tokens)
    samples = sum(len(sizes) for batches in rounds for sizes in batches.values())
    packed, seconds = timed(lambda: pack_rounds(rounds, shape))
    count = sum(batch.count for batch in packed)
    greedy = sum(pack_greedily(batches, shape).count for batches in rounds)
    bound = sum(batch.bound for batch in packed)
    return Packing(count, greedy, count / bound - 1, 1e3 * seconds / samples)


def plan_seconds(lengths: Mapping[str, Sequence[int]], tasks: int, stages: int, seed: int) -> float:
    """Of a whole plan, as `python -m jaxmux.plan` makes it, for tasks of all data sets in turns."""
    rng = np.random.default_rng(seed)
    loads = []
    for i in range(tasks):
        own = sorted(lengths)[i % len(lengths)]
        batches = rng.choice(lengths[own], (8, 16)).tolist()
        loads.append(TaskLoad(f"{own}{i}", PoolSpec(1, 16), 16, 100, sum(batches, []), batches))
    models = cost_models(llama())
    costs = ReplicaCosts(
        models.times, models.memory, shared_pool(loads), Replica.uniform(stages, 1)
    )
    request = ShapeRequest(8192, least_chunk_len=128)
    return timed(lambda: make_plan(loads, request, costs, models.source, rounds=8))[1]


def decoder_subgraphs(htask_lengths: Sequence[Sequence[int]], layers: int, tp: int):
    """Forward subgraphs of some decoder layers; each hTask is one task with these sequences."""
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
    """Mean and largest gap to the best of all orders, on random graphs of up to 8 subgraphs."""
    gaps = []
    for seed in range(instances):
        subgraphs = _random_subgraphs(seed)
        best = min(run_order(subgraphs, order).seconds for order in _all_orders(subgraphs))
        gaps.append(interleave(subgraphs).overlap.seconds / best - 1)
    return float(np.mean(gaps)), max(gaps)


def _random_subgraphs(seed: int) -> list[Subgraph]:
    rng = np.random.default_rng(seed)
    subgraphs: list[Subgraph] = []
    for htask in range(2):
        first = len(subgraphs)
        for index in range(first, first + 4):
            after = () if index == first else (int(rng.integers(first, index)),)
            compute, communication = 0.2 + rng.random(), rng.random() * rng.choice([0, 0.3, 1, 2])
            subgraphs.append(Subgraph(htask, float(compute), float(communication), after))
    return subgraphs


def _all_orders(subgraphs: Sequence[Subgraph], begun: tuple[int, ...] = ()):
    if len(begun) == len(subgraphs):
        yield begun
    for index, subgraph in enumerate(subgraphs):
        if index not in begun and set(subgraph.after) <= set(begun):
            yield from _all_orders(subgraphs, (*begun, index))
