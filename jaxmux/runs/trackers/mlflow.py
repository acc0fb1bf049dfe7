"""MLflow. Its own variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME choose the place."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import batched
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from .tracker import Point, TrackedRun

_EXPERIMENT = "jaxmux"
# The most that MLflow takes in one request.
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 6000


class MLflow:
    """The `Tracker` of MLflow. It uses a client of its own, so that a run that the program itself
    has open is left alone."""

    def __init__(self, run: TrackedRun, id: str | None, keep: Callable[[str], None]):
        """Opens a run.

        Args:
          run: the training run.
          id: the id of the run in MLflow; None for a new one.
          keep: function that keeps the id.
        """
        self._client = MlflowClient()
        if id is not None:
            self._client.update_run(id, status="RUNNING")
            self._id = id
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        found = self._client.get_experiment_by_name(experiment)
        place = found.experiment_id if found else self._client.create_experiment(experiment)
        self._id = self._client.create_run(place, run_name=run.name).info.run_id
        keep(self._id)
        parameters = [Param(name, text[:_CHARACTERS]) for name, text in _texts(run.config)]
        for some in batched(parameters, _PARAMETERS):
            self._client.log_batch(self._id, params=some)

    def log(self, point: Point) -> None:
        time = int(1000 * point.seconds)
        metrics = [Metric(name, value, time, point.step) for name, value in point.values.items()]
        for some in batched(metrics, _METRICS):
            self._client.log_batch(self._id, metrics=some)

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._id, "FINISHED" if finished else "KILLED")


def open_tracker(run: TrackedRun, id: str | None, keep: Callable[[str], None]) -> MLflow:
    """As `OpenTracker`."""
    return MLflow(run, id, keep)


def _texts(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    """The values of a JSON object by path, such as "tasks/billing/adapter/rank"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{within}{name}/")
        elif value is not None:
            yield f"{within}{name}", value if isinstance(value, str) else json.dumps(value)
