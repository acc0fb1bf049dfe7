"""LobRA's experiment (5.2) in simulation: device seconds of replicas of different sizes.

They are compared with replicas that are all alike, for all tasks together and for one task after
another, on real lengths. The time to plan for them is measured too.
"""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np
from planner_costs import AXES, SOURCE, cost_models, llama
from research.replicas import ModelledSequenceCosts, plan_fused, plan_sequential

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.devices import Deployment, Replica
from jaxmux.planner.errors import PlanningError
from jaxmux.planner.replicas import (
    DeploymentPlan,
    LengthBins,
    SequenceCosts,
    candidate_replicas,
    choose_length_bins,
    choose_replicas,
    dispatch_samples,
    plan_replicas,
)
from jaxmux.planner.replicas.cost_table import tabulate_costs
from jaxmux.planner.replicas.deployment_search import simulate_rounds

# Tokens of the longest sequence; longer ones are truncated.
CONTEXT = 16_384
# Most length bins, and the boundaries to choose from, in tokens.
BINS = 16
BOUNDARIES = range(256, CONTEXT + 1, 256)
# Rounds that the benchmark simulates, and rounds of the sample that replicas are planned with
# (LobRA 4.2).
ROUNDS = 10
SAMPLED_ROUNDS = 100
# Most seconds for the solver to prove what a round needs: many more than it takes, so that what is
# proven does not depend on how busy the machine is.
PROOF_SECONDS = 5.0
GIB = 2**30
# From question answering to summaries of meetings.
SIX_TASKS = ("gsm8k", "dialogsum", "pubmedqa", "xsum", "squality", "qmsum")
TWELVE_TASKS = (
    *SIX_TASKS,
    *("alpaca_1k", "arc_challenge", "codealpaca", "math", "mbpp", "openbookqa"),
)


@dataclasses.dataclass(frozen=True)
class PaperMachine:
    """A `SequenceCosts` from first principles; by default Llama2-7B on A100-40GB.

    LoRA needs no weight gradients, so training takes 4 FLOPs per parameter and token, and causal
    attention. Tensor parallelism adds four all-reduces per layer, over NVLink up to 8 GPUs and over
    InfiniBand beyond, and makes matrix products narrower and less efficient. Weights are divided by
    tp·pp. Activations are divided only by tp, because a 1F1B pipeline holds those of pp
    microbatches. The constant is the time to fill the pipeline, with microbatches of 4096 tokens or
    as many as fit.

    Attributes:
      parameters: number of parameters of the backbone.
      layers: number of decoder layers.
      width: d, the model width.
      memory: bytes of a GPU.
      nvlink, infiniband: bytes per second.
      flops: FLOPs per second of a GPU.
    """

    parameters: float = 6.7e9
    layers: int = 32
    width: int = 4096
    memory: float = 40e9
    nvlink: float = 180e9
    infiniband: float = 60e9
    flops: float = 170e12

    def longest(self, configuration: Replica) -> int:
        weights = 2 * self.parameters / configuration.devices
        token = 68 * self.width * self.layers / configuration.tp
        return max(0, int((0.92 * self.memory - weights) / token))

    def sequence_seconds(self, configuration: Replica, length: int) -> float:
        tp, pp = configuration.tp, configuration.pp
        products = 4 * self.parameters * length + 6 * self.layers * self.width * length**2
        compute = products * (1 + 0.03 * math.log2(tp)) / (tp * self.flops)
        inside, hosts = min(tp, 8), max(1, tp / 8)
        links = (1 - 1 / inside) / self.nvlink + (1 - 1 / hosts) / self.infiniband
        reduced = self.layers * 4 * 2 * length * self.width
        return (compute + 2 * reduced * links + 1.2e-4 * self.layers) / pp

    def constant_seconds(self, configuration: Replica) -> float:
        filling = min(4096, self.longest(configuration))
        return 0.02 + (configuration.pp - 1) * self.sequence_seconds(configuration, filling)


