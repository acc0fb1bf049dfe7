"""Chooses the tasks that train next among the candidates (mLoRA 3.4, MuxTune 3.3)."""

from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from .packing.rows import ShapeClass

# A task that does not fit yet is passed by at most this many later tasks of its priority.
MOST_PASSES = 8

# Takes the names of tasks; returns why they cannot train together, or None if they can.
Refusal = Callable[[Sequence[str]], str | None]

# Takes the names of tasks that train together; returns the value of their training, for example the
# predicted effective tokens (tokens without padding) per second.
Worth = Callable[[Sequence[str]], float]


def tokens_per_microbatch(
    batches: Sequence[int], shape: ShapeClass, round_tokens: int | None = None
) -> float:
    """Returns the mean number of effective tokens (tokens without padding) in a microbatch of a
    round. Microbatches of one shape class take equally long, so this is proportional to the
    throughput of tasks that train together (MuxTune 3.3). `batches` has the tokens of each task's
    global batch; a round trains at most `round_tokens` of them."""
    turns = [min(tokens, round_tokens or tokens) for tokens in batches]
    # A chunk belongs to one task.
    padded = sum(-(-tokens // shape.chunk_len) * shape.chunk_len for tokens in turns)
    return sum(turns) / max(1, -(-padded // shape.tokens))


class Candidate(NamedTuple):
    """A task that wants to train. Higher priorities go first. Tasks that arrive together have the
    same `arrival`. `passes` counts the tasks of the same priority that arrived later and began
    before it."""

    name: str
    priority: int
    arrival: int
    runs: bool = False
    passes: int = 0


class TaskSchedule(NamedTuple):
    """The tasks that train, and for each other task the reason why it waits. `takers` names, for
    each task that loses its slot, the tasks of higher priority that begin. `passed` names a waiting
    task once for each later task of its priority that begins before it."""

    runs: tuple[str, ...]
    waits: dict[str, str]
    passed: tuple[str, ...]
    takers: dict[str, tuple[str, ...]]


def schedule(candidates: Iterable[Candidate], refusal: Refusal, worth: Worth = len) -> TaskSchedule:
    """Chooses the tasks that train.

    - A task comes before all tasks of lower priority. If it does not fit beside them, tasks of the
      lowest priority make room, beginning with the last that arrived.
    - Tasks of one priority come in the order of their arrival. A task that trains does not make
      room for another task of its priority.
    - Of tasks that arrived together, the next is the one with which `worth` is highest (MuxTune
      chooses the tasks with the highest effective throughput that fit into memory, 3.3).
    - Later tasks that fit may pass a task that does not fit yet. After `MOST_PASSES` tasks of its
      priority have passed it, the others of this priority wait until it fits. So it does not wait
      for ever while others come and go.

    If `refusal` returns None for some tasks, it must also return None without one of them.
    """
    chosen: list[Candidate] = []
    waits: dict[str, str] = {}
    takers: dict[str, tuple[str, ...]] = {}
    passed: list[str] = []

    def names(*more: Candidate) -> list[str]:
        return [task.name for task in (*chosen, *more)]

    ordered = sorted(candidates, key=lambda task: (-task.priority, task.arrival, task.name))
    for _, level in groupby(ordered, key=lambda task: task.priority):
        level = list(level)
        begun = tuple(task.name for task in chosen if not task.runs)
        for task in (task for task in level if task.runs):
            if reason := refusal(names(task)):
                waits[task.name] = reason
                if begun:
                    takers[task.name] = begun
            else:
                chosen.append(task)
        waiting, blocked = [task for task in level if not task.runs], []
        while waiting:
            first_in_line = next((task for task in blocked if task.passes >= MOST_PASSES), None)
            if first_in_line:
                for task in waiting:
                    waits[task.name] = (
                        f"waits behind task {first_in_line.name!r}, which came before"
                    )
                break
            together = [task for task in waiting if task.arrival == waiting[0].arrival]
            refusals = {task: refusal(names(task)) for task in together}
            fitting = [task for task in together if not refusals[task]]
            if not fitting:
                waits |= {task.name: reason for task, reason in refusals.items()}
                blocked += together
                waiting = waiting[len(together) :]
                continue
            best = max(fitting, key=lambda task: worth(names(task)))
            chosen.append(best)
            waiting.remove(best)
            for i, task in enumerate(blocked):
                passed.append(task.name)
                blocked[i] = task._replace(passes=task.passes + 1)
    return TaskSchedule(tuple(task.name for task in chosen), waits, tuple(passed), takers)
