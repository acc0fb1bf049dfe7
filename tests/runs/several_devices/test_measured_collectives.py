"""Collectives among the devices of a host are measured for a profile."""

from jaxmux.planner.costs.device_profile import CollectivePoint
from jaxmux.profiling.collectives import collective_program
from jaxmux.profiling.timing import measure


def test_collectives_are_measured_where_there_are_devices():
    points = [
        CollectivePoint(collective, axis, 2, 4096)
        for collective in ("psum", "all_gather", "ppermute")
        for axis in ("inner", "outer")
    ]
    found = list(measure([(point, collective_program(point)) for point in points], 0.01))
    assert [own.point for own in found] == points and all(own.seconds > 0 for own in found)
