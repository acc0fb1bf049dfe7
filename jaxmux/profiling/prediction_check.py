"""Compares the cost models' predictions with rounds of the engine outside the profile."""

import dataclasses
import gc
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from jaxmux.models import Backbone, device_peak
from jaxmux.planner import PlanningError
from jaxmux.planner.costs.device_profile import Profile
from jaxmux.planner.costs.fitting import fit_memory_model, fit_time_model
from jaxmux.planner.costs.memory_model import MemoryModel
from jaxmux.planner.costs.pool_spec import PoolSpec
from jaxmux.planner.packing import ShapeClass

from .grid import Grid
from .timed_rounds import run_rounds


class CheckedCase(NamedTuple):
    """A round to train and to predict, in a check of the cost models by `compare`.

    A round is one global batch of every task. The tasks are equal, and their samples have one
    length and fill every row of every microbatch. A round has as few microbatches as possible such
    that all tasks get equal numbers of rows.

    Attributes:
      tasks: number of tasks.
      length: stream length of every sample in tokens, that is, its tokens without the last one,
        which is only predicted.
      rank: rank of every LoRA adapter, which is on all linears.
      tokens: N, tokens of a microbatch, a multiple of the row length.
      row_len: tokens of a row (the tokens that attention sees together), a power of two of at least
        64 and a multiple of `length`, so a row holds row_len / length samples. 0 stands for
        `length`: one sample in each row.
      remat: remat policy of all layers, which tells the values that they keep for the backward
        pass: "norms", "dots", "lean" or "full", in the order of increasing recomputation.
    """

    tasks: int
    length: int
    rank: int
    tokens: int
    row_len: int = 0
    remat: str = "dots"

    @classmethod
    def parse(cls, text: str) -> "CheckedCase":
        """Returns the case that a text names; `str(case)` gives the text back.

        Args:
          text: `TASKSxLENGTHxRANKxTOKENS`, as in "3x2048x32x6144". `xROW_LEN` follows if rows hold
            several samples, as in "3x128x32x6144x2048". The remat policy follows unless it is
            "dots", as in "3x2048x32x6144xlean".

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
        """Returns the shape class of the case's microbatches: rows, tokens per row and per chunk,
        and samples per row.

        Args:
          chunk_len: tokens of a chunk (a series of tokens of one task), a power of two of at least
            64.

        Raises:
          PlanningError: rows do not consist of whole samples, microbatches do not consist of whole
            rows and chunks, or the row length or `chunk_len` is not a power of two of at least 64.
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
      seconds: pair (measured, predicted) of the seconds of a round (one global batch of every
        task); the measured value is the median over several rounds.
      peak: pair (measured, predicted) of the peak bytes of the device's memory. The prediction uses
        the profile (file of measurements) alone. The measured value is None if the device does not
        report its peak, or if the peak did not rise above that of earlier work in the process. The
        predicted value is None if the profile does not hold the device's memory.
      online_peak: peak bytes as predicted by a memory model that was also fitted to the measured
        peaks of the cases before this one; None if the profile does not hold the device's memory.
    """

    case: CheckedCase
    seconds: tuple[float, float]
    peak: tuple[int | None, float | None]
    online_peak: float | None


def default_cases(grid: Grid) -> list[CheckedCase]:
    """Returns four cases to check a profile with `compare`.

    They differ from the grid's points in tokens of a microbatch, row length, number of tasks or
    rank, so they test predictions away from the measured points.

    Args:
      grid: the grid with which the profile was measured. The cases are made from its reference
        tokens (the upper median of `tokens`), its reference row length (the longest of `row_lens`
        that the smallest microbatch holds) and its first rank.
    """
    tokens, row_len, rank = grid.reference_tokens, grid.row_len, grid.ranks[0]
    return [
        CheckedCase(2, row_len // 2, rank, tokens // 2),
        CheckedCase(3, 4 * row_len, 2 * rank, tokens * 3 // 4),
        CheckedCase(8, 2 * row_len, 2 * rank, tokens),
        CheckedCase(3, 8 * row_len, rank, tokens * 3 // 2),
    ]


def compare(
    backbone: Backbone,
    profile: Profile,
    cases: Sequence[CheckedCase],
    chunk_len: int,
    seconds: float,
) -> Iterator[Comparison]:
    """Trains rounds of each case on this machine and compares their costs with the predictions.

    Use it to check a profile (file of measurements) on rounds that it does not hold. Cases are
    trained in the order of their predicted memory, least first, because a device reports only the
    highest peak since the process began.

    Args:
      backbone: the backbone to train; its number of layers may differ from the profiled one's.
      profile: the profile to which the cost models are fitted.
      cases: the cases, for example from `default_cases` or `CheckedCase.parse`.
      chunk_len: tokens of a chunk (a series of tokens of one task), a power of two of at least 64.
      seconds: seconds to spend on each case, without compilation. A case trains at least 7 rounds,
        even if they take longer.

    Yields:
      The comparison of each case, as soon as it is trained.

    Raises:
      ProfileError: the profile lacks a measurement that the models need.
      PlanningError: the sizes of a case do not fit together (see `CheckedCase.shape`).
      RuntimeError: the engine packed the samples of a case into another number of microbatches than
        expected.
    """
    size = dataclasses.replace(profile.backbone, layers=backbone.config.num_layers)
    profile = dataclasses.replace(profile, backbone=size)
    times = fit_time_model(profile)
    prior = online = fit_memory_model(profile) if profile.memory_bytes else None

    def peak(model: MemoryModel | None, case: CheckedCase) -> float | None:
        pool = PoolSpec(case.tasks, case.rank)
        return model and model.peak(case.shape(chunk_len), pool, case.remat)

    for case in sorted(cases, key=lambda case: peak(prior, case) or case.tokens):
        shape, pool = case.shape(chunk_len), PoolSpec(case.tasks, case.rank)
        before = device_peak()
        taken, count = run_rounds(backbone, shape, case.tasks, case.rank, case.remat, seconds)
        # An engine is part of a reference cycle; its arrays would count towards the next peak.
        gc.collect()
        after = device_peak() if device_peak() != before else None
        predicted = times.predict(shape, case.tasks, case.rank, count, case.remat)
        yield Comparison(case, (taken, predicted), (after, peak(prior, case)), peak(online, case))
        if online and after:
            online = online.observe(shape, pool, case.remat, after)


def mean_absolute_error(pairs: Sequence[tuple[float | None, float | None]]) -> float | None:
    """Returns the mean relative error |predicted / measured - 1| of predictions; 0.1 means 10%.

    Pairs in which a number is None are left out. The result is None if no pair remains.

    Args:
      pairs: pairs (measured, predicted), for example the `seconds` or the `peak` of each
        `Comparison`.
    """
    errors = [abs(p / m - 1) for m, p in pairs if m is not None and p is not None]
    return sum(errors) / len(errors) if errors else None
