"""MLflow. The environment variables MLFLOW_TRACKING_URI and MLFLOW_EXPERIMENT_NAME choose the
server and the experiment."""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from itertools import batched
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from .tracker import Point, TrackedRun

_EXPERIMENT = "jaxmux"
# MLflow's limits for one request: number of metrics, number of parameters, characters of a
# parameter.
_METRICS, _PARAMETERS, _CHARACTERS = 1000, 100, 6000


class MLflow:
    """The `Tracker` of MLflow. It creates its own client and does not touch a run that the calling
    program has open."""

    def __init__(self, run: TrackedRun, id: str | None, keep: Callable[[str], None]):
        """Opens a run. `id` is the id of the run in MLflow, or None for a new run; `keep` stores
        the id."""
        self._client = MlflowClient()
        if id is not None:
            self._client.update_run(id, status="RUNNING")
            self._id = id
            return
        experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or _EXPERIMENT
        known = self._client.get_experiment_by_name(experiment)
        number = known.experiment_id if known else self._client.create_experiment(experiment)
        self._id = self._client.create_run(number, run_name=run.name).info.run_id
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
    """Yields the values in a JSON object as texts, by path, such as
    "tasks/billing/adapter/rank"."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from _texts(value, f"{within}{name}/")
        elif value is not None:
            yield f"{within}{name}", value if isinstance(value, str) else json.dumps(value)
