"""Lets an engine grow and shrink with its load."""

import itertools
import logging

from jaxmux.engine import Engine, EngineSize, ProgramsAhead
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.planner import PlanningError

_log = logging.getLogger("jaxmux")


class ElasticSize:
    """Chooses the size of an engine between two rounds.

    The pool is doubled when more tasks want to train than it has slots. The microbatches are
    doubled when a round needs more microbatches than keep all devices busy (on one device, more
    than one). Both are halved when a quarter of their size has sufficed for some time. Programs for
    another size are compiled during training. Programs for more slots are compiled before they are
    needed: when three quarters of the slots are taken. If a size has too little memory, by the
    engine's prediction or because it ran out, the engine grows only as far as memory permits.

    Attributes:
      least: the smallest size.
      short_of_memory: whether memory is too small for the wanted size.
    """

    def __init__(self, engine: Engine, most: EngineSize, quiet_rounds: int):
        """Begins with the engine's present size, which is also the smallest. `most` is the largest
        size. A smaller size must have sufficed for `quiet_rounds` rounds before the engine shrinks.
        Raises PlanningError if `most` is smaller than the engine, or the engine cannot have another
        size."""
        engine.options.of_size(most)
        self._engine, self.least, self._most = engine, engine.size, most
        if most.slots < self.least.slots or most.rows < self.least.rows:
            raise PlanningError(f"the largest size {most} should be at least {self.least}")
        self._quiet_rounds = quiet_rounds
        self.short_of_memory = False
        # Sizes that ran out of memory; for each size, whether it is predicted to run out; and the
        # round since which the predictions hold.
        self._full: list[EngineSize] = []
        self._refused: dict[EngineSize, bool] = {}
        self._asked_at = engine.rounds
        self._ahead: ProgramsAhead | None = None
        # The last round in which the present size was needed, and the largest size needed since
        # then.
        self._needed_at = engine.rounds
        self._needed = self.least

    def adjust(self, tasks: int, tokens: int) -> bool:
        """Changes the size of the engine if another size is better and its programs are compiled;
        if they are not, begins to compile them. `tasks` is the number of tasks that train or wait
        for a place, `tokens` the number of tokens of the last round, with padding. Returns whether
        the size has changed."""
        engine = self._engine
        rows = -(-tokens // (engine.options.shape.row_len * engine.microbatches_at_once))
        size = self._wanted(tasks, rows)
        if size != self._engine.size:
            return self._compiled(size) and self._resize(size)
        if 4 * tasks > 3 * size.slots:
            more = _larger(size, self._fitting(size.slots + 1, rows))
            self._compiled(self._with_memory(more))
        return False

    @property
    def growing(self) -> int | None:
        """Number of slots of the larger size for which programs are being compiled; None if there
        is none."""
        if self._ahead is None or self._ahead.ready:
            return None
        _, size = self._ahead.sizes
        return size.slots if size.slots > self._engine.size.slots else None

    def note_full(self, size: EngineSize) -> None:
        """Notes that there is no memory for `size`, which the engine has left for its present size.
        Neither `size` nor a larger size is taken again."""
        self._full.append(size)
        self._needed = self._engine.size
        self.least = EngineSize(*map(min, self.least, self._engine.size))

    def _fitting(self, tasks: int, rows: int) -> EngineSize:
        """The size for this number of tasks and of rows in a round."""
        needs = EngineSize(tasks, rows)
        given = zip(needs, self._engine.size, self.least, self._most, strict=True)
        return EngineSize(*itertools.starmap(fitting_size, given))

    def _wanted(self, tasks: int, rows: int) -> EngineSize:
        """The size that the engine should have now."""
        fitting, present = self._fitting(tasks, rows), self._engine.size
        if _larger(fitting, present) != present:
            self._needed = present
            return self._with_memory(_larger(fitting, present))
        self.short_of_memory = False
        self._needed = _larger(self._needed, fitting)
        if self._needed == present:
            self._needed_at, self._needed = self._engine.rounds, fitting
        if self._engine.rounds - self._needed_at < self._quiet_rounds:
            return present
        return self._needed

    def _with_memory(self, size: EngineSize) -> EngineSize:
        """The largest size up to `size` for which there is memory. More slots, with which more
        tasks train, are preferred to more rows."""
        present = self._engine.size
        slots, rows = map(_doublings, present, size)
        sizes = [EngineSize(s, r) for s in reversed(slots) for r in reversed(rows)]
        found = next((each for each in sizes if not self._is_full(each)), present)
        self.short_of_memory = found != size
        return found

    def _is_full(self, size: EngineSize) -> bool:
        """Whether there is too little memory for a size that is not the present one."""
        engine = self._engine
        if size == engine.size:
            return False
        if any(_larger(size, full) == size for full in self._full):
            return True
        # Rounds show how much memory they need, so predictions may change.
        if engine.rounds - self._asked_at >= self._quiet_rounds:
            self._refused, self._asked_at = {}, engine.rounds
        if size not in self._refused:
            reason = engine.refusal_of(size)
            self._refused[size] = reason is not None
            if reason:
                _log.info("no memory for %d slots and microbatches of %d rows: %s", *size, reason)
        return self._refused[size]

    def _compiled(self, size: EngineSize) -> bool:
        """Whether the programs for a size are compiled. If no programs are being compiled, begins
        to compile them."""
        present = self._engine.size
        if self._ahead is None or (self._ahead.ready and self._ahead.sizes != (present, size)):
            if size != present:
                self._ahead = self._engine.compile_ahead(size)
            return False
        return self._ahead.ready and self._ahead.sizes == (present, size)

    def _resize(self, size: EngineSize) -> bool:
        present, programs, self._ahead = self._engine.size, self._ahead, None
        try:
            self._engine.resize(size, programs)
        except OutOfDeviceMemory as e:
            _log.warning("%s; the engine keeps %d slots", e, present.slots)
            self.note_full(size)
            return False
        _log.info("%d slots, microbatches of %d rows", *size)
        self._needed_at, self._needed = self._engine.rounds, self.least
        self._refused = {}
        return True


def _doublings(present: int, wanted: int) -> list[int]:
    """The numbers from `present` to `wanted`: each is double the previous one, but the last is
    `wanted`."""
    found = [present]
    while found[-1] < wanted:
        found.append(min(2 * found[-1], wanted))
    return found


def _larger(one: EngineSize, other: EngineSize) -> EngineSize:
    return EngineSize(*map(max, one, other))


def fitting_size(needed: int, present: int, least: int, most: int) -> int:
    """Returns the size, from `least` to `most`, that suits a need. The present size is doubled as
    soon as it is too small, but halved only when a quarter of it suffices, so small changes of the
    need change nothing."""
    size = present
    while size < min(needed, most):
        size = min(2 * size, most)
    while size > least and 4 * needed <= size:
        size = max(size // 2, least)
    return size
