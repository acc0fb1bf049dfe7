"""Sizes that can only be doubled and halved, such as the number of slots of a pool."""


def fitting_size(needed: int, present: int, least: int, most: int) -> int:
    """Returns the size, from `least` to `most`, that suits a need. The present size is doubled as
    soon as it is too small, and halved only when a quarter of it suffices, so a need that rises and
    falls a little changes nothing."""
    size = present
    while size < min(needed, most):
        size = min(2 * size, most)
    while size > least and 4 * needed <= size:
        size = max(size // 2, least)
    return size
