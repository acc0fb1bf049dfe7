"""Sizes that are doubled and halved."""

import itertools

from jaxmux.planner.growth import fitting_size

LEAST, MOST = 2, 12


def sizes():
    """Every size that can be reached."""
    found = {LEAST}
    while True:
        more = {fitting_size(n, s, LEAST, MOST) for n in range(30) for s in found} - found
        if not more:
            return sorted(found)
        found |= more


def test_the_size_suffices_and_is_not_wasted():
    assert len(sizes()) < 7
    for present, needed in itertools.product(sizes(), range(30)):
        size = fitting_size(needed, present, LEAST, MOST)
        assert LEAST <= size <= MOST
        assert size >= min(needed, MOST)
        assert size == LEAST or 4 * needed > size
        assert fitting_size(needed, size, LEAST, MOST) == size


def test_a_need_that_hardly_changes_changes_nothing():
    for present, needed in itertools.product(sizes(), range(1, 30)):
        size = fitting_size(needed, present, LEAST, MOST)
        for other in range(-(-needed // 2), min(needed + 1, size + 1)):
            assert fitting_size(other, size, LEAST, MOST) == size or 4 * other <= size
