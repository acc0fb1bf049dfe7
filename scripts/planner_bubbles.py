"""Bubbles of a pipeline of four stages that trains four tasks (LoRAFusion Fig. 20).

jaxmux's plan is compared with the orders of LoRAFusion, mLoRA and plain 1F1B on the same global
batches.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from planner_costs import permute_seconds, stage_seconds
from research.lower_bounds import least_makespan
from scipy.optimize import linear_sum_assignment

from jaxmux.planner.packing.microbatches import RoundLengths, pack_rounds
from jaxmux.planner.packing.rows import ShapeClass, smallest_shape_class
from jaxmux.planner.pipeline.groupings import pair_head_with_tail, take_turns
from jaxmux.planner.pipeline.pipeline_plan import (
    PipelineCosts,
    PipelinePlan,
    choose_grouping,
    plan_pipeline,
    schedule_turns,
    stream_workload,
)
from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    Workload,
    lorapp,
    one_forward_one_backward,
    simulate_asynchronous,
    validate,
)

STAGES = 4
# Mean number of words of a document and its summary in the data sets that LoRAFusion trains on, and
# tokens per word of the tokenizer of lengths.json, as in its sample of XSum.
WORDS = {"XSum": 431 + 23, "CNN/DailyMail": 781 + 56, "WikiSum": 1334 + 101}
TOKENS_PER_WORD = 1.18
# Bubble ratios that LoRAFusion reports (6.5, Fig. 20).
REPORTED = {
    "LoRAFusion, reported": 0.1109,
    "mLoRA, reported by LoRAFusion": 0.3411,
    "1F1B per task, reported by LoRAFusion": 0.4879,
}
# Samples of a microbatch of the methods that do not pack samples (LoRAFusion Fig. 6 and 7).
SAMPLES_PER_MICROBATCH = 4

# For each stage, its time relative to an equal share of the layers; more than 1 for a part of the
# head.
Scale = tuple[float, ...]
EQUAL_STAGES: Scale = (1.0,) * STAGES
HEAD_ON_LAST_STAGE: Scale = (1.0,) * (STAGES - 1) + (1.2,)
HEAD_SPLIT: Scale = (1 + 0.2 / STAGES,) * STAGES


class Result(NamedTuple):
    """The simulated times of a method for all rounds, with stages that run at their own pace.

    Attributes:
      ratio: bubble ratio.
      steady: bubble ratio without warm-up and drain.
      seconds: makespan.
      microbatches: number of microbatches.
      floor: least bubble ratio of any schedule of the same microbatches, given the times of the
        stages and the updates that tasks wait for.
    """

    ratio: float
    steady: float
    seconds: float
    microbatches: int
    floor: float


def nearest_sets(lengths: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """Returns different stand-ins for XSum, CNN/DailyMail and WikiSum, near in mean length.

    They minimise the sum of |log(mean / wanted mean)|.

    Args:
      lengths: by data set, the tokens of its samples.
    """
    names = sorted(lengths)
    means = np.array([np.mean(lengths[name]) for name in names])
    targets = TOKENS_PER_WORD * np.array(list(WORDS.values()))
    _, chosen = linear_sum_assignment(np.abs(np.log(means / targets[:, None])))
    return tuple(names[i] for i in chosen)


def draw_rounds(
    lengths: Mapping[str, Sequence[int]],
    sets: Sequence[str],
    samples: int,
    tokens: int,
    seed: int,
) -> list[RoundLengths]:
    """Draws rounds of one task for each data set and one task for their mix.

    Args:
      lengths: by data set, the tokens of its samples.
      sets: names of the data sets.
      samples: samples of a global batch.
      tokens: rounds are drawn until they have this many tokens together.
      seed: seed of the random numbers.
    """
    rng = np.random.default_rng(seed)
    sources = [list(lengths[name]) for name in sets]
    rounds: list[RoundLengths] = []
    while sum(sum(map(sum, batches.values())) for batches in rounds) < tokens:
        batches = {slot: rng.choice(source, samples) for slot, source in enumerate(sources)}
        mixed = [rng.choice(sources[i]) for i in rng.integers(len(sources), size=samples)]
        batches[len(sources)] = np.array(mixed)
        rounds.append({slot: batch.tolist() for slot, batch in batches.items()})
    return rounds


def shape_of(rounds: Sequence[RoundLengths], tokens: int) -> ShapeClass:
    """Returns the shape class with the shortest rows, and with `tokens` tokens per microbatch."""
    lengths = [size for batches in rounds for sizes in batches.values() for size in sizes]
    return smallest_shape_class(lengths, tokens)


def jaxmux_plan(rounds: Sequence[RoundLengths], shape: ShapeClass, scale: Scale) -> PipelinePlan:
    """Returns jaxmux's plan after validating its schedule."""
    cost = partial(stage_seconds, tokens=shape.tokens, scale=scale)
    costs = PipelineCosts(shape, cost, permute_seconds(shape.tokens))
    plan = plan_pipeline(rounds, choose_grouping(rounds, shape, STAGES), costs)
    validate(plan.schedule)
    return plan


