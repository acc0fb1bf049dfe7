"""The tasks of the server simulation, and what they give when nothing disturbs them."""

import dataclasses
from collections import defaultdict
from typing import NamedTuple

from jaxmux import SGD, AdamW, Lion, LoRA, Task
from jaxmux.live.states import ENDED
from jaxmux.runs.server import tuning_server
from jaxmux.runs.server_options import ServerOptions

from .conftest import SERVER

OPTIONS = SERVER | {
    "reserved_dropout": False,
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
# By kind of task: data, rank, optimizer, and other fields of `Task`. Learning rates are constant
# and there is no dropout, so a task's adapter depends on its kind and its number of steps only.
KINDS = {
    "adamw": ("short", 2, AdamW(1e-2), {"batch_size": 4}),
    "sgd": ("long", 1, SGD(1e-1), {"batch_size": 3}),
    "lion": ("short", 4, Lion(1e-3), {"batch_size": 5, "seed": 5}),
    "large": ("long", 3, AdamW(5e-3), {"batch_size": 9, "seed": 3}),
    "epochs": ("short", 2, AdamW(2e-2), {"batch_size": 5, "epochs": 2}),
    "overflows": ("short", 2, SGD(1e30), {"batch_size": 4}),
}


def make_task(kind: str, name: str, steps: int, data: str) -> Task:
    """A task of a kind.

    Args:
      kind: a key of `KINDS`.
      name: name of the task.
      steps: number of steps; the kind "epochs" ignores it.
      data: path of its records.
    """
    _, rank, optimizer, fields = KINDS[kind]
    adapter = LoRA(rank=rank, alpha=4.0, target_modules=("q_proj", "down_proj"))
    length = {} if "epochs" in fields else {"steps": steps}
    return Task(name, data, adapter, optimizer, **fields, **length)


class Outcome(NamedTuple):
    """The end of a calm task.

    Attributes:
      state: "succeeded" or "failed"; "running" after no step.
      reason: why it failed; else None.
      step: number of steps that it has trained.
      tokens: its effective, computed and trained tokens.
      adapter: the files of its adapter folder, by path; None if it failed.
      computed: numbers of tokens that tasks of its kind have computed at ends of rounds between
        this step and the next one.
    """

    state: str
    reason: str | None
    step: int
    tokens: tuple[int, int, int]
    adapter: dict[str, bytes] | None
    computed: frozenset[int]


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
    wanted = [(kind, steps) for kind in KINDS for steps in range(1, MOST_STEPS + 1)]
    computed = defaultdict(set)
    with tuning_server(backbone, folder, ServerOptions(**OPTIONS | options), say=print) as server:
        for kind, steps in wanted:
            task = make_task(kind, f"{kind}-{steps}", steps, data[KINDS[kind][0]])
            if kind == "epochs":
                task = dataclasses.replace(task, epochs=None, steps=steps)
            server.register(task)
        server.step()
        while any(status.state not in ENDED for status in server.statuses()):
            server.step()
            for status in server.statuses():
                kind = status.name.partition("-")[0]
                computed[kind, status.step].add(status.meter.computed_tokens)
    zero = (0, 0, 0)
    outcomes = {
        (kind, 0): Outcome("running", None, 0, zero, None, frozenset({0, *computed[kind, 0]}))
        for kind in KINDS
    }
    for kind, steps in wanted:
        name = f"{kind}-{steps}"
        status = server.status(name)
        succeeded = status.state == "succeeded"
        adapter = adapter_bytes(folder / "adapters" / name) if succeeded else None
        outcomes[kind, steps] = Outcome(
            status.state,
            status.reason,
            status.step,
            tokens(status.meter),
            adapter,
            frozenset(computed[kind, status.step]),
        )
    return outcomes
