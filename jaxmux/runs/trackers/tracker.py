"""The interface of a tracker, and a table of trackers. Their packages are imported when a run
begins."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxmux.planner import PlanningError


class Point(NamedTuple):
    """Metrics of one round.

    Attributes:
      step: number of the round.
      values: finite numbers by name, such as "loss/billing".
      seconds: time of day in seconds since 1970.
      held_out: whether they are held-out losses.
      repeated: whether an earlier call of the same training run has already measured this round, so
        that the tracker may have it.
    """

    step: int
    values: Mapping[str, float]
    seconds: float
    held_out: bool = False
    repeated: bool = False


class TrackedRun(NamedTuple):
    """A training run as trackers see it.

    Attributes:
      name: name of the run directory.
      folder: the run directory.
      rounds: number of rounds after which the training run continues; 0 at its beginning. None for
        a server, whose round numbers never repeat.
    """

    name: str
    folder: Path
    rounds: int | None
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Shows metrics. One thread calls all methods. An exception ends the tracker, but not
    training."""

    def log(self, point: Point) -> None:
        """Receives metrics. Rounds come in order, but a held-out loss may come one round late."""
        ...

    def close(self, finished: bool) -> None:
        """Waits until the tracker has stored all metrics. `finished` is False if the training run
        can be continued."""
        ...


# Opens a tracker, from (run, id, keep). In the first call of a training run `id` is None, and the
# function calls `keep` with the id of the tracker's own run. A later call passes this id, to
# continue the tracker's run.
OpenTracker = Callable[[TrackedRun, str | None, Callable[[str], None]], Tracker]


class TrackerKind(NamedTuple):
    """A tracker that training runs can choose.

    Attributes:
      title: its name, for messages.
      module: module of this package with the function `open_tracker`.
      package: the package that it needs.
      extra: the extra of jaxmux that installs the package; empty if it is always installed.
      forgets: whether the tracker itself discards the rounds from `TrackedRun.rounds` on, so that
        these must be sent again.
    """

    title: str
    module: str
    package: str
    extra: str = ""
    forgets: bool = False

    @property
    def open(self) -> OpenTracker:
        return import_module(self.module, __package__).open_tracker


# Trackers, by their names in `RunOptions.trackers`.
TRACKERS: dict[str, TrackerKind] = {
    "tensorboard": TrackerKind("TensorBoard", ".tensorboard", "tensorboardX", forgets=True),
    "wandb": TrackerKind("Weights & Biases", ".wandb", "wandb", "wandb"),
    "mlflow": TrackerKind("MLflow", ".mlflow", "mlflow", "mlflow"),
}


def refuse_missing(names: Iterable[str]) -> None:
    """Raises PlanningError if the package of a tracker is missing."""
    for name in names:
        kind = TRACKERS[name]
        if find_spec(kind.package) is None:
            raise PlanningError(
                f"trackers: {name!r} needs the package {kind.package}: "
                f"pip install '.[{kind.extra}]' in the source folder of jaxmux"
            )
