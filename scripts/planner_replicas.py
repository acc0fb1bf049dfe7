"""LobRA's experiment (5.2) in simulation: GPU seconds of heterogeneous replicas against the fused
homogeneous plan and against one task after another, on real lengths; and solve times."""

import dataclasses
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from planner_costs import AXES, SOURCE, cost_models, llama

from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.replicas.cost_table import Replica, SequenceCosts, tabulate_costs
from jaxmux.planner.replicas.deployment_choice import choose_replicas
from jaxmux.planner.replicas.deployment_plan import (
    DeploymentPlan,
    candidate_replicas,
    plan_replicas,
)
from jaxmux.planner.replicas.length_bins import LengthBins, choose_length_bins
from jaxmux.planner.replicas.like_replicas import measure, plan_fused, plan_sequential
from jaxmux.planner.replicas.sample_dispatch import dispatch_samples
from jaxmux.planner.replicas.sequence_costs import ModelledSequenceCosts

CONTEXT = 16_384
BUCKETS = 16
BOUNDARIES = range(256, CONTEXT + 1, 256)
STEPS = 10
# Steps of the sample that replicas are planned by (LobRA 4.2), and of these, dispatched.
SAMPLED_STEPS = 100
GIB = 2**30
# From question answering to summaries of meetings.
SIX_TASKS = ("gsm8k", "dialogsum", "pubmedqa", "xsum", "squality", "qmsum")
TWELVE_TASKS = (
    *SIX_TASKS,
    *("alpaca_1k", "arc_challenge", "codealpaca", "math", "mbpp", "openbookqa"),
)


