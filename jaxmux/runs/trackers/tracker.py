"""What a tracker is, and which ones there are. Their packages are imported when a run begins."""

from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from jaxmux.planner import PlanningError


class Point(NamedTuple):
    """Metrics that belong to one round.

    Attributes:
      step: number of the round.
      values: finite numbers by name, such as "loss/billing".
      seconds: time of day in seconds since 1970.
      held_out: whether they are held-out losses.
      repeated: whether an earlier call of the same training run has measured this round already, so
        that the tracker may know it.
    """

    step: int
    values: Mapping[str, float]
    seconds: float
    held_out: bool = False
    repeated: bool = False


class TrackedRun(NamedTuple):
    """What a tracker is told of a training run.

    Attributes:
      name: name of the run directory.
      folder: the run directory.
      rounds: number of rounds after which the training run goes on; 0 at its beginning. None for a
        server, which counts on and trains no round of a number again.
      config: the backbone, the options and the tasks of a training run, as a JSON object.
    """

    name: str
    folder: Path
    rounds: int | None
    config: Mapping[str, Any]


class Tracker(Protocol):
    """Shows metrics. One thread calls all methods; any exception ends the tracker, not training."""

    def log(self, point: Point) -> None:
        """Takes metrics. Rounds come in order, but a held-out loss may come a round late.

        Args:
          point: the metrics.
        """
        ...

    def close(self, finished: bool) -> None:
        """Waits until the tracker has kept all metrics.

        Args:
          finished: whether the training run has ended; False if it can be continued.
        """
        ...


# Function (run, id, keep) that opens a tracker. `id` is what `keep` was given in an earlier call
# of the training run, None in the first one: the tracker then goes on with the same run of its own.
OpenTracker = Callable[[TrackedRun, str | None, Callable[[str], None]], Tracker]


class TrackerKind(NamedTuple):
    """A tracker that training runs can choose.

    Attributes:
      title: its name, for messages.
      module: name of the module of this package that has its `open_tracker`.
      package: the package that it needs.
      extra: the extra of jaxmux that installs the package; empty if it is always installed.
      forgets: whether it forgets by itself what it knows of rounds from `TrackedRun.rounds` on, so
        that it has to be told of them again.
    """

    title: str
    module: str
    package: str
    extra: str = ""
    forgets: bool = False

    @property
    def open(self) -> OpenTracker:
        return import_module(self.module, __package__).open_tracker


# By the name that `RunOptions.trackers` uses.
TRACKERS: dict[str, TrackerKind] = {
    "tensorboard": TrackerKind("TensorBoard", ".tensorboard", "tensorboardX", forgets=True),
    "wandb": TrackerKind("Weights & Biases", ".wandb", "wandb", "wandb"),
    "mlflow": TrackerKind("MLflow", ".mlflow", "mlflow", "mlflow"),
}


def refuse_missing(names: Iterable[str]) -> None:
    """Checks that the packages of trackers are installed.

    Args:
      names: keys of `TRACKERS`.

    Raises:
      PlanningError: a package is missing.
    """
    for name in names:
        kind = TRACKERS[name]
        if find_spec(kind.package) is None:
            raise PlanningError(
                f"trackers: {name!r} needs the package {kind.package}: "
                f"pip install '.[{kind.extra}]' in the source folder of jaxmux"
            )
