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

from .simulated_tasks import EPOCHS_STEPS, KINDS, Outcome, tokens

# Where sums have another order, adapters differ by at most this part of what training has changed,
# and losses by at most this part.
TOLERANCE = 1e-4


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
      extended: whether it has got more steps.
    """

    kind: str
    steps: int
    priority: int
    paused: bool = False
    cancelled: bool = False
    problem: str | None = None
    data_replaced: bool = False
    extended: bool = False


class ServerModel:
    """Follows the commands that a server acknowledges, and compares them with what it shows.

    Attributes:
      tasks: by name, what is expected of the tasks, in the order of their registration.
      lost: names of tasks of which updates may have been lost from events.jsonl.
    """

    def __init__(
        self,
        calm: dict[tuple[str, int], Outcome],
        same_bits: bool = True,
        same_chunks: bool = True,
    ):
        """Starts without tasks.

        Args:
          calm: by kind and number of steps, what becomes of a task that nothing disturbs.
          same_bits: whether adapters have to equal those of calm tasks to the last bit. Otherwise
            they may differ by `TOLERANCE`, as sums of another order do. All else has to be the
            same in any case.
          same_chunks: whether global batches fill as many chunks as those of calm tasks. Devices
            that share a batch (dp) have chunks of their own.
        """
        self.tasks: dict[str, Expected] = {}
        self.lost: set[str] = set()
        self._calm, self._same_bits, self._same_chunks = calm, same_bits, same_chunks
        # By task, how often each step has been computed; and the last one of the present server.
        self._computed: dict[str, Counter[int]] = defaultdict(Counter)
        self._last: dict[str, int] = {}
        # By task and step, the tokens that were computed last, with padding.
        self._chunks: dict[tuple[str, int], int] = {}
        # By task and step, the learning rate with which it was computed first.
        self._rates: dict[tuple[str, int], float] = {}
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

    def may_extend(self, name: str) -> bool:
        """Whether it is known what becomes of a task that gets more steps.

        Args:
          name: name of the task.
        """
        return name not in self.tasks or KINDS[self.tasks[name].kind].extended

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
                own.steps, own.extended = value, True

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
        self._chunks[event.task, step] = event.fields["computed_tokens"]
        rate = event.fields["lr"]
        assert self._rates.setdefault((event.task, step), rate) == rate, event

    def check(self, live: LiveTraining, slots: int, elastic: bool) -> None:
        """Compares all that a server shows with what was acknowledged.

        Args:
          live: the server, at the end of a round.
          slots: number of tasks that it can train at the same time.
          elastic: whether it may have fewer slots at present.
        """
        statuses = live.statuses()
        names = [status.name for status in statuses]
        assert names == list(self.tasks), (names, list(self.tasks))
        for status in statuses:
            self._check_task(status)
        running = [own.priority for own in statuses if own.state == "running"]
        queued = [own.priority for own in statuses if own.state == "queued"]
        present = live._engine.size.slots
        assert present <= slots if elastic else present == slots, present
        assert len(running) <= present
        if running and queued:
            assert max(queued) <= min(running), "a task waits for one of lower priority"
        if queued and len(running) < present:
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
        kinds = (own.kind, "replaced") if own.data_replaced else (own.kind,)
        assert any(
            self._same_tokens(status, self._calm[kind, status.step].tokens)
            if status.step
            else tokens(status.meter) == (0, 0, 0)
            for kind in kinds
        ), (status, own)
        self._check_recomputed(status, own)
        if status.state == "succeeded":
            # It may have stopped early.
            calm_ends = {self._calm[kind, own.steps].step for kind in kinds}
            assert status.step in calm_ends, (status, calm_ends)
        if status.state == "failed":
            self._check_failure(status, own)

    def _check_recomputed(self, status: TaskStatus, own: Expected) -> None:
        """Steps that were computed again, and are part of the task as it is, count as such."""
        counts = self._computed[status.name]
        steps = [step for step in range(1, status.step + 1) if counts[step] > 1]
        again = sum(self._chunks[status.name, step] for step in steps)
        found = status.meter.recomputed_tokens
        if not own.data_replaced:
            exact = status.name not in self.lost
            assert found == again if exact else found <= again, (status, again)

    def _check_failure(self, status: TaskStatus, own: Expected) -> None:
        if own.problem:
            assert own.problem in status.reason, status
        elif own.data_replaced:
            assert "changed since" in status.reason, status
        else:
            calm = self._calm[own.kind, own.steps]
            assert (calm.state, calm.reason) == ("failed", status.reason), status
            assert calm.step == status.step

    def names_of_calm_run(self, live: LiveTraining) -> list[str]:
        """The tasks that have succeeded whose adapters depend on their names.

        Args:
          live: the server, whose tasks have all ended.
        """
        succeeded = [status.name for status in live.statuses() if status.state == "succeeded"]
        return [name for name in succeeded if KINDS[self.tasks[name].kind].dropout]

    def check_end(
        self, live: LiveTraining, folder: Path, adapter_bytes, alone: dict[str, Outcome]
    ) -> None:
        """Compares what became of all tasks with what becomes of calm ones.

        Args:
          live: the server, whose tasks have all ended.
          folder: its folder.
          adapter_bytes: function that reads an adapter folder.
          alone: by name, what becomes of the tasks of `names_of_calm_run` if nothing disturbs them.
        """
        for status in live.statuses():
            own = self.tasks[status.name]
            if own.cancelled:
                continue
            if own.problem:
                assert status.state == "failed", status
                continue
            calm = alone.get(status.name, self._calm[own.kind, own.steps])
            if own.data_replaced and status.state == "failed":
                continue
            if own.data_replaced and not self._same_tokens(status, calm.tokens):
                calm = self._calm["replaced", own.steps]
            assert (status.state, status.reason) == (calm.state, calm.reason), (status, own)
            assert status.step == calm.step, status
            assert self._same_tokens(status, calm.tokens), (status, calm.tokens)
            if calm.adapter is None:
                continue
            found = adapter_bytes(folder / "adapters" / status.name)
            assert found.keys() == calm.adapter.keys(), status
            live.adapter(status.name)
            # What an extended task has trained depends on when that happened, if its rate decays.
            if not (own.extended and KINDS[own.kind].decays):
                assert self._same_adapter(found, calm.adapter), (status, own)
                assert self._same_measurements(status, calm), (status, calm.held_out)

    def _same_tokens(self, status: TaskStatus, calm: tuple[int, int, int]) -> bool:
        """Nothing is lost or counted twice: each step counts as it was computed last."""
        effective, computed, trained = tokens(status.meter)
        told = [self._chunks[status.name, step] for step in range(1, status.step + 1)]
        same_chunks = computed == (calm[1] if self._same_chunks else sum(told))
        return (effective, trained) == (calm[0], calm[2]) and same_chunks

    def _same_adapter(self, found: dict[str, bytes], calm: dict[str, bytes]) -> bool:
        if self._same_bits:
            return found == calm
        one, other = (
            {name: array.astype(np.float64) for name, array in load(files[WEIGHTS]).items()}
            for files in (found, calm)
        )
        # `B` begins with zeros, so its norm is part of what training has changed.
        change = [np.linalg.norm(other[name]) for name in other if "lora_B" in name]
        error = [np.linalg.norm(one[name] - other[name]) for name in other]
        return np.linalg.norm(error) <= TOLERANCE * np.linalg.norm(change)

    def _same_measurements(self, status: TaskStatus, calm: Outcome) -> bool:
        loss, best = calm.held_out
        if self._same_bits or loss is None:
            return (status.held_out_loss, status.best_step) == (loss, best)
        return status.best_step == best and abs(status.held_out_loss / loss - 1) <= TOLERANCE


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
