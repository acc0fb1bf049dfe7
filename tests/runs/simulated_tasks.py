"""The tasks of the server simulation, and what they give when nothing disturbs them."""

import dataclasses
from typing import Any, NamedTuple

from jaxmux import SGD, AdamW, Lion, LoRA, Schedule, Task
from jaxmux.live.states import ENDED
from jaxmux.optimizers import Optimizer
from jaxmux.runs.server import tuning_server
from jaxmux.runs.server_options import ServerOptions

from .conftest import SERVER

OPTIONS = SERVER | {
    "max_bad_steps": 3,
    "prepared_at_once": 4,
    # The task "large" needs several rounds for a step.
    "round_tokens": 64,
}
# No task of the simulation has more steps.
MOST_STEPS = 7
# Number of global batches of the task "epochs".
EPOCHS_STEPS = 6
# Whether tasks are extended whose learning rates then follow another course. What they train
# depends on the step at which that happens, so there is no calm run for them. Their learning rates
# have to be the same whenever a step is computed again.
EXTEND_DECAYING_SCHEDULES = False


class Kind(NamedTuple):
    """A kind of task. Its adapter depends on the kind and the number of steps only, unless it has
    dropout, whose masks depend on the name too.

    Attributes:
      data: name of its records.
      rank: rank of its adapter.
      optimizer: its optimizer.
      fields: other fields of `Task`.
      dropout: dropout of its adapter.
      held_out: name of its held-out records; None for none.
      extended: whether it may get more steps.
    """

    data: str
    rank: int
    optimizer: Optimizer
    fields: dict[str, Any]
    dropout: float = 0.0
    held_out: str | None = None
    extended: bool = True

    @property
    def decays(self) -> bool:
        """Whether the learning rate of a step depends on the number of steps."""
        return self.optimizer.schedule.kind != "constant"


# After a step, the held-out loss is lower than after each of the following three.
MEASURED = {"batch_size": 4, "eval_every": 1}
KINDS = {
    "adamw": Kind("short", 2, AdamW(1e-2), {"batch_size": 4}),
    "sgd": Kind("long", 1, SGD(1e-1), {"batch_size": 3}),
    "lion": Kind("short", 4, Lion(1e-3), {"batch_size": 5, "seed": 5}),
    "large": Kind("long", 3, AdamW(5e-3), {"batch_size": 9, "seed": 3}),
    "epochs": Kind("short", 2, AdamW(2e-2), {"batch_size": 5, "epochs": 2}),
    "dropout": Kind("short", 2, AdamW(1e-2), {"batch_size": 4, "seed": 7}, dropout=0.3),
    "best": Kind("short", 2, AdamW(3e-2), MEASURED | {"keep_best": True}, held_out="letters.eval"),
    "patient": Kind("short", 2, AdamW(3e-2), MEASURED | {"patience": 2}, held_out="letters.eval"),
    "cosine": Kind(
        "short",
        2,
        AdamW(2e-2, schedule=Schedule("cosine", warmup_steps=1)),
        {"batch_size": 4},
        extended=EXTEND_DECAYING_SCHEDULES,
    ),
    "overflows": Kind("short", 2, SGD(1e30), {"batch_size": 4}),
    # What becomes of a task "adamw" whose data are replaced by others.
    "replaced": Kind("long", 2, AdamW(1e-2), {"batch_size": 4}),
}


def make_task(kind: str, name: str, steps: int, data: dict[str, str], path: str | None = None):
    """A task of a kind.

    Args:
      kind: a key of `KINDS`.
      name: name of the task.
      steps: number of steps; the kind "epochs" ignores it.
      data: paths of records by name.
      path: path of its records, if they are others than its kind says.

    Returns:
      A `Task`.
    """
    own = KINDS[kind]
    adapter = LoRA(
        rank=own.rank, alpha=4.0, dropout=own.dropout, target_modules=("q_proj", "down_proj")
    )
    fields = {} if "epochs" in own.fields else {"steps": steps}
    if own.held_out:
        fields["eval_data"] = data[own.held_out]
    return Task(name, path or data[own.data], adapter, own.optimizer, **own.fields, **fields)


class Outcome(NamedTuple):
    """The end of a calm task.

    Attributes:
      state: "succeeded" or "failed".
      reason: why it failed; else None.
      step: number of steps that it has trained.
      tokens: its effective, computed and trained tokens.
      held_out: its last held-out loss, and the number of steps after which it was lowest; None
        for what there is not.
      adapter: the files of its adapter folder, by path; None if it failed.
    """

    state: str
    reason: str | None
    step: int
    tokens: tuple[int, int, int]
    held_out: tuple[float | None, int | None]
    adapter: dict[str, bytes] | None


def tokens(meter) -> tuple[int, int, int]:
    """Effective, computed and trained tokens of a meter."""
    return meter.effective_tokens, meter.computed_tokens, meter.trained_tokens


def calm_outcomes(
    backbone, data, folder, adapter_bytes, **options
) -> dict[tuple[str, int], Outcome]:
    """The outcomes of all kinds of tasks with all numbers of steps, by kind and number of steps.

    Every number of steps is a task of its own that ends there, so the tokens of a task that goes on
    can be compared after each of its steps.
    """
    tasks = {}
    for kind in KINDS:
        for steps in range(1, MOST_STEPS + 1):
            task = make_task(kind, f"{kind}-{steps}", steps, data)
            tasks[kind, steps] = dataclasses.replace(task, epochs=None, steps=steps)
    return train_calmly(backbone, tasks, folder, adapter_bytes, **options)


def train_calmly(backbone, tasks, folder, adapter_bytes, **options) -> dict[Any, Outcome]:
    """The outcomes of tasks on a server to which nothing else happens.

    Args:
      backbone: folder of the backbone.
      tasks: the tasks by any key.
      folder: folder of the server; it does not exist yet.
      adapter_bytes: function that reads an adapter folder.
      **options: other options of the server than `OPTIONS`.

    Returns:
      The outcomes by the same keys.
    """
    with tuning_server(backbone, folder, ServerOptions(**OPTIONS | options), say=print) as server:
        for task in tasks.values():
            server.register(task)
        server.step()
        while any(status.state not in ENDED for status in server.statuses()):
            server.step()
        statuses = {key: server.status(task.name) for key, task in tasks.items()}
    return {key: _outcome(status, folder, adapter_bytes) for key, status in statuses.items()}


def _outcome(status, folder, adapter_bytes) -> Outcome:
    adapter = None
    if status.state == "succeeded":
        adapter = adapter_bytes(folder / "adapters" / status.name)
    held_out = status.held_out_loss, status.best_step
    used = tokens(status.meter)
    return Outcome(status.state, status.reason, status.step, used, held_out, adapter)