A100_7B = PaperMachine()
A800_70B = PaperMachine(69e9, 80, 8192, 80e9, 120e9, 120e9)


class Case(NamedTuple):
    """A backbone on a number of devices.

    Attributes:
      name: name for reports.
      model: times and memory of a replica.
      devices: number of devices.
      tasks: data sets of the tasks.
      sequences: sequences of a global batch of a task with short ones; tasks with long sequences
        have fewer.
      tp: tensor-parallel degrees to choose from.
      costs: the origin of the costs.
    """

    name: str
    model: SequenceCosts
    devices: int
    tasks: tuple[str, ...]
    sequences: int
    tp: tuple[int, ...] = (1, *AXES)
    costs: str = SOURCE.kind


def h200_replicas(memory: int | None, remat: str, large: bool = False) -> ModelledSequenceCosts:
    """Returns the costs of replicas of an 8B or 70B backbone at an H200's speed.

    Args:
      memory: bytes of a device; None for an H200's own.
      remat: "dots" keeps everything that the backward pass needs, as LobRA does; "auto" recomputes
        what does not fit.
      large: whether the backbone is the one of 70B.
    """
    size = llama(layers=80, width=8192, kv=1024, mlp=28672) if large else llama()
    models = cost_models(size, memory)
    return ModelledSequenceCosts(models.times, models.memory, PoolSpec(12, 16), remat=remat)


def cases() -> Iterator[Case]:
    """Yields the cases of the benchmark: the paper's, and others on H200s."""
    paper = (1, *AXES, 16), "first principles"
    yield Case("7B on 16 A100 of 40 GB", A100_7B, 16, SIX_TASKS, 128, *paper)
    yield Case("70B on 64 A800 of 80 GB", A800_70B, 64, TWELVE_TASKS, 256, *paper)
    small, kept = h200_replicas(40 * GIB, "dots"), h200_replicas(40 * GIB, "auto")
    yield Case("8B on 16 H200 of 40 GiB", small, 16, SIX_TASKS, 128)
    yield Case("8B on 64 H200 of 40 GiB", small, 64, TWELVE_TASKS, 512)
    yield Case("8B on 16 H200 of 40 GiB, recomputing", kept, 16, SIX_TASKS, 128)
    large = h200_replicas(None, "dots", large=True)
    yield Case("70B on 64 H200", large, 64, TWELVE_TASKS, 256, costs="estimated")


def small_case() -> Case:
    """Returns the mix of 7B on 16 GPUs, scaled to 4 GPUs."""
    return Case("8B on 4 H200 of 40 GiB", h200_replicas(40 * GIB, "auto"), 4, SIX_TASKS, 32)


class Outcome(NamedTuple):
    """Device seconds of a round, the mean over simulated rounds.

    Attributes:
      deployment: the chosen replicas.
      ours: replicas of different sizes, with dynamic length bins and balanced dispatch.
      fused: Task-Fused as in LobRA's comparison: like replicas, fixed length bins and uniform
        dispatch.
      balanced_fused: Task-Fused with our length bins and dispatch.
      sequential: Task-Sequential as in LobRA's comparison.
      balanced_sequential: Task-Sequential with our length bins and dispatch.
      floor: every sequence where it takes the fewest device seconds, and no device ever idle.
    """

    deployment: DeploymentPlan
    ours: float
    fused: float
    balanced_fused: float
    sequential: float
    balanced_sequential: float
    floor: float


