"""Stages, replicas and deployments name their devices, count them and divide layers."""

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


@pytest.mark.parametrize("replica", [UNEVEN, Replica((Stage(dp=2),))], ids=str)
def test_costs_of_other_replicas_are_refused(replica):
    with pytest.raises(PlanningError, match="equal stages of tensor-parallel devices only"):
        _ = replica.tp


def test_layers_are_divided_evenly_and_the_first_stages_have_one_more():
    assert Replica.uniform(pp=3).stage_layers(8) == [3, 3, 2]
    assert Replica.uniform(pp=4).stage_layers(8) == [2, 2, 2, 2]


def test_a_deployment_counts_its_replicas_by_kind():
    counts = {Replica.uniform(tp=2): 2, Replica(): 3}
    deployment = Deployment.of_counts(counts)
    assert deployment.counts == counts
    assert len(deployment.replicas) == 5 and deployment.devices == 7
