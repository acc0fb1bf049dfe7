"""Rows of replicas whose memory need not suffice for all samples."""

from collections.abc import Callable, Mapping, Sequence

from ..devices import Deployment
from ..errors import PlanningError
from .shape_class import MIN_CHUNK_LEN


def longest_that_fits[T](
    lengths: Sequence[int],
    longest: int,
    choose: Callable[[int], T],
    require: Callable[[T], None],
    fixed: bool,
) -> T:
    """Returns the choice for the longest samples for which a replica has memory.

    Args:
      lengths: stream lengths of the samples, in tokens.
      longest: most tokens of the samples of the first choice; it is halved until they fit.
      choose: returns the choice for samples of at most so many tokens.
      require: raises PlanningError if a choice does not fit.
      fixed: whether the length of rows is given, so that shorter samples do not help.

    Raises:
      PlanningError: there is no memory for any sample.
    """
    while True:
        found = choose(longest)
        try:
            require(found)
            return found
        except PlanningError:
            shorter = max(MIN_CHUNK_LEN, longest // 2)
            if fixed or shorter == longest or shorter < min(lengths):
                raise
            longest = shorter


def require_longest_rows(deployment: Deployment, row_len: int, longest: Mapping[str, int]) -> None:
    """Raises an error if the rows of no replica hold a task's longest sample.

    Args:
      deployment: the replicas.
      row_len: tokens of the longest rows of all replicas.
      longest: by name of the task, the stream length of its longest sample.

    Raises:
      PlanningError: a sample is longer.
    """
    for name, tokens in longest.items():
        if tokens > row_len:
            raise PlanningError(
                f"mesh {deployment}: the longest sample of task {name!r} takes {tokens} places in "
                f"a row, but the longest rows for which a replica has memory have {row_len}; a "
                "larger replica is needed"
            )
