"""Bubbles of a four-stage pipeline that trains four tasks: jaxmux's plan beside the orders of
LoRAFusion, mLoRA and plain 1F1B, on the same global batches (LoRAFusion Fig. 20)."""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import numpy as np
from planner_costs import permute_seconds, stage_seconds
from scipy.optimize import linear_sum_assignment

from jaxmux.planner.packing.microbatches import pack_rounds
from jaxmux.planner.packing.shape_class import ShapeClass, smallest_shape_class
from jaxmux.planner.pipeline.adapter_groups import pair_head_with_tail, take_turns
from jaxmux.planner.pipeline.bubble_lemma import schedule_batches
from jaxmux.planner.pipeline.pipeline_plan import (
    PipelineCosts,
    PipelinePlan,
    Round,
    plan_pipeline,
    stream_workload,
)
from jaxmux.planner.pipeline.schedules import (
    PipelineSchedule,
    ScheduledMicrobatch,
    Simulation,
    Workload,
    least_makespan,
    lorapp,
    one_forward_one_backward,
    simulate_asynchronous,
    simulate_lockstep,
    validate,
)

STAGES = 4
# Words of a document with its summary, on average, in the sets that LoRAFusion trains on; and
# tokens of the tokenizer of lengths.json for each word, as in its sample of XSum.
WORDS = {"XSum": 431 + 23, "CNN/DailyMail": 781 + 56, "WikiSum": 1334 + 101}
TOKENS_PER_WORD = 1.18
# LoRAFusion's Figures 6 and 7: samples of a microbatch where nothing packs them.
SAMPLES_PER_MICROBATCH = 4


# By stage, how much longer it takes for its part of the head.
Scale = tuple[float, ...]
EQUAL_STAGES: Scale = (1.0,) * STAGES
HEAD_ON_LAST_STAGE: Scale = (1.0,) * (STAGES - 1) + (1.2,)
HEAD_SPLIT: Scale = (1 + 0.2 / STAGES,) * STAGES


class Result(NamedTuple):
    """What a method takes for all rounds.

    Attributes:
      lockstep, free: bubble ratios with a common clock and with free-running stages.
      steady: with a common clock, without warm-up and drain.
      seconds: makespan, under the clock that the method's system has: lockstep for jaxmux.
      microbatches: their number.
      floor: least bubble ratio of any schedule of the same microbatches, for what the stages
        weigh and tasks wait for their updates.
    """

    lockstep: float
    free: float
    steady: float
    seconds: float
    microbatches: int
    floor: float


def nearest_sets(lengths: Mapping[str, Sequence[int]]) -> tuple[str, ...]:
    """For each of XSum, CNN/DailyMail and WikiSum another set, nearest in mean length: the least
    sum of |log(mean / mean)|."""
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
) -> list[Round]:
    """Global batches of a task for each set and one for their mix, until they have that many
    tokens."""
    rng = np.random.default_rng(seed)
    sources = [list(lengths[name]) for name in sets]
    rounds: list[Round] = []
    while sum(sum(map(sum, batches.values())) for batches in rounds) < tokens:
        batches = {slot: rng.choice(source, samples) for slot, source in enumerate(sources)}
        mixed = [rng.choice(sources[i]) for i in rng.integers(len(sources), size=samples)]
        batches[len(sources)] = np.array(mixed)
        rounds.append({slot: batch.tolist() for slot, batch in batches.items()})
    return rounds


def shape_of(rounds: Sequence[Round], tokens: int) -> ShapeClass:
    lengths = [size for batches in rounds for sizes in batches.values() for size in sizes]
    return smallest_shape_class(lengths, tokens)


def jaxmux_plan(rounds: Sequence[Round], shape: ShapeClass, scale: Scale) -> PipelinePlan:
    """jaxmux's plan, proven legal."""
    cost = partial(stage_seconds, tokens=shape.tokens, scale=scale)
    plan = plan_pipeline(rounds, PipelineCosts(shape, cost, permute_seconds(shape.tokens)))
    validate(plan.schedule)
    return plan


