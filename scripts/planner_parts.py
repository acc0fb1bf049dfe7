"""The distance of task fusion, buckets and packing from the optimum, and the time they take."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pulp
from planner_bubbles import shape_of
from planner_costs import adapter_seconds, cost_models, linear_seconds, llama
from research.ablation import fuse_tasks
from research.first_fit import pack_greedily

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.replica_costs import ReplicaCosts
from jaxmux.planner.devices import Replica
from jaxmux.planner.packing.microbatches import RoundLengths, pack_rounds
from jaxmux.planner.packing.rows import smallest_shape_class
from jaxmux.planner.packing.shape_choice import ShapeRequest
from jaxmux.planner.pipeline import TaskLoad, make_plan, shared_pool
from jaxmux.planner.pipeline.groupings import balance_gap, balanced_buckets, candidate_buckets


def timed[Result](call: Callable[[], Result]) -> tuple[Result, float]:
    """Returns the result of the call, and the seconds that it took."""
    start = time.perf_counter()
    result = call()
    return result, time.perf_counter() - start


def partitions(items: Sequence[int]) -> Iterator[list[list[int]]]:
    """Yields every division of the items into parts."""
    if not items:
        yield []
        return
    first, *rest = items
    for partition in partitions(rest):
        yield [[first], *partition]
        for i, part in enumerate(partition):
            yield [*partition[:i], [first, *part], *partition[i + 1 :]]


def fusion_gap(tasks: int, instances: int) -> float:
    """Returns the largest relative difference between F* and the best of all contiguous partitions.

    Args:
      tasks: tasks of an instance.
      instances: number of random instances.
    """
    gaps = []
    for seed in range(instances):
        rng = np.random.default_rng(seed)
        tokens = sorted(rng.integers(64, 4096, tasks).tolist())
        cost = dict(_contiguous_costs(rng, tasks))
        stages = int(rng.integers(1, 9))
        totals = []
        for cuts in range(2 ** (tasks - 1)):
            ends = [i + 1 for i in range(tasks - 1) if cuts >> i & 1] + [tasks]
            htasks = [tuple(range(a, b)) for a, b in zip([0, *ends], ends, strict=False)]
            totals.append(cost[htasks[0]] + sum(cost[htask] for htask in htasks[1:]) / stages)
        found = fuse_tasks(tokens, cost.__getitem__, stages).latency
        gaps.append(abs(found / min(totals) - 1))
    return max(gaps)


def _contiguous_costs(rng: np.random.Generator, tasks: int):
    for end in range(1, tasks + 1):
        for start in range(end):
            yield tuple(range(start, end)), float((end - start) ** 0.7 + rng.random())


def fusion_seconds(tasks: int) -> float:
    """Returns the seconds that the fusion of `tasks` tasks takes."""
    tokens = np.random.default_rng(0).integers(64, 4096, tasks).tolist()

    def latency(htask: tuple[int, ...]) -> float:
        sizes = [tokens[task] for task in htask]
        return linear_seconds(sum(sizes)) + adapter_seconds(sizes)

    return timed(lambda: fuse_tasks(tokens, latency, stages=4))[1]


def random_latencies(htasks: int, seed: int) -> list[float]:
    """Returns a latency for each hTask, up to about 10 times apart."""
    return np.random.default_rng([htasks, seed]).lognormal(0, 0.7, htasks).tolist()


def bucket_gaps(htasks: int, instances: int) -> tuple[float, float]:
    """Returns the largest gaps of buckets to brute force over instances and numbers of buckets.

    Returns:
      The gap of the sum of squares of `balanced_buckets` (Eq. 7), and the gap of the largest bucket
      of any candidate, each relative to the best of all divisions.
    """
    variance_gaps, largest_gaps = [], []
    for seed in range(instances):
        latencies = random_latencies(htasks, seed)
        # The least sum of squares, and the least largest bucket, by number of buckets.
        least = np.full((2, htasks + 1), np.inf)
        for partition in partitions(range(htasks)):
            sums = _bucket_sums(latencies, partition)
            found = np.array([np.square(sums).sum(), max(sums)])
            least[:, len(sums)] = np.minimum(least[:, len(sums)], found)
        for buckets in balanced_buckets(latencies):
            squares = sum(total**2 for total in _bucket_sums(latencies, buckets))
            variance_gaps.append(squares / least[0, len(buckets)] - 1)
        for buckets in candidate_buckets(latencies):
            largest = max(_bucket_sums(latencies, buckets))
            largest_gaps.append(largest / least[1, len(buckets)] - 1)
    return max(variance_gaps), max(largest_gaps)


def largest_bucket_gap(htasks: int) -> float:
    """Returns the largest gap of the largest bucket of any candidate.

    The gap is relative to max(mean bucket, largest hTask), or, where that leaves more than 1%, to
    the optimum of a mixed-integer program solved to 0.1%.
    """
    latencies = random_latencies(htasks, seed=htasks + 1)
    gaps = []
    for buckets in candidate_buckets(latencies):
        gap = balance_gap(latencies, buckets)
        if gap > 0.01:
            largest = max(_bucket_sums(latencies, buckets))
            gap = largest / least_largest_bucket(latencies, len(buckets)) - 1
        gaps.append(gap)
    return max(gaps)


def _bucket_sums(latencies: Sequence[float], buckets: Sequence[Sequence[int]]) -> list[float]:
    return [sum(latencies[i] for i in bucket) for bucket in buckets]


def least_largest_bucket(latencies: Sequence[float], count: int) -> float:
    """Returns a lower bound, to 0.1%, on the largest of `count` buckets.

    It is the bound of a mixed-integer program that is solved for at most 10 s.
    """
    problem = pulp.LpProblem("buckets", pulp.LpMinimize)
    largest = problem.add_variable("largest", max(max(latencies), sum(latencies) / count))
    order = sorted(range(len(latencies)), key=lambda i: -latencies[i])
    # Buckets are interchangeable, so the n-th longest hTask is only allowed in the first n.
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
        held = [latencies[i] * holds[i, bucket] for i in order if (i, bucket) in holds]
        problem.addConstraint(pulp.lpSum(held) - largest <= 0)
    return problem.solve(pulp.HiGHS(msg=False, gapRel=1e-3, timeLimit=10)).best_bound


def bound_on_bucket_gap(htasks: int) -> float:
    """Returns the largest `balance_gap` of P = 2 ... htasks / 4 buckets."""
    latencies = random_latencies(htasks, seed=0)
    buckets = balanced_buckets(latencies)[1 : htasks // 4]
    return max(balance_gap(latencies, of_count) for of_count in buckets)


class Packing(NamedTuple):
    """The packing of some rounds.

    Attributes:
      microbatches: number of microbatches.
      greedy: number of microbatches of greedy packing.
      gap: `microbatches` relative to the lower bound, minus 1.
      milliseconds: time of packing per sample, in one process.
    """

    microbatches: int
    greedy: int
    gap: float
    milliseconds: float


def packing(rounds: Sequence[RoundLengths], tokens: int) -> Packing:
    """Packs the rounds into microbatches of `tokens` tokens."""
    shape = shape_of(rounds, tokens)
    samples = sum(len(sizes) for batches in rounds for sizes in batches.values())
    packed, seconds = timed(lambda: pack_rounds(rounds, shape))
    count = sum(batch.count for batch in packed)
    greedy = sum(pack_greedily(batches, shape).count for batches in rounds)
    bound = sum(batch.bound for batch in packed)
    return Packing(count, greedy, count / bound - 1, 1e3 * seconds / samples)


class MixedPacking(NamedTuple):
    """Rows of packed rounds of many random mixes of tasks.

    Attributes:
      gap: rows of all rounds relative to their lower bounds, minus 1. These bounds hold for every
        layout in which a chunk belongs to one task.
      worst: the largest gap of a mix.
      given_spans: rows of all rounds relative to lower bounds for each task's samples cut into
        spans without regard to the other tasks, minus 1. The rest of `gap` is the price of this
        isolation, or looseness of the bound.
    """

    gap: float
    worst: float
    given_spans: float


def packing_of_mixes(lengths: Mapping[str, Sequence[int]], mixes: int, seed: int) -> MixedPacking:
    """Packs three rounds of each random mix of 2 to 8 data sets, with batches of 8 to 64 samples,
    samples of up to 512 to 2,048 tokens, and chunks of 64 to 256 tokens."""
    rng = np.random.default_rng(seed)
    counts = []
    for _ in range(mixes):
        most = rng.choice([512, 1024, 2048])
        chosen = rng.choice(sorted(lengths), rng.integers(2, 9))
        batches = rng.choice([8, 16, 32, 64], len(chosen))
        rounds = [
            {
                slot: np.clip(rng.choice(lengths[own], size), 1, most).tolist()
                for slot, (own, size) in enumerate(zip(chosen, batches, strict=True))
            }
            for _ in range(3)
        ]
        own = [size for batches in rounds for sizes in batches.values() for size in sizes]
        for chunk_len in (64, 128, 256):
            # A microbatch is as small as possible, so that rows are counted.
            shape = smallest_shape_class(own, 1, chunk_len)
            packed = pack_rounds(rounds, shape)
            counts.append(
                [
                    sum(getattr(p, name) for p in packed)
                    for name in ("count", "bound", "isolated_bound")
                ]
            )
    found, bound, isolated = np.array(counts).T
    gaps = [total.sum() for total in (found, bound, isolated)]
    return MixedPacking(
        gaps[0] / gaps[1] - 1, float((found / bound).max() - 1), gaps[0] / gaps[2] - 1
    )


class UnusualPacking(NamedTuple):
    """Rows of packed rounds of random mixes of lengths that few data sets have.

    Attributes:
      gap: mean over the mixes of the rows relative to their lower bound, minus 1.
      worst: the largest gap of a mix.
      given_spans: mean over the mixes of the rows relative to the lower bound for each task's
        samples as they are cut, minus 1.
      families: by family of lengths, the mean gap and the largest.
      seconds: time of the process for packing all mixes.
    """

    gap: float
    worst: float
    given_spans: float
    families: Mapping[str, tuple[float, float]]
    seconds: float


def packing_of_unusual_lengths(mixes: int, seed: int) -> UnusualPacking:
    """Packs three rounds of each random mix of 1 to 32 tasks with batches of 4 to 64 samples.

    All tasks of a mix have lengths of one of the families of `_unusual_lengths`, which take turns,
    each with random parameters. Samples have up to 512 to 2,048 tokens, and chunks 64 to 256.
    """
    gaps: dict[str, list[tuple[float, float]]] = {}
    spent = 0.0
    for mix in range(mixes):
        rng = np.random.default_rng([seed, mix])
        tasks, batch = int(rng.choice([1, 2, 4, 8, 16, 32])), int(rng.choice([4, 8, 16, 32, 64]))
        batch = min(batch, 512 // tasks)
        longest = int(rng.choice([512, 1024, 2048]))
        family = _FAMILIES[mix % len(_FAMILIES)]
        lengths = [
            np.clip(_unusual_lengths(family, rng, 3 * batch).astype(int), 1, longest)
            for _ in range(tasks)
        ]
        rounds = [
            {slot: sizes[i * batch :][:batch].tolist() for slot, sizes in enumerate(lengths)}
            for i in range(3)
        ]
        # A microbatch is as small as possible, so that rows are counted.
        every = np.concatenate(lengths).tolist()
        shape = smallest_shape_class(every, 1, int(rng.choice([64, 128, 256])))
        start = time.process_time()
        packed = pack_rounds(rounds, shape)
        spent += time.process_time() - start
        count, bound, isolated = (
            sum(getattr(batch, name) for batch in packed)
            for name in ("count", "bound", "isolated_bound")
        )
        gaps.setdefault(family, []).append((count / bound - 1, count / isolated - 1))
    together = np.concatenate([np.array(pairs) for pairs in gaps.values()])
    return UnusualPacking(
        float(together[:, 0].mean()),
        float(together[:, 0].max()),
        float(together[:, 1].mean()),
        {
            family: (float(np.mean(pairs, 0)[0]), float(np.max(pairs, 0)[0]))
            for family, pairs in gaps.items()
        },
        spent,
    )


_FAMILIES = (
    "log-normal with a heavy tail",
    "Pareto",
    "two lengths",
    "many short and few long",
    "just above multiples of 64",
    "uniform",
)


def _unusual_lengths(family: str, rng: np.random.Generator, size: int) -> np.ndarray:
    """Returns the tokens of `size` samples of one task."""
    match family:
        case "log-normal with a heavy tail":
            return rng.lognormal(np.log(rng.uniform(30, 300)), rng.uniform(0.8, 1.4), size)
        case "Pareto":
            return rng.uniform(20, 200) * (1 + rng.pareto(rng.uniform(0.9, 2), size))
        case "two lengths":
            short, long = rng.integers(16, 400), rng.integers(300, 1500)
            return np.where(rng.random(size) < rng.uniform(0.2, 0.8), short, long)
        case "many short and few long":
            short, long = rng.integers(8, 80, size), rng.integers(600, 2048, size)
            return np.where(rng.random(size) < 0.9, short, long)
        case "just above multiples of 64":
            unit = 64 * rng.choice([1, 2, 4, 8])
            return unit * rng.integers(1, rng.integers(2, 8), size) + rng.integers(1, 9, size)
        case "uniform":
            return rng.integers(16, rng.integers(64, 1500), size)
    raise ValueError(family)


def plan_seconds(lengths: Mapping[str, Sequence[int]], tasks: int, stages: int, seed: int) -> float:
    """Returns the seconds in which a whole plan is made, as the command line makes it.

    Args:
      lengths: by data set, the tokens of its samples.
      tasks: number of tasks, which take the data sets in turn.
      stages: number of pipeline stages.
      seed: seed of the random samples.
    """
    rng = np.random.default_rng(seed)
    loads = []
    for i in range(tasks):
        own = sorted(lengths)[i % len(lengths)]
        batches = rng.choice(lengths[own], (8, 16)).tolist()
        loads.append(TaskLoad(f"{own}{i}", PoolSpec(1, 16), 16, 100, sum(batches, []), batches))
    models = cost_models(llama())
    replica = Replica.uniform(pp=stages)
    costs = ReplicaCosts(models.times, models.memory, shared_pool(loads), replica)
    request = ShapeRequest(8192, least_chunk_len=128)
    return timed(lambda: make_plan(loads, request, costs, models.source, rounds=8))[1]
