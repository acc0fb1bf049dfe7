"""Programs that show the metrics of a training run: TensorBoard, Weights & Biases and MLflow.

A training run is one run of each tracker, whatever its number of tasks. The metrics of a task are
called "loss/TASK", "lr/TASK", "grad_norm/TASK" and "held_out_loss/TASK", because all three programs
group charts by what is before the slash. So the losses of all tasks stand side by side, and a
hundred tasks give four groups of charts, not a hundred. A server is one run too, all of its rounds
counted. A later task of the same name has curves of its own, "loss/_2_TASK".
"""

from .run_trackers import RunTrackers
from .tracker import TRACKERS, Point, TrackedRun, Tracker, TrackerKind, refuse_missing

__all__ = [
    "TRACKERS",
    "Point",
    "RunTrackers",
    "TrackedRun",
    "Tracker",
    "TrackerKind",
    "refuse_missing",
]