def jaxmux_result(plan: PipelinePlan) -> Result:
    simulation = plan.simulation
    return Result(
        lockstep=simulation.bubble_ratio(),
        free=simulate_asynchronous(plan.schedule, plan.load).bubble_ratio(),
        steady=simulation.bubble_ratio(simulation.steady_window()),
        seconds=simulation.makespan,
        microbatches=len(plan.microbatches),
        floor=1 - _work(plan.load) / (STAGES * least_makespan(plan.load)),
    )


def lorafusion(rounds: Sequence[Round], shape: ShapeClass, scale: Scale) -> Result:
    """Head-tail groups that take turns, two-stage MILP, merge pass, bubble lemma; then 1F1B.

    A microbatch takes the time of its own tokens, without padding.
    """
    lengths = {slot: [s for batches in rounds for s in batches[slot]] for slot in rounds[0]}
    turns = take_turns(rounds, pair_head_with_tail(lengths, groups=2))
    stream = schedule_batches(pack_rounds(turns, shape), STAGES)
    microbatches = [microbatch for microbatch in stream if not microbatch.is_noop]
    load = stream_workload(microbatches, turns, partial(_unpadded_seconds, scale=scale))
    return _simulate([(one_forward_one_backward(load), load)])


def mlora(rounds: Sequence[Round], shape: ShapeClass, scale: Scale) -> Result:
    """LoRAPP over microbatches of four samples of one task."""
    load = _unpacked_load(rounds, sorted(rounds[0]), scale)
    return _simulate([(lorapp(load), load)])


def one_task_at_a_time(rounds: Sequence[Round], shape: ShapeClass, scale: Scale) -> Result:
    """Plain 1F1B: a task has the pipeline for itself and flushes it for every update."""
    loads = [_unpacked_load(rounds, [slot], scale) for slot in rounds[0]]
    return _simulate([(one_forward_one_backward(load), load) for load in loads])


BASELINES = {
    "LoRAFusion's order": lorafusion,
    "mLoRA's LoRAPP": mlora,
    "1F1B per task": one_task_at_a_time,
}


def _unpacked_load(rounds: Sequence[Round], slots: Sequence[int], scale: Scale) -> Workload:
    jobs, seconds = [], []
    for step, batches in enumerate(rounds):
        for slot in slots:
            sizes = batches[slot]
            for start in range(0, len(sizes), SAMPLES_PER_MICROBATCH):
                part = sizes[start : start + SAMPLES_PER_MICROBATCH]
                jobs.append(ScheduledMicrobatch((slot,), (step,), bucket=slot))
                seconds.append(_unpadded_seconds(part, scale))
    forward, backward = (np.array(times) for times in zip(*seconds, strict=True))
    return Workload(tuple(jobs), forward, backward)


def _unpadded_seconds(lengths: Sequence[int], scale: Scale) -> tuple[np.ndarray, np.ndarray]:
    return stage_seconds(lengths, sum(lengths), scale)


def _simulate(parts: Sequence[tuple[PipelineSchedule, Workload]]) -> Result:
    """One schedule after another."""
    for schedule, _ in parts:
        validate(schedule)
    lockstep = [simulate_lockstep(schedule, load) for schedule, load in parts]
    free = [simulate_asynchronous(schedule, load) for schedule, load in parts]
    work = sum(_work(load) for _, load in parts)
    return Result(
        lockstep=_bubble_ratio([(simulation, None) for simulation in lockstep]),
        free=_bubble_ratio([(simulation, None) for simulation in free]),
        steady=_bubble_ratio([(part, part.steady_window()) for part in lockstep]),
        seconds=sum(simulation.makespan for simulation in free),
        microbatches=sum(len(load.jobs) for _, load in parts),
        floor=1 - work / (STAGES * sum(least_makespan(load) for _, load in parts)),
    )


def _work(load: Workload) -> float:
    return float(load.forward.sum() + load.backward.sum())


def _bubble_ratio(parts: Sequence[tuple[Simulation, tuple[float, float] | None]]) -> float:
    """Over several simulations, one after another, each within its window."""
    busy = sum(float(simulation.busy(window).sum()) for simulation, window in parts)
    windows = [window or (0.0, simulation.makespan) for simulation, window in parts]
    return 1 - busy / (STAGES * sum(end - begin for begin, end in windows))
