"""Every sample of a round goes to one replica that holds it, and the replicas end together."""

import itertools
import random

import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment
from jaxmux.planner.packing import ShapeClass
from jaxmux.planner.replicas import TokenCosts, assign_samples

LARGE, SMALL = Deployment.parse("tp2 + tp1").replicas


def shape(row_len: int) -> ShapeClass:
    return ShapeClass(rows=1, row_len=row_len, chunk_len=64, max_sequences=4)


COSTS = TokenCosts({LARGE: shape(512), SMALL: shape(128)})


def busiest(replicas, lengths, place) -> float:
    """The most tokens of a device; `place` gives the replica of each sample."""
    tokens = [0] * len(replicas)
    for length, replica in zip(lengths, place, strict=True):
        tokens[replica] += length
    return max(t / r.devices for t, r in zip(tokens, replicas, strict=True))


def places_of(assigned, lengths) -> list[int]:
    """The replica of each sample, which has exactly one."""
    found = {
        (task, i): replica
        for replica, own in enumerate(assigned)
        for task, samples in own.items()
        for i in samples
    }
    assert sum(len(samples) for own in assigned for samples in own.values()) == len(found)
    return [found[task, i] for task, own in lengths.items() for i in range(len(own))]


@pytest.mark.parametrize("seed", range(12))
def test_no_division_is_much_better(seed):
    """Against all divisions of samples whose lengths are those of their bins."""
    rng = random.Random(seed)
    replicas = [LARGE, SMALL, SMALL]
    lengths = {task: rng.choices([64, 128, 256, 512], k=rng.randint(1, 3)) for task in range(3)}
    flat = [length for own in lengths.values() for length in own]
    allowed = [range(3) if length <= 128 else [0] for length in flat]
    best = min(busiest(replicas, flat, place) for place in itertools.product(*allowed))
    found = places_of(assign_samples(replicas, COSTS, lengths), lengths)
    assert all(place in own for place, own in zip(found, allowed, strict=True))
    assert busiest(replicas, flat, found) <= 1.01 * best


def test_the_samples_of_a_task_are_spread():
    """Tasks with equal lengths get equal parts of every replica."""
    lengths = {task: [100] * 8 for task in range(4)}
    for own in assign_samples([LARGE, SMALL, SMALL], COSTS, lengths):
        counts = {len(samples) for samples in own.values()}
        assert len(own) == 4 and max(counts) - min(counts) <= 1
        assert all(samples == sorted(samples) for samples in own.values())


def test_a_sample_that_no_replica_holds_is_refused():
    with pytest.raises(PlanningError, match="sequences of 640 tokens"):
        assign_samples([LARGE, SMALL], COSTS, {0: [100, 600]})
