"""Compares the cost models' predictions with rounds of the engine that were not profiled."""

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
    """A round of tasks whose samples have one length and fill its microbatches.

    Attributes:
      tasks: number of tasks.
      length: tokens of a sample.
      rank: rank of the adapters.
      tokens: tokens of a microbatch.
      row_len: tokens of a row, a multiple of the length; 0 for rows of one sequence.
      remat: remat policy of all layers.
    """

    tasks: int
    length: int
    rank: int
    tokens: int
    row_len: int = 0
    remat: str = "dots"

    @classmethod
    def parse(cls, text: str) -> "Case":
        """The case that a text names.

        Args:
          text: tasks, length, rank and tokens, as in `3x2048x32x6144`; then the row length if rows
            hold several sequences, as in `3x128x32x6144x2048`; then the remat policy unless it is
            "dots", as in `3x2048x32x6144xlean`.

        Raises:
          PlanningError: the text has another form.
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
        """The shape class of its microbatches.

        Raises:
          PlanningError: rows do not hold whole samples, or microbatches whole rows.
        """
        row_len = self.row_len or self.length
        if self.tokens % row_len or row_len % self.length:
            raise PlanningError(
                f"case {self}: tokens should be a multiple of the row length, that of the length"
            )
        return ShapeClass(self.tokens // row_len, row_len, chunk_len, row_len // self.length)


class Comparison(NamedTuple):
    """The measured and the predicted costs of a case.

    Attributes:
      case: the case.
      seconds: seconds of a round, measured and predicted.
      peak: peak bytes, measured and predicted. The measured peak is None where the device does not
        report it, or where an earlier case needed more. The predicted peak is None where the
        profile does not hold the device's memory.
      online_peak: peak bytes as predicted by a model that has observed the cases before; None as
        for the predicted peak.
    """

    case: Case
    seconds: tuple[float, float]
    peak: tuple[int | None, float | None]
    online_peak: float | None


def default_cases(grid: Grid) -> list[Case]:
    """Cases whose tokens, row lengths, tasks and ranks lie between the grid's points."""
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
    """Trains each case and yields its comparison.

    The case of least predicted memory comes first, because a device reports only the highest peak
    of the whole process.

    Args:
      backbone: the backbone to train; its number of layers may differ from the profiled one's.
      profile: the profile to which the cost models are fitted.
      cases: the cases.
      chunk_len: tokens of a chunk.
      seconds: time to spend on each case, without compilation.
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
        # An engine is part of a reference cycle, and its arrays would count towards the next peak.
        gc.collect()
        after = device_peak() if device_peak() != before else None
        predicted = times.predict(shape, case.tasks, case.rank, count, case.remat)
        yield Comparison(case, (taken, predicted), (after, peak(prior, case)), peak(online, case))
        if online and after:
            online = online.observe(shape, pool, case.remat, after)


def mean_absolute_error(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Mean of |predicted / measured - 1| over the pairs (measured, predicted) of known numbers;
    None if there is no such pair."""
    errors = [abs(p / m - 1) for m, p in pairs if m is not None and p is not None]
    return sum(errors) / len(errors) if errors else None