@dataclasses.dataclass(frozen=True)
class PaperMachine:
    """Times and memory from first principles; by default Llama2-7B on A100-40GB.

    LoRA needs no weight gradients: 4 FLOPs per parameter and token, and causal attention. Tensor
    parallelism adds four all-reduces a layer, over NVLink up to 8 GPUs and InfiniBand beyond, and
    narrower, less efficient products. Weights are divided by tp·pp, activations only by tp, as a
    1F1B pipeline holds those of pp microbatches. The constant is the pipeline's filling, with
    microbatches of 4096 tokens or the most that fit.
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
        tp, pp = configuration
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
    """A backbone on a mesh.

    Attributes:
      model: of its replicas.
      sequences: of a step of a task of short ones; tasks of long ones have fewer.
      tp: degrees to choose from.
      costs: where they come from.
    """

    name: str
    model: SequenceCosts
    gpus: int
    tasks: tuple[str, ...]
    sequences: int
    tp: tuple[int, ...] = (1, *AXES)
    costs: str = SOURCE.kind


def h200_replicas(memory: int | None, remat: str, large: bool = False) -> ModelledSequenceCosts:
    """8B or 70B at an H200's speed.

    Args:
      memory: bytes of a GPU; None for an H200's.
      remat: "dots" keeps all that the backward pass needs, as LobRA does; "auto" recomputes what
        does not fit.
    """
    size = llama(layers=80, width=8192, kv=1024, mlp=28672) if large else llama()
    models = cost_models(size, memory)
    return ModelledSequenceCosts(models.times, models.memory, PoolSpec(12, 16), remat=remat)


def cases() -> Iterator[Case]:
    paper = (1, *AXES, 16), "first principles"
    yield Case("7B on 16 A100 of 40 GB", A100_7B, 16, SIX_TASKS, 128, *paper)
    yield Case("70B on 64 A800 of 80 GB", A800_70B, 64, TWELVE_TASKS, 256, *paper)
    small, kept = h200_replicas(40 * GIB, "dots"), h200_replicas(40 * GIB, "auto")
    yield Case("8B on 16 H200 of 40 GiB", small, 16, SIX_TASKS, 128)
    yield Case("8B on 64 H200 of 40 GiB", small, 64, TWELVE_TASKS, 512)
    yield Case("8B on 16 H200 of 40 GiB, recomputing", kept, 16, SIX_TASKS, 128)
    large = h200_replicas(None, "dots", large=True)
    yield Case("70B on 64 H200", large, 64, TWELVE_TASKS, 256, costs="estimated")


class Outcome(NamedTuple):
    """GPU seconds of a step, the mean over simulated steps.

    Attributes:
      ours: with heterogeneous replicas, dynamic buckets and balanced dispatch.
      fused, sequential: as LobRA's competitors: like replicas, fixed buckets, uniform dispatch.
      balanced_fused, balanced_sequential: like replicas with our buckets and dispatch.
      floor: each sequence where it takes least, and no GPU ever idle.
    """

    deployment: DeploymentPlan
    ours: float
    fused: float
    balanced_fused: float
    sequential: float
    balanced_sequential: float
    floor: float


def simulate(case: Case, lengths: Mapping[str, Sequence[int]], seed: int) -> Outcome:
    rng = np.random.default_rng(seed)
    tasks = {task: np.minimum(lengths[task], CONTEXT) for task in case.tasks}
    # Tasks of long documents have few sequences a batch.
    sizes = {t: case.sequences // (1 + int(np.mean(own)) // 256) for t, own in tasks.items()}
    draws = {t: rng.choice(own, (STEPS, sizes[t])) for t, own in tasks.items()}
    sampled = {t: rng.choice(own, (SAMPLED_STEPS, sizes[t])) for t, own in tasks.items()}
    together, first_sampled = _together(draws), _together(sampled)[:STEPS]
    sample = _bucketed(np.concatenate([own.ravel() for own in sampled.values()]))
    fixed = sample.boundaries
    candidates = candidate_replicas(case.gpus, case.tp, (1, *AXES))
    given = (case.gpus, candidates)
    dynamic = [_bucketed(step) for step in together]
    by_task = {t: [_bucketed(step) for step in own] for t, own in draws.items()}
    padded = [choose_length_bins(step, fixed, len(fixed)) for step in together]
    padded_by_task = {
        t: [choose_length_bins(step, fixed, len(fixed)) for step in own] for t, own in draws.items()
    }
    found = choose_replicas(
        *given, sample, [_bucketed(step) for step in first_sampled], case.model, SAMPLED_STEPS
    )
    uniform = plan_sequential(*given, padded_by_task, case.model, rng)
    balanced = plan_sequential(*given, by_task, case.model)
    return Outcome(
        found,
        measure(found.replicas, case.gpus, dynamic, case.model).gpu_seconds,
        plan_fused(*given, padded, case.model, rng).gpu_seconds,
        plan_fused(*given, dynamic, case.model).gpu_seconds,
        sum(plan.gpu_seconds for plan in uniform.values()),
        sum(plan.gpu_seconds for plan in balanced.values()),
        _floor(candidates, dynamic, case.model),
    )


def _together(draws: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """By step, the sequences of all tasks."""
    return list(np.concatenate(list(draws.values()), axis=1))


def _floor(
    candidates: Sequence[Replica], steps: Sequence[LengthBins], model: SequenceCosts
) -> float:
    seconds = 0.0
    for buckets in steps:
        costs = tabulate_costs(candidates, buckets.boundaries, model)
        seconds += (costs.gpus[:, None] * costs.per_sequence).min(axis=0) @ buckets.counts
    return float(seconds) / len(steps)


def deployment_of(gpus: int) -> tuple[DeploymentPlan, float]:
    """Of 70B on A800s for a skewed mix of lengths, and the seconds that planning took."""
    rng = np.random.default_rng(0)
    lengths = np.minimum(rng.lognormal(5.7, 1.3, 50_000).astype(int) + 1, CONTEXT)
    candidates = candidate_replicas(gpus, (1, *AXES, 16), (1, *AXES))
    steps = 50_000 // (gpus * 16)
    start = time.perf_counter()
    found = plan_replicas(gpus, candidates, _bucketed(lengths), A800_70B, steps)
    return found, time.perf_counter() - start


class Dispatching(NamedTuple):
    """Of steps dispatched one by one: seconds, gaps to the bound, and those of the greedy one."""

    seconds: np.ndarray
    gaps: np.ndarray
    greedy_gaps: np.ndarray


def dispatching(steps: int) -> Dispatching:
    """1,500 sequences in 16 buckets to replicas of 5 configurations."""
    model = h200_replicas(40 * GIB, "dots")
    replicas = {(1, 1): 12, (1, 2): 4, (2, 1): 8, (4, 1): 5, (8, 1): 2}
    replicas = {Replica(*degrees): count for degrees, count in replicas.items()}
    found = [_dispatch_timed(replicas, buckets, model) for buckets in _random_steps(steps)]
    return Dispatching(*map(np.array, zip(*found, strict=True)))


def _dispatch_timed(
    replicas: Mapping[Replica, int], buckets: LengthBins, model: SequenceCosts
) -> tuple[float, float, float]:
    start = time.perf_counter()
    found = dispatch_samples(replicas, buckets, model)
    seconds = time.perf_counter() - start
    return seconds, found.gap, dispatch_samples(replicas, buckets, model, seconds=0).gap


def _random_steps(steps: int) -> Iterator[LengthBins]:
    for seed in range(steps):
        rng = np.random.default_rng(seed)
        boundaries = np.sort(rng.choice(BOUNDARIES, BUCKETS, replace=False)).tolist()
        # Long sequences are rare.
        weights = rng.dirichlet(np.ones(BUCKETS)) / np.sqrt(boundaries)
        counts = rng.multinomial(1500, weights / weights.sum())
        yield LengthBins(tuple(boundaries), tuple(counts.tolist()), 0)


def _bucketed(lengths: np.ndarray) -> LengthBins:
    return choose_length_bins(lengths, BOUNDARIES, BUCKETS)