def jaxmux_result(plan: PipelinePlan) -> Result:
    """Returns the simulated times of jaxmux's plan."""
    simulation = plan.simulation
    return Result(
        ratio=simulation.bubble_ratio(),
        steady=simulation.bubble_ratio(simulation.steady_window()),
        seconds=simulation.makespan,
        microbatches=len(plan.microbatches),
        floor=1 - _work(plan.workload) / (STAGES * least_makespan(plan.workload)),
    )


def lorafusion(rounds: Sequence[RoundLengths], shape: ShapeClass, scale: Scale) -> Result:
    """LoRAFusion: head-tail groups take turns, are packed and merged, and run 1F1B.

    A microbatch takes the time of its own tokens, without padding.
    """
    lengths = {slot: [s for batches in rounds for s in batches[slot]] for slot in rounds[0]}
    groups = pair_head_with_tail(lengths, groups=2)
    turns = take_turns(rounds, groups)
    stream = schedule_turns(pack_rounds(turns, shape), STAGES)
    microbatches = [microbatch for microbatch in stream if not microbatch.is_noop]
    workload = stream_workload(microbatches, turns, groups, partial(_unpadded_seconds, scale=scale))
    return _simulate([(one_forward_one_backward(workload), workload)])


def mlora(rounds: Sequence[RoundLengths], shape: ShapeClass, scale: Scale) -> Result:
    """mLoRA: LoRAPP over microbatches of four samples of one task."""
    workload = _unpacked_workload(rounds, sorted(rounds[0]), scale)
    return _simulate([(lorapp(workload), workload)])


def one_task_at_a_time(rounds: Sequence[RoundLengths], shape: ShapeClass, scale: Scale) -> Result:
    """Plain 1F1B: one task after another, each with a flush for every update."""
    workloads = [_unpacked_workload(rounds, [slot], scale) for slot in rounds[0]]
    return _simulate([(one_forward_one_backward(workload), workload) for workload in workloads])


BASELINES = {
    "LoRAFusion's order": lorafusion,
    "mLoRA's LoRAPP": mlora,
    "1F1B per task": one_task_at_a_time,
}


def _unpacked_workload(
    rounds: Sequence[RoundLengths], slots: Sequence[int], scale: Scale
) -> Workload:
    """A workload of microbatches of four samples of one task, without padding."""
    microbatches, seconds = [], []
    for step, batches in enumerate(rounds):
        for slot in slots:
            sizes = batches[slot]
            for start in range(0, len(sizes), SAMPLES_PER_MICROBATCH):
                part = sizes[start : start + SAMPLES_PER_MICROBATCH]
                microbatches.append(ScheduledMicrobatch((slot,), (step,), bucket=slot))
                seconds.append(_unpadded_seconds(part, scale))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    return Workload(tuple(microbatches), forward, backward)


def _unpadded_seconds(lengths: Sequence[int], scale: Scale) -> tuple[np.ndarray, np.ndarray]:
    return stage_seconds(lengths, sum(lengths), scale)


def _simulate(parts: Sequence[tuple[PipelineSchedule, Workload]]) -> Result:
    """The times of schedules that run one after another."""
    for schedule, _ in parts:
        validate(schedule)
    free = [simulate_asynchronous(schedule, workload) for schedule, workload in parts]
    work = sum(_work(workload) for _, workload in parts)
    return Result(
        ratio=_bubble_ratio([(simulation, None) for simulation in free]),
        steady=_bubble_ratio([(part, part.steady_window()) for part in free]),
        seconds=sum(simulation.makespan for simulation in free),
        microbatches=sum(len(workload.microbatches) for _, workload in parts),
        floor=1 - work / (STAGES * sum(least_makespan(workload) for _, workload in parts)),
    )


def _work(workload: Workload) -> float:
    """Seconds that all stages compute together."""
    return float(workload.forward.sum() + workload.backward.sum())


def _bubble_ratio(parts: Sequence[tuple[Simulation, tuple[float, float] | None]]) -> float:
    """The bubble ratio of simulations one after another, each within its window."""
    busy = sum(float(simulation.busy(window).sum()) for simulation, window in parts)
    windows = [window or (0.0, simulation.makespan) for simulation, window in parts]
    return 1 - busy / (STAGES * sum(end - begin for begin, end in windows))
