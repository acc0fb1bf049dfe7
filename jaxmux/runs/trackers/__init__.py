"""Programs that show the metrics of a training run: TensorBoard, Weights & Biases and MLflow.

Each tracker records a training run as one run, however many tasks it has. The metrics of a task are
called "loss/TASK", "lr/TASK", "grad_norm/TASK" and "held_out_loss/TASK", because all three programs
group charts by the part before the slash. Metrics of objectives keep their names, as in
"rewards/accuracies/TASK" and "held_out_rewards/accuracies/TASK". The losses of all tasks therefore
stand side by side, and a hundred tasks give four groups of charts, not a hundred. A server is one
run too, with all of its rounds. A later task of the same name gets separate curves,
"loss/_2_TASK".
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
