"""The order of the passes of an endless 1F1B pipeline, whose microbatches become known one round at
a time."""

from .schedule_walk import Pass


class StreamOrder:
    """Decides which pass of which stage is dispatched next, so that every stage follows 1F1B.

    Stage s of S first runs the forward passes of S - s microbatches, and then a backward pass and a
    forward pass in turn (PipeDream-Flush, Narayanan et al. 2021, without the flush). Microbatches
    are numbered from 0, without end. The pipeline empties only if no further microbatch may begin.

    Attributes:
      begun: number of microbatches whose first forward pass has been dispatched.
      ended: number of microbatches whose last backward pass has been dispatched.
    """

    def __init__(self, stages: int):
        """Creates the order of an empty pipeline.

        Args:
          stages: S, number of stages.
        """
        self._forwards = [0] * stages
        self._backwards = [0] * stages

    @property
    def begun(self) -> int:
        return self._forwards[0]

    @property
    def ended(self) -> int:
        return self._backwards[0]

    def next(self, allowed: int) -> Pass | None:
        """The next pass, which counts as dispatched from now on; None if there is nothing to do.

        Args:
          allowed: number of microbatches that may begin so far, those included that have begun.
        """
        stages = len(self._forwards)
        # Late stages first: what they do lets the others go on.
        for stage in reversed(range(stages)):
            forwards, backwards = self._forwards[stage], self._backwards[stage]
            if forwards < max(allowed, self.begun) and forwards - backwards < stages - stage:
                # The forward pass comes next, as soon as the stage before has done its own.
                if stage == 0 or forwards < self._forwards[stage - 1]:
                    self._forwards[stage] += 1
                    return Pass(True, stage, forwards)
                continue
            following = self._backwards[stage + 1] if stage + 1 < stages else forwards
            if backwards < min(forwards, following):
                self._backwards[stage] += 1
                return Pass(False, stage, backwards)
        return None
