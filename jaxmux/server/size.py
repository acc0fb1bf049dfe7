"""Lets an engine grow and shrink with its load."""

import itertools
import logging

from jaxmux.engine import Engine, EngineSize, ProgramsAhead
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.planner import PlanningError

_log = logging.getLogger("jaxmux")


class ElasticSize:
    """Chooses the size of an engine between two rounds.

    The pool is doubled when more tasks want to train than it has slots, and the microbatches when
    a round needs more than keep all devices busy (on one device, more than one). Both are halved
    when a quarter has sufficed for some time. The programs of another size are compiled beside
    training, and for more slots before they are needed: when three quarters are taken. A size for
    which there is too little memory, by the engine's prediction or because it was tried, is not
    taken; the engine then grows as far as there is memory.

    Attributes:
      least: the smallest size.
      short_of_memory: whether the size that is wanted is larger than the one that memory permits.
    """

    def __init__(self, engine: Engine, most: EngineSize, quiet_rounds: int):
        """Begins with the engine's present size, which is also the smallest one.

        Args:
          engine: the engine.
          most: the largest size.
          quiet_rounds: number of rounds for which a smaller size must have sufficed.

        Raises:
          PlanningError: `most` is smaller than the engine, or the engine cannot have another size.
        """
        engine.options.of_size(most)
        self._engine, self.least, self._most = engine, engine.size, most
        if most.slots < self.least.slots or most.rows < self.least.rows:
            raise PlanningError(f"the largest size {most} should be at least {self.least}")
        self._quiet_rounds = quiet_rounds
        self.short_of_memory = False
        # Sizes that ran out of memory, and those that are predicted to, as asked since a round.
        self._full: list[EngineSize] = []
        self._refused: dict[EngineSize, bool] = {}
        self._asked_at = engine.rounds
        self._ahead: ProgramsAhead | None = None
        # The round in which the present size was needed last, and the largest size needed since.
        self._needed_at = engine.rounds
        self._needed = self.least

    def adjust(self, tasks: int, tokens: int) -> bool:
        """Changes the size of the engine if it should be another one and the programs for it are
        compiled; begins to compile them if they are not.

        Args:
          tasks: number of tasks that train or wait for a place.
          tokens: number of tokens of the last round, with padding.

        Returns:
          Whether the size has changed.
        """
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
        """Notes that there is no memory for a size, so neither it nor a larger one is taken again.

        Args:
          size: the size, which the engine has left for its present one.
        """
        self._full.append(size)
        self._needed = self._engine.size
        self.least = EngineSize(*map(min, self.least, self._engine.size))

    def _fitting(self, tasks: int, rows: int) -> EngineSize:
        """The size for so many tasks, and rounds of so many rows."""
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
        """The largest size up to this one for which there is memory. Slots, by which more tasks
        train, count before rows."""
        present = self._engine.size
        slots, rows = map(_doublings, present, size)
        sizes = [EngineSize(s, r) for s in reversed(slots) for r in reversed(rows)]
        found = next((each for each in sizes if not self._is_full(each)), present)
        self.short_of_memory = found != size
        return found

    def _is_full(self, size: EngineSize) -> bool:
        """Whether there is too little memory for a size, other than the present one."""
        engine = self._engine
        if size == engine.size:
            return False
        if any(_larger(size, full) == size for full in self._full):
            return True
        # Rounds show how much memory they need, so a prediction may change.
        if engine.rounds - self._asked_at >= self._quiet_rounds:
            self._refused, self._asked_at = {}, engine.rounds
        if size not in self._refused:
            reason = engine.refusal_of(size)
            self._refused[size] = reason is not None
            if reason:
                _log.info("no memory for %d slots and microbatches of %d rows: %s", *size, reason)
        return self._refused[size]

    def _compiled(self, size: EngineSize) -> bool:
        """Whether the programs for a size are compiled. If none are being compiled, it begins."""
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
    """The numbers from the present one to the wanted one, each the double of the one before except
    the last."""
    found = [present]
    while found[-1] < wanted:
        found.append(min(2 * found[-1], wanted))
    return found


def _larger(one: EngineSize, other: EngineSize) -> EngineSize:
    return EngineSize(*map(max, one, other))


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
