"""The tasks of the server simulation, and what they give when nothing disturbs them."""

import dataclasses
from collections import defaultdict
from typing import Any, NamedTuple

from jaxmux import SGD, AdamW, Lion, LoRA, Schedule, Task
from jaxmux.optimizers import Optimizer
from jaxmux.peft.model_card import CARD
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED, TRAINED

from .conftest import SERVER

OPTIONS = SERVER | {
    "max_bad_steps": 3,
    "prepared_at_once": 4,
    # The task "large" needs several rounds for a step.
    "round_tokens": 64,
    # A simulation sets events.jsonl aside now and then, and all of its events are kept.
    "events_bytes": 100_000,
}
# No task of the simulation has more steps.
MOST_STEPS = 7
# Number of global batches of the task "epochs".
EPOCHS_STEPS = 6


class Kind(NamedTuple):
    """A kind of task. Its adapter depends on the kind and the learning rates only, unless it has
    dropout, whose masks depend on the name too.

    Attributes:
      data: name of its records.
      rank: rank of its adapter.
      optimizer: its optimizer.
      fields: other fields of `Task`.
      dropout: dropout of its adapter.
      held_out: name of its held-out records; None for none.
    """

    data: str
    rank: int
    optimizer: Optimizer
    fields: dict[str, Any]
    dropout: float = 0.0
    held_out: str | None = None

    def learning_rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, if no earlier one was skipped.

        Args:
          step: number of the step, from 1.
          steps: number of steps that the task is to train.
        """
        return self.optimizer.learning_rate * self.optimizer.schedule.factor(step - 1, steps)


# After a step, the held-out loss is lower than after each of the following three.
MEASURED = {"batch_size": 4, "eval_every": 1}
KINDS = {
    "adamw": Kind("short", 2, AdamW(1e-2), {"batch_size": 4}),
    "sgd": Kind("long", 1, SGD(1e-1), {"batch_size": 3}),
    "lion": Kind("short", 4, Lion(1e-3), {"batch_size": 5, "seed": 5}),
    "large": Kind("long", 3, AdamW(5e-3), {"batch_size": 9, "seed": 3}),
    "epochs": Kind("short", 2, AdamW(2e-2), {"batch_size": 5, "epochs": 2}),
    "dropout": Kind("short", 2, AdamW(1e-2), {"batch_size": 4, "seed": 7}, dropout=0.3),
    # It is measured in several rounds.
    "best": Kind(
        "short", 2, AdamW(3e-2), MEASURED | {"keep_best": True}, held_out="more_letters.eval"
    ),
    "patient": Kind("short", 2, AdamW(3e-2), MEASURED | {"patience": 2}, held_out="letters.eval"),
    # The rate of every step but the first tells the number of steps.
    "cosine": Kind("short", 2, AdamW(2e-2, schedule=Schedule("cosine")), {"batch_size": 4}),
    "overflows": Kind("short", 2, SGD(1e30), {"batch_size": 4}),
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
      state: "succeeded", "stopped early" or "failed"; "running" after no step.
      reason: why it failed or stopped early; else None.
      step: number of steps that it has trained.
      tokens: its effective, computed and trained tokens.
      held_out: its last held-out loss, and the number of steps after which it was lowest; None
        for what there is not.
      adapter: the files of its adapter folder, by path; None if it failed.
      held_out_tokens: number of held-out tokens that it has computed.
      computed: by number of steps, the numbers of tokens that it had computed at ends of rounds
        between this step and the next one.
    """

    state: str
    reason: str | None
    step: int
    tokens: tuple[int, int, int]
    held_out: tuple[float | None, int | None]
    adapter: dict[str, bytes] | None
    held_out_tokens: int
    computed: dict[int, set[int]]


def tokens(meter) -> tuple[int, int, int]:
    """Effective, computed and trained tokens of a meter."""
    return meter.effective_tokens, meter.computed_tokens, meter.trained_tokens


def calm_outcomes(
    backbone, data, folder, adapter_bytes, **options
) -> dict[tuple[str, int], Outcome]:
    """The outcomes of all kinds of tasks with all numbers of steps, by kind and number of steps,
    and what tasks of the kind are like before their first step.

    Every number of steps is a task of its own that ends there, so the tokens of a task that goes on
    can be compared after each of its steps.
    """
    tasks = {}
    for kind in KINDS:
        for steps in range(1, MOST_STEPS + 1):
            task = make_task(kind, f"{kind}-{steps}", steps, data)
            tasks[kind, steps] = dataclasses.replace(task, epochs=None, steps=steps)
    outcomes = train_calmly(backbone, tasks, folder, adapter_bytes, **options)
    before = Outcome("running", None, 0, (0, 0, 0), (None, None), None, 0, {})
    return outcomes | {(kind, 0): before for kind in KINDS}


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
        computed = defaultdict(lambda: defaultdict(set, {0: {0}}))
        while any(status.state not in ENDED for status in server.statuses()):
            server.step()
            for own in server.statuses():
                computed[own.name][own.step].add(own.meter.computed_tokens)
        statuses = {key: server.status(task.name) for key, task in tasks.items()}
    # By now all adapters have been written.
    return {
        key: _outcome(status, computed[status.name], folder, adapter_bytes)
        for key, status in statuses.items()
    }


def without_card(files: dict[str, bytes]) -> dict[str, bytes]:
    """The files of an adapter without its card, which names the task and its data."""
    return {name: content for name, content in files.items() if name != CARD}


def _outcome(status, computed, folder, adapter_bytes) -> Outcome:
    adapter = None
    if status.state in TRAINED:
        adapter = without_card(adapter_bytes(folder / "adapters" / status.name))
    held_out = status.held_out_loss, status.best_step
    return Outcome(
        status.state,
        status.reason,
        status.step,
        tokens(status.meter),
        held_out,
        adapter,
        status.meter.held_out_tokens,
        dict(computed),
    )
