"""How many tasks of a training run train at the same time."""

from collections.abc import Sequence
from functools import partial

from jaxmux.engine import PreparedTask
from jaxmux.models import BackboneConfig
from jaxmux.planner import PlanningError
from jaxmux.planner.devices import Deployment

from .console import RunConsole
from .run_directory import RecordedShapes
from .run_layout import RunLayout, choose_layout
from .run_options import RunOptions
from .run_shape import PlannedDevice


def layout_with_places(
    tasks: Sequence[PreparedTask],
    config: BackboneConfig,
    options: RunOptions,
    recorded: RecordedShapes | None,
    console: RunConsole,
    may_wait: bool,
    failed: Sequence[Deployment] = (),
    device: PlannedDevice | None = None,
) -> RunLayout:
    """Chooses the devices and the shape classes of the microbatches, with as many places as fit.

    Args:
      tasks, config, options, recorded, console: as for `choose_layout`.
      may_wait: whether tasks wait for a place if they do not fit at the same time. If they may not,
        the error says how many fit.
      failed, device: as for `choose_layout`.

    Returns:
      The layout. `RunLayout.places` is None if all tasks train together.

    Raises:
      PlanningError: the tasks do not fit into memory, or with `may_wait` not even one of them.
    """
    choose = partial(choose_layout, tasks, config, options, recorded, failed=failed, device=device)
    most = options.tasks_at_once if (options.tasks_at_once or len(tasks)) < len(tasks) else None
    try:
        layout = choose(console, most)
    except PlanningError as e:
        fewer = _most_that_fit(choose, most or len(tasks))
        if not fewer:
            raise
        if not may_wait:
            raise PlanningError(
                f"{e}; or, so that the others wait for a place, tasks_at_once={fewer}"
            ) from None
        layout = choose(console, fewer)
    if layout.places:
        console.say(
            f"{layout.places} of {len(tasks)} tasks train at the same time; the others wait for a "
            "place"
        )
    return layout


def _most_that_fit(choose: partial[RunLayout], too_many: int) -> int:
    """The largest number of places, below `too_many`, for which there is memory; 0 for none."""
    fitting = 0
    while too_many - fitting > 1:
        tried = (fitting + too_many) // 2
        try:
            choose(RunConsole.silent(), tried)
            fitting = tried
        except PlanningError:
            too_many = tried
    return fitting
