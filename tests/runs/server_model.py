"""What must be true of a server, whatever happens to it."""

import dataclasses
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from jaxmux.live import Event, LiveTraining, Meter, TaskStatus
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
      unkept: names of tasks that a server with a full disk could not keep the last use of.
    """

    def __init__(
        self,
        calm: dict[tuple[str, int], Outcome],
        same_bits: bool = True,
        whole_turns: bool = True,
    ):
        """Starts without tasks.

        Args:
          calm: by kind and number of steps, what becomes of a task that nothing disturbs.
          same_bits: whether adapters have to equal those of calm tasks to the last bit.
          whole_turns: whether results arrive for whole turns only, and no round is begun with tasks
            that leave it.
        """
        self.tasks: dict[str, Expected] = {}
        self.lost: set[str] = set()
        self.unkept: set[str] = set()
        self._calm, self._same_bits, self._whole_turns = calm, same_bits, whole_turns
        # By task, how often each step has been computed; and the last one of the present server.
        self._computed: dict[str, Counter[int]] = defaultdict(Counter)
        self._last: dict[str, int] = {}
        self._round = 0
        # By task, what it was seen to have used last.
        self._used: dict[str, Meter] = {}

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
        self._round = 0
        for status in live.statuses():
            name = status.name
            if not self.tasks[name].cancelled:
                self._last[name] = status.step
            elif name not in self.unkept:
                # Its steps may fall back, but it has used what it had used before.
                assert status.meter == self._used.get(name, status.meter), status

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
            self._used[status.name] = status.meter
        self._check_totals(live)
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
        # What a task that was cancelled has used depends on the steps whose results have been seen.
        last = self._last.get(status.name, 0) if own.cancelled else status.step
        steps = {last, max(0, last - 1)} if status.name in self.unkept else {last}
        assert any(self._may_have_used(status.meter, own.kind, k) for k in steps), (
            status,
            own,
            steps,
        )
        self._check_recomputed(status, own)
        if status.state == "succeeded":
            assert status.step == own.steps, status
        if status.state == "failed":
            self._check_failure(status, own)

    def _may_have_used(self, meter: Meter, kind: str, step: int) -> bool:
        """Whether a task of a kind may have used so much, as far as results after this step and
        before the next one have arrived."""
        calm, (effective, computed, trained) = self._calm[kind, step], tokens(meter)
        if (effective, trained) != (calm.tokens[0], calm.tokens[2]):
            return False
        if self._whole_turns:
            return computed in calm.computed
        following = self._calm.get((kind, step + 1), calm).tokens[1]
        return calm.tokens[1] <= computed <= max(following, *calm.computed)

    def _check_totals(self, live: LiveTraining) -> None:
        """What all tasks have used is the sum of what each of them has used."""
        found = dataclasses.asdict(live.totals())
        for field, total in found.items():
            parts = [getattr(status.meter, field) for status in live.statuses()]
            if field == "device_seconds":
                assert math.isclose(total, math.fsum(parts), rel_tol=1e-9, abs_tol=1e-9)
            else:
                assert total == sum(parts), (field, total, parts)

    def _check_recomputed(self, status: TaskStatus, own: Expected) -> None:
        """Steps that were computed again, and are part of the task as it is, count as such. So do
        turns of a step that was begun again, which the model does not see."""
        calm = [0] + [self._calm[own.kind, k].tokens[1] for k in range(1, status.step + 1)]
        counts = self._computed[status.name]
        again = sum(calm[k] - calm[k - 1] for k in range(1, len(calm)) if counts[k] > 1)
        found = status.meter.recomputed_tokens
        several_turns = len(self._calm[own.kind, 0].computed) > 1
        if several_turns or own.cancelled or not self._whole_turns:
            assert found >= again or status.name in self.lost, (status, again)
        else:
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
            assert status.step == calm.step, status
            # A task that fails may have begun a further step.
            exact = tokens(status.meter) == calm.tokens
            assert exact or calm.state == "failed", (status, calm.tokens)
            assert exact or self._may_have_used(status.meter, own.kind, calm.step), (status, calm)
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


def damaged_lines(folder: Path) -> int:
    """Number of lines of the files of events that are no events.

    Args:
      folder: the folder of the server.
    """
    damaged = 0
    for path in folder.glob("events.*jsonl"):
        for line in path.read_bytes().splitlines():
            try:
                json.loads(line)["kind"]
            except (ValueError, TypeError):
                damaged += 1
    return damaged
