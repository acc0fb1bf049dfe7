"""The metrics of updates and held-out losses in the form that trackers get."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import groupby
from typing import Any

from .tracker import Point

# By name of a metric, the field of an update or of a held-out loss with its value.
_UPDATE = {"loss": "loss", "lr": "lr", "grad_norm": "grad_norm"}
_HELD_OUT = {"held_out_loss": "loss"}


def points_of(
    lines: Iterable[Mapping[str, Any]],
    held_out: bool,
    series: Callable[[str], str] = str,
    repeated_to: int = -1,
) -> Iterator[Point]:
    """Yields the finite numbers of results, one point per round.

    Args:
      lines: the results of `as_line`, and "time", in the order of the rounds.
      held_out: whether they are held-out losses.
      series: function from the name of a task to the name of its curves.
      repeated_to: the last round that trackers may have received already.
    """
    fields = _HELD_OUT if held_out else _UPDATE
    for step, of_round in groupby(lines, lambda line: line["step"]):
        same = list(of_round)
        values = {
            f"{name}/{series(line['task'])}": value
            for line in same
            for name, field in fields.items()
            if (value := line.get(field)) is not None and math.isfinite(value)
        }
        if values:
            yield Point(step, values, same[0]["time"], held_out, step <= repeated_to)
