"""The size of an engine whose tasks end one after another."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

from jaxmux.planner.packing import PricedShape

from .brackets import Bracket
from .engine_options import EngineSize

# Programs of another size are compiled only if a task has so many steps left to train with them.
_LEAST_STEPS = 8
# And only if microbatches get at most this fraction of their rows.
_MOST_ROWS = 0.75


class Shrinking(NamedTuple):
    """When an engine gets fewer slots, and microbatches of fewer rows, because tasks have ended.

    The size depends only on the numbers of steps after which tasks have ended, so a run that was
    interrupted goes on with the size that it would have had.

    Attributes:
      first: the size with which the run begins.
      places: number of tasks that train at the same time at first.
      shape_of: function from the names of tasks to the shape class in which they train fastest,
        which has at most the rows of the first one and differs from it in nothing else.
      steps: by name, the number of steps of every task of the run.
    """

    first: EngineSize
    places: int
    shape_of: Callable[[tuple[str, ...]], PricedShape]
    steps: Mapping[str, int]

    def size(self, ended: Mapping[str, int]) -> EngineSize:
        """The size of the engine.

        Args:
          ended: by name of every task that trains no more, the number of steps after which it
            ended.
        """
        size = self.first
        for step, left in self._phases(ended):
            if max(self.steps[name] for name in left) - step < _LEAST_STEPS:
                break
            rows = self.shape_of(left[: self.places]).shape.rows
            if rows <= _MOST_ROWS * size.rows:
                size = EngineSize(min(self.places, len(left)), rows)
        return size

    def _phases(self, ended: Mapping[str, int]) -> Iterator[tuple[int, tuple[str, ...]]]:
        """The tasks that were left after others had ended, with the number of steps that they had
        trained then."""
        if ended and len(self.steps) > self.places:
            # Tasks that wait for a place begin late, so their steps do not tell which ended first.
            left = {0: tuple(name for name in self.steps if name not in ended)}
        else:
            left = {
                step: tuple(name for name in self.steps if ended.get(name, math.inf) > step)
                for step in sorted(set(ended.values()))
            }
        return ((step, names) for step, names in left.items() if names)

    def expected(self, brackets: Sequence[Bracket]) -> Iterator["ExpectedSize"]:
        """The sizes that the engine will get if no task ends otherwise than at its last step or a
        rung, and the first tasks of each bracket go on.

        Args:
          brackets: the tasks that compete in successive halving.
        """
        rungs = {step for bracket in brackets for step in bracket.rungs}
        ended: dict[str, int] = {}
        size = self.first
        for step in sorted({*rungs, *self.steps.values()}):
            last = [name for name, steps in self.steps.items() if steps == step]
            ended |= {name: step for name in last if name not in ended}
            for bracket in brackets:
                if step in bracket.rungs:
                    come = [name for name in bracket.tasks if name not in ended]
                    stopped = come[bracket.kept(bracket.rungs.index(step)) :]
                    ended |= dict.fromkeys(stopped, step)
            if (new := self.size(ended)) != size:
                size = new
                left = tuple(name for name in self.steps if name not in ended)
                yield ExpectedSize(step, len(left), self.shape_of(left[: self.places]))


class ExpectedSize(NamedTuple):
    """A size that an engine is expected to get.

    Attributes:
      step: the number of steps after which tasks end.
      tasks: number of tasks that still train.
      shape: the shape class of their microbatches.
    """

    step: int
    tasks: int
    shape: PricedShape
