"""TensorBoard: event files in the run directory."""

from collections.abc import Callable

from tensorboardX import SummaryWriter

from .tracker import Point, TrackedRun


class TensorBoard:
    """The `Tracker` of TensorBoard. TensorBoard itself discards the earlier values of all rounds
    from `TrackedRun.rounds` on, including held-out losses measured after exactly this number of
    rounds."""

    def __init__(self, run: TrackedRun):
        folder = str(run.folder / "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=run.rounds)

    def log(self, point: Point) -> None:
        # The writer's thread ends when the disk is full. Adding values would then block for ever.
        if not self._writer.file_writer.event_writer._worker.is_alive():
            raise OSError("its files cannot be written")
        for name, value in point.values.items():
            self._writer.add_scalar(name, value, point.step, walltime=point.seconds)

    def close(self, finished: bool) -> None:
        self._writer.close()


def open_tracker(run: TrackedRun, id: str | None, keep: Callable[[str], None]) -> TensorBoard:
    """As `OpenTracker`. TensorBoard's runs have no ids."""
    return TensorBoard(run)
