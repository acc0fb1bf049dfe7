"""Stages, replicas and deployments name their devices, count them and divide layers."""

import itertools
import random

import pytest

from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment, Replica, Stage

UNEVEN = Replica((Stage(tp=2), Stage(tp=2), Stage(tp=4)))


def test_devices_are_counted_over_axes_stages_and_replicas():
    assert Stage(dp=2, fsdp=4, tp=2).devices == 16
    assert Replica.uniform(pp=4, tp=2).devices == 8
    assert UNEVEN.devices == 8
    assert Deployment((Replica(), UNEVEN)).devices == 9


@pytest.mark.parametrize(
    ("replica", "text"),
    [
        (Replica(), "pp1,tp1"),
        (Replica.uniform(pp=4, tp=2), "pp4,tp2"),
        (Replica((Stage(fsdp=8),) * 2), "pp2,fsdp8"),
        (UNEVEN, "tp2/tp2/tp4"),
        (Replica((Stage(), Stage(dp=2, tp=2))), "tp1/dp2,tp2"),
    ],
)
def test_a_replica_is_written_by_its_stages(replica, text):
    assert str(replica) == text


def test_a_uniform_replica_is_read_as_it_is_written():
    for pp in (1, 3):
        for tp in (1, 8):
            replica = Replica.uniform(pp, tp)
            assert Replica.parse(str(replica)) == replica
            assert (replica.pp, replica.tp) == (pp, tp)


@pytest.mark.parametrize(
    ("text", "written"),
    [
        ("tp2", "pp1,tp2"),
        ("2*(tp1) + pp2,tp2", "2*(pp1,tp1) + pp2,tp2"),
        ("tp1+ 2 * tp1+(dp2)", "3*(pp1,tp1) + pp1,dp2"),
    ],
)
def test_a_deployment_is_read_as_it_is_written(text, written):
    deployment = Deployment.parse(text)
    assert str(deployment) == written
    assert Deployment.parse(written) == deployment


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0*(tp1)", r"'0\*\(tp1\)' is no replica at all"),
        ("(tp1", r"'\(tp1' is no replica, expected e.g. pp2,tp2 or 2\*\(tp1\)"),
        ("2*(2*(tp1))", "is no replica"),
        ("tp1 +", r"mesh 'tp1 \+': '' is no axis with its size"),
        ("auto + tp1", r"mesh 'auto \+ tp1': 'auto' is no axis"),
        ("999999*(tp1)", "is no replica, expected"),
        ("tp1 + qq2", "'qq2' is no axis with its size"),
    ],
)
def test_a_deployment_that_cannot_be_read_is_refused(text, message):
    with pytest.raises(PlanningError, match=message):
        Deployment.parse(text)


def test_costs_of_unequal_stages_are_refused():
    with pytest.raises(PlanningError, match="tp2/tp2/tp4: costs are known for equal stages only"):
        _ = UNEVEN.tp


def test_layers_are_divided_evenly_and_the_first_stages_have_one_more():
    assert Replica.uniform(pp=3).stage_layers(8) == [3, 3, 2]
    assert Replica.uniform(pp=4).stage_layers(8) == [2, 2, 2, 2]


@pytest.mark.parametrize("seed", range(30))
def test_the_stage_with_most_work_has_as_little_as_possible(seed):
    """Against all divisions; the head counts with the last stage."""
    rng = random.Random(seed)
    pp, head = rng.randint(1, 4), rng.choice([0, 0.3, 2.4, 9])
    layers = pp + rng.randint(0, 8)
    found = Replica.uniform(pp=pp).stage_layers(layers, head)
    assert sum(found) == layers and min(found) >= 1
    borders = itertools.combinations(range(1, layers), pp - 1)
    divisions = [
        [after - before for before, after in itertools.pairwise((0, *own, layers))]
        for own in borders
    ]

    def most(counts):
        return max([*counts[:-1], counts[-1] + head])

    assert most(found) == min(map(most, divisions))


def test_a_large_vocabulary_takes_layers_from_the_last_stage():
    """Llama-3.1-8B's head takes as long as 2.4 layers."""
    assert Replica.uniform(pp=4).stage_layers(32, 2.4) == [9, 9, 8, 6]


def test_a_deployment_counts_its_replicas_by_kind():
    counts = {Replica.uniform(tp=2): 2, Replica(): 3}
    deployment = Deployment.of_counts(counts)
    assert deployment.counts == counts
    assert len(deployment.replicas) == 5 and deployment.devices == 7
