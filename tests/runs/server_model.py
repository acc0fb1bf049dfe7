"""What must be true of a server, whatever happens to it."""

import dataclasses
import json
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from jaxmux.live import Event, LiveTraining, TaskStatus
from jaxmux.live.states import ENDED, FOLLOWING
from jaxmux.peft.peft_folder import WEIGHTS

from .simulated_tasks import EPOCHS_STEPS, Outcome, tokens


@dataclasses.dataclass
class Expected:
    """What is known of a task from the commands that have been acknowledged.

    Attributes:
      kind: its kind, a key of `simulated_tasks.KINDS`.
      steps: its number of steps.
      priority: its priority.
      paused: whether it was paused last, and not resumed.
      cancelled: whether it was cancelled.
      problem: words of the reason for which its data fail it; None if its data are good.
      data_replaced: whether its data were replaced by others after its registration.
    """

    kind: str
    steps: int
    priority: int
    paused: bool = False
    cancelled: bool = False
    problem: str | None = None
    data_replaced: bool = False


class ServerModel:
    """Follows the commands that a server acknowledges, and compares them with what it shows.

    Attributes:
      tasks: by name, what is expected of the tasks, in the order of their registration.
      lost: names of tasks of which updates may have been lost from events.jsonl.
    """

    def __init__(self, calm: dict[tuple[str, int], Outcome], same_bits: bool = True):
        """Starts without tasks.

        Args:
          calm: by kind and number of steps, what becomes of a task that nothing disturbs.
          same_bits: whether adapters have to equal those of calm tasks to the last bit.
        """
        self.tasks: dict[str, Expected] = {}
        self.lost: set[str] = set()
        self._calm, self._same_bits = calm, same_bits
        # By task, how often each step has been computed; and the last one of the present server.
        self._computed: dict[str, Counter[int]] = defaultdict(Counter)
        self._last: dict[str, int] = {}
        self._round = 0

    def refuses(self, kind: str, name: str, value, status: TaskStatus | None) -> bool:
        """Whether a command has to be refused.

        Args:
          kind: kind of the command.
          name: name of the task.
          value: the new number of steps for "extend".
          status: the task's status before the command.
        """
        own = self.tasks.get(name)
        if kind == "register":
            return own is not None
        if own is None or own.cancelled or (status and status.state in ENDED):
            return True
        if kind == "resume":
            return not own.paused
        if kind == "extend":
            return status.steps is None or value <= own.steps
        return False

    def carry_out(self, kind: str, name: str, value) -> None:
        """Takes note of a command that was acknowledged.

        Args:
          kind: kind of the command.
          name: name of the task.
          value: an `Expected` for "register", the priority or the number of steps.
        """
        if kind == "register":
            self.tasks[name] = value
            return
        own = self.tasks[name]
        match kind:
            case "cancel":
                own.cancelled = True
            case "pause":
                own.paused = True
            case "resume":
                own.paused = False
            case "set_priority":
                own.priority = value
            case "extend":
                own.steps = value

    def begin_server(self, live: LiveTraining) -> None:
        """A server has been started, perhaps again.

        Args:
          live: the server.
        """
        self._last = {status.name: status.step for status in live.statuses()}
        self._round = 0

    def take_event(self, event: Event) -> None:
        """Takes note of an event: updates follow each other without a gap.

        Args:
          event: the event.
        """
        if event.kind != "update":
            return
        step = event.fields["task_step"]
        assert step == self._last.get(event.task, 0) + 1, event
        assert event.fields["step"] >= self._round, event
        self._last[event.task], self._round = step, event.fields["step"]
        self._computed[event.task][step] += 1

    def check(self, live: LiveTraining, slots: int) -> None:
        """Compares all that a server shows with what was acknowledged.

        Args:
          live: the server, at the end of a round.
          slots: number of tasks that it can train at the same time.
        """
        statuses = live.statuses()
        names = [status.name for status in statuses]
        assert names == list(self.tasks), (names, list(self.tasks))
        for status in statuses:
            self._check_task(status)
        running = [own.priority for own in statuses if own.state == "running"]
        queued = [own.priority for own in statuses if own.state == "queued"]
        assert live._engine.size.slots == slots, live._engine.size.slots
        assert len(running) <= slots
        if running and queued:
            assert max(queued) <= min(running), "a task waits for one of lower priority"
        if queued and len(running) < slots:
            assert live._tasks.changed, "a task waits, and a place is free"

    def _check_task(self, status: TaskStatus) -> None:
        own = self.tasks[status.name]
        states = [change.state for change in status.history]
        times = [change.time for change in status.history]
        assert all(b in FOLLOWING[a] for a, b in zip(states, states[1:], strict=False)), status
        assert times == sorted(times), status
        assert status.priority == own.priority, status
        unknown = own.kind == "epochs" and own.steps == EPOCHS_STEPS
        assert status.steps == own.steps or (unknown and status.steps is None), (status, own)
        assert status.step <= own.steps, status
        assert (status.state == "cancelled") == own.cancelled, status
        assert own.paused >= (status.state == "paused"), status
        assert not own.paused or status.state in ("paused", *ENDED), status
        assert not (own.paused and status.state == "succeeded"), status
        calm = self._calm[own.kind, status.step].tokens if status.step else (0, 0, 0)
        assert tokens(status.meter) == calm, (status, own)
        self._check_recomputed(status, own)
        if status.state == "succeeded":
            assert status.step == own.steps, status
        if status.state == "failed":
            self._check_failure(status, own)

    def _check_recomputed(self, status: TaskStatus, own: Expected) -> None:
        """Steps that were computed again, and are part of the task as it is, count as such."""
        calm = [0] + [self._calm[own.kind, k].tokens[1] for k in range(1, status.step + 1)]
        counts = self._computed[status.name]
        again = sum(calm[k] - calm[k - 1] for k in range(1, len(calm)) if counts[k] > 1)
        found = status.meter.recomputed_tokens
        exact = status.name not in self.lost
        assert found == again if exact else found <= again, (status, again)

    def _check_failure(self, status: TaskStatus, own: Expected) -> None:
        if own.problem:
            assert own.problem in status.reason, status
        elif own.data_replaced:
            assert "changed since" in status.reason or "changed after" in status.reason, status
        else:
            calm = self._calm[own.kind, own.steps]
            assert (calm.state, calm.reason) == ("failed", status.reason), status
            assert calm.step == status.step

    def check_end(self, live: LiveTraining, folder: Path, adapter_bytes) -> None:
        """Compares what became of all tasks with what becomes of calm ones.

        Args:
          live: the server, whose tasks have all ended.
          folder: its folder.
          adapter_bytes: function that reads an adapter folder.
        """
        for status in live.statuses():
            own = self.tasks[status.name]
            if own.cancelled:
                continue
            if own.problem:
                assert status.state == "failed", status
                continue
            calm = self._calm[own.kind, own.steps]
            if own.data_replaced and status.state == "failed":
                continue
            assert (status.state, status.reason) == (calm.state, calm.reason), (status, own)
            assert (status.step, tokens(status.meter)) == (calm.step, calm.tokens), status
            if calm.adapter is not None:
                found = adapter_bytes(folder / "adapters" / status.name)
                assert found.keys() == calm.adapter.keys(), status
                assert self._same_adapter(found, calm.adapter), (status, own)
                live.adapter(status.name)

    def _same_adapter(self, found: dict[str, bytes], calm: dict[str, bytes]) -> bool:
        if self._same_bits:
            return found == calm
        one, other = load(found[WEIGHTS]), load(calm[WEIGHTS])
        return all(np.allclose(one[name], other[name], rtol=1e-3, atol=1e-5) for name in other)


def damaged_lines(path: Path) -> int:
    """Number of lines of events.jsonl that are no events.

    Args:
      path: the file.
    """
    damaged = 0
    for line in path.read_bytes().splitlines():
        try:
            json.loads(line)["kind"]
        except (ValueError, TypeError):
            damaged += 1
    return damaged
