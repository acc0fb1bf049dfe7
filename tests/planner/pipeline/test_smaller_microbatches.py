"""Smaller microbatches are proposed where they make a pipeline notably faster."""

import pytest

from jaxmux.planner.devices import Replica
from jaxmux.planner.pipeline import try_smaller_microbatches


@pytest.mark.long
def test_they_are_proposed_where_a_pipeline_has_many_bubbles(
    plan_of, costs_of, tasks, request_4096
):
    replica, large = Replica.uniform(4, 1), request_4096._replace(tokens=16384)
    idle = plan_of(tasks, replica, large)
    smaller = try_smaller_microbatches(idle, tasks, large, costs_of(tasks, replica))
    assert smaller.tokens < idle.shape.tokens
    assert smaller.round_seconds < idle.prediction.round_seconds
    found = plan_of(tasks, replica, large._replace(tokens=smaller.tokens)).prediction
    assert (smaller.round_seconds, smaller.bubble_ratio) == pytest.approx(
        (found.round_seconds, found.bubble_ratio)
    )


def test_they_are_not_proposed_on_one_device(plan_of_one_device, costs_of, tasks, request_4096):
    costs = costs_of(tasks)
    assert try_smaller_microbatches(plan_of_one_device, tasks, request_4096, costs) is None
