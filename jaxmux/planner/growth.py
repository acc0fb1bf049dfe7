"""When something that can only be doubled and halved, like a pool of slots, grows and shrinks."""


def fitting_size(needed: int, present: int, least: int, most: int) -> int:
    """The size that suits a need. It is doubled as soon as it is too small, and halved only when a
    quarter of it suffices, so a need that rises and falls a little changes nothing.

    Args:
      needed: what is needed now.
      present: the present size, from `least` to `most`.
      least: the smallest size.
      most: the largest size, even if more is needed.
    """
    size = present
    while size < min(needed, most):
        size = min(2 * size, most)
    while size > least and 4 * needed <= size:
        size = max(size // 2, least)
    return size
