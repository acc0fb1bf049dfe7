"""The cost models' predictions beside steps of the engine that the profile does not hold."""

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmux.models import Backbone, device_peak
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import Profile
from jaxmux.planner.costs.memory_model import MemoryModel, fit_memory_model
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.costs.time_fit import fit_time_model
from jaxmux.planner.packing import ShapeClass

from .grid import Grid
from .timed_rounds import run_rounds


class Case(NamedTuple):
    """Tasks of one length that fill the microbatches of a step.

    Attributes:
      row_len: of their rows, a multiple of the length; 0 for rows of one sequence.
    """

    tasks: int
    length: int
    rank: int
    tokens: int
    row_len: int = 0
    remat: str = "dots"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """`3x2048x32x6144`: tasks, length, rank, tokens; `3x128x32x6144x2048` for rows of 2,048
        tokens, `…xlean` for another remat policy.

        Raises:
          PlanningError: it does not look like that.
        """
        *numbers, last = text.split("x")
        numbers, remat = (numbers, last) if last.isalpha() else ([*numbers, last], "dots")
        if len(numbers) not in (4, 5) or not all(n.isdigit() and int(n) for n in numbers):
            raise PlanningError(
                f"case {text!r}: expected tasks x length x rank x tokens [x row_len]"
            )
        return cls(*map(int, numbers), remat=remat)

    def __str__(self) -> str:
        *numbers, remat = self
        return "x".join([*(str(n) for n in numbers if n), *([remat] if remat != "dots" else [])])

    def shape(self, chunk_len: int) -> ShapeClass:
        row_len = self.row_len or self.length
        if self.tokens % row_len or row_len % self.length:
            raise PlanningError(
                f"case {self}: tokens should be a multiple of the row length, that of the length"
            )
        return ShapeClass(self.tokens // row_len, row_len, chunk_len, row_len // self.length)


class Comparison(NamedTuple):
    """A measured step beside its prediction.

    Attributes:
      seconds: of a step, measured, and as predicted.
      peak: bytes, likewise; measured None where the device does not tell, or tells only of an
        earlier, larger case; predicted None where the profile knows no memory.
      online_peak: predicted by a model that has observed the cases before.
    """

    case: Case
    seconds: tuple[float, float]
    peak: tuple[int | None, float | None]
    online_peak: float | None


def default_cases(grid: Grid) -> list[Case]:
    """Between the grid's points in tokens, row length, tasks and rank."""
    tokens, row_len, rank = grid.reference_tokens, grid.row_len, grid.ranks[0]
    return [
        Case(2, row_len // 2, rank, tokens // 2),
        Case(3, 4 * row_len, 2 * rank, tokens * 3 // 4),
        Case(8, 2 * row_len, 2 * rank, tokens),
        Case(3, 8 * row_len, rank, tokens * 3 // 2),
    ]


def compare(
    backbone: Backbone, profile: Profile, cases: Sequence[Case], chunk_len: int, seconds: float
) -> Iterator[Comparison]:
    """Trains each case, that of the least predicted memory first, so that each peak shows.

    Args:
      backbone: may have another number of layers than the profiled one.
      seconds: to spend on each case, compilation not counted.
    """
    size = dataclasses.replace(profile.backbone, layers=backbone.config.num_layers)
    profile = dataclasses.replace(profile, backbone=size)
    times = fit_time_model(profile)
    prior = online = fit_memory_model(profile) if profile.memory_bytes else None

    def peak(model: MemoryModel | None, case: Case) -> float | None:
        pool = PoolSpec(case.tasks, case.rank)
        return model and model.peak(case.shape(chunk_len), pool, case.remat)

    for case in sorted(cases, key=lambda case: peak(prior, case) or case.tokens):
        shape, pool = case.shape(chunk_len), PoolSpec(case.tasks, case.rank)
        before = device_peak()
        taken, count = run_rounds(backbone, shape, case.tasks, case.rank, case.remat, seconds)
        # An engine refers to itself: without this its memory would count for the next one's.
        gc.collect()
        after = device_peak() if device_peak() != before else None
        predicted = times.predict(shape, case.tasks, case.rank, count, case.remat)
        yield Comparison(case, (taken, predicted), (after, peak(prior, case)), peak(online, case))
        if online and after:
            online = online.observe(shape, pool, case.remat, after)


def mean_absolute_error(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Mean of |predicted / measured - 1| over the pairs (measured, predicted) that are known."""
    errors = [abs(p / m - 1) for m, p in pairs if m is not None and p is not None]
    return sum(errors) / len(errors) if errors else None