def batch_sizes(lengths: Mapping[str, Sequence[int]], sequences: int) -> dict[str, int]:
    """Returns the sequences of a global batch of each task, of which those of long documents have
    few.

    Args:
      lengths: by task, the tokens of its samples.
      sequences: sequences of a global batch of a task with short ones.
    """
    return {t: max(1, sequences // (1 + int(np.mean(own)) // 256)) for t, own in lengths.items()}


def simulate(
    case: Case, lengths: Mapping[str, Sequence[int]], seed: int, rounds: int = ROUNDS
) -> Outcome:
    """Plans the replicas of a case and simulates rounds of random samples with them.

    Args:
      case: the case.
      lengths: by data set, the tokens of its samples.
      seed: seed of the random samples.
      rounds: number of simulated rounds.
    """
    rng = np.random.default_rng(seed)
    tasks = {task: np.minimum(lengths[task], CONTEXT) for task in case.tasks}
    sizes = batch_sizes(tasks, case.sequences)
    draws = {t: rng.choice(own, (rounds, sizes[t])) for t, own in tasks.items()}
    sampled = {t: rng.choice(own, (SAMPLED_ROUNDS, sizes[t])) for t, own in tasks.items()}
    together, first_sampled = _together(draws), _together(sampled)[:rounds]
    sample = _binned(np.concatenate([own.ravel() for own in sampled.values()]))
    fixed = sample.boundaries
    candidates = candidate_replicas(case.devices, case.tp, (1, *AXES))
    given = (case.devices, candidates)
    dynamic = [_binned(drawn) for drawn in together]
    by_task = {t: [_binned(drawn) for drawn in own] for t, own in draws.items()}
    padded = [choose_length_bins(drawn, fixed, len(fixed)) for drawn in together]
    padded_by_task = {
        t: [choose_length_bins(drawn, fixed, len(fixed)) for drawn in own]
        for t, own in draws.items()
    }
    found = choose_replicas(
        *given, sample, [_binned(drawn) for drawn in first_sampled], case.model, SAMPLED_ROUNDS
    )
    uniform = plan_sequential(*given, padded_by_task, case.model, rng)
    balanced = plan_sequential(*given, by_task, case.model)
    return Outcome(
        deployment=found,
        ours=simulate_rounds(found.replicas, case.devices, dynamic, case.model),
        fused=plan_fused(*given, padded, case.model, rng).device_seconds,
        balanced_fused=plan_fused(*given, dynamic, case.model).device_seconds,
        sequential=sum(plan.device_seconds for plan in uniform.values()),
        balanced_sequential=sum(plan.device_seconds for plan in balanced.values()),
        floor=_floor(candidates, dynamic, case.model),
    )


class MostGain(NamedTuple):
    """What replicas that are not all alike can gain over those that are, with our length bins and
    dispatch.

    Attributes:
      like: the fastest like replicas.
      unlike: the fastest other deployment.
      gain: time of a round with `like` divided by that with `unlike`.
      most: no other deployment has a larger gain, whatever the dispatch.
      deployments: number of other deployments, all that have memory for every sequence.
    """

    like: Deployment
    unlike: Deployment
    gain: float
    most: float
    deployments: int


def most_gain(
    case: Case, lengths: Mapping[str, Sequence[int]], seed: int, rounds: int = ROUNDS
) -> MostGain:
    """Simulates rounds of random samples with every deployment of the devices, which have to be
    few. Arguments as of `simulate`."""
    rng = np.random.default_rng(seed)
    tasks = {task: np.minimum(lengths[task], CONTEXT) for task in case.tasks}
    sizes = batch_sizes(tasks, case.sequences)
    drawn = _together({t: rng.choice(own, (rounds, sizes[t])) for t, own in tasks.items()})
    bins = [_binned(own) for own in drawn]
    like, unlike, least = [], [], math.inf
    for deployment in deployments(case.devices, candidate_replicas(case.devices)):
        try:
            found = [
                dispatch_samples(deployment.counts, own, case.model, time_limit=PROOF_SECONDS)
                for own in bins
            ]
        except PlanningError:
            continue
        seconds = sum(dispatch.round_seconds for dispatch in found)
        if len(deployment.counts) == 1:
            like.append((seconds, deployment))
        else:
            unlike.append((seconds, deployment))
            least = min(least, sum(dispatch.bound for dispatch in found))
    if not unlike:
        raise PlanningError(f"{case.name}: no unlike replicas have memory for every sequence")
    best, other = min(like, key=itemgetter(0)), min(unlike, key=itemgetter(0))
    return MostGain(best[1], other[1], best[0] / other[0], best[0] / least, len(unlike))


def deployments(devices: int, candidates: Sequence[Replica]) -> Iterator[Deployment]:
    """Yields every deployment of candidates that uses all devices, largest replicas first."""
    largest_first = sorted(candidates, key=lambda replica: -replica.devices)

    def rest(left: int, begin: int) -> Iterator[tuple[Replica, ...]]:
        if left == 0:
            yield ()
        for i in range(begin, len(largest_first)):
            if largest_first[i].devices <= left:
                for more in rest(left - largest_first[i].devices, i):
                    yield largest_first[i], *more

    yield from map(Deployment, rest(devices, 0))


def _together(draws: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """For each round, the sequences of all tasks."""
    return list(np.concatenate(list(draws.values()), axis=1))


def _floor(
    candidates: Sequence[Replica], rounds: Sequence[LengthBins], model: SequenceCosts
) -> float:
    seconds = 0.0
    for bins in rounds:
        costs = tabulate_costs(candidates, bins.boundaries, model)
        seconds += (costs.devices[:, None] * costs.per_sequence).min(axis=0) @ bins.counts
    return float(seconds) / len(rounds)


def deployment_of(devices: int) -> tuple[DeploymentPlan, float]:
    """Returns a deployment of 70B on A800s for skewed lengths, and the seconds to plan it."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.7, 1.3, 50_000).astype(int) + 1, CONTEXT)
    candidates = candidate_replicas(devices, (1, *AXES, 16), (1, *AXES))
    sampled_rounds = 50_000 // (devices * 16)
    start = time.perf_counter()
    found = plan_replicas(devices, candidates, _binned(lengths), A800_70B, sampled_rounds)
    return found, time.perf_counter() - start


class Dispatching(NamedTuple):
    """The dispatch of several rounds, one by one.

    Attributes:
      seconds: float64 [rounds], time that each dispatch took.
      gaps: float64 [rounds], gap of each dispatch to its bound.
      greedy_gaps: float64 [rounds], gap of the greedy dispatch.
    """

    seconds: np.ndarray
    gaps: np.ndarray
    greedy_gaps: np.ndarray


def dispatching(rounds: int) -> Dispatching:
    """Dispatches rounds of 1,500 sequences in 16 length bins to replicas of 5 configurations."""
    model = h200_replicas(40 * GIB, "dots")
    numbers = {(1, 1): 12, (1, 2): 4, (2, 1): 8, (4, 1): 5, (8, 1): 2}
    replicas = {Replica.uniform(pp=pp, tp=tp): number for (tp, pp), number in numbers.items()}
    found = [_dispatch_timed(replicas, bins, model) for bins in _random_rounds(rounds)]
    return Dispatching(*map(np.array, zip(*found, strict=True)))


def _dispatch_timed(
    replicas: Mapping[Replica, int], bins: LengthBins, model: SequenceCosts
) -> tuple[float, float, float]:
    start = time.perf_counter()
    found = dispatch_samples(replicas, bins, model)
    seconds = time.perf_counter() - start
    return seconds, found.gap, dispatch_samples(replicas, bins, model, time_limit=0).gap


def _random_rounds(rounds: int) -> Iterator[LengthBins]:
    for seed in range(rounds):
        rng = np.random.default_rng(seed)
        boundaries = np.sort(rng.choice(BOUNDARIES, BINS, replace=False)).tolist()
        # Long sequences are rare.
        weights = rng.dirichlet(np.ones(BINS)) / np.sqrt(boundaries)
        counts = rng.multinomial(1500, weights / weights.sum())
        yield LengthBins(tuple(boundaries), tuple(counts.tolist()), 0)


def _binned(lengths: np.ndarray) -> LengthBins:
    return choose_length_bins(lengths, BOUNDARIES, BINS)
