"""What must be true of a server, whatever happens to it."""

import dataclasses
import itertools
import json
import math
from collections import Counter, defaultdict
from pathlib import Path

import numpy as np
from safetensors.numpy import load

from jaxmux.peft.peft_folder import WEIGHTS
from jaxmux.server import Event, LiveTraining, Meter, TaskStatus
from jaxmux.server.task import _LAST_STATES, ENDED, FOLLOWING, TRAINED

from .simulated_tasks import EPOCHS_STEPS, KINDS, MOST_STEPS, Outcome, tokens, without_card

# Where sums have another order, adapters differ by at most this part of what training has changed,
# and losses by at most this part.
TOLERANCE = 1e-4
# So many updates of a task may have been dispatched, and not been seen, at the end of a round.
MOST_AWAITED = 1


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
      lengths: the numbers of steps that it has had in turn, each with the number of updates that
        had been seen then.
    """

    kind: str
    steps: int
    priority: int
    paused: bool = False
    cancelled: bool = False
    problem: str | None = None
    data_replaced: bool = False
    lengths: list[tuple[int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self):
        self.lengths.append((-MOST_AWAITED, self.steps))

    def extend(self, steps: int, seen: int) -> None:
        """Gives the task more steps.

        Args:
          steps: its new number of steps.
          seen: number of its updates that have been seen.
        """
        # Extensions that were to have effect later have none.
        self.lengths = [own for own in self.lengths if own[0] <= seen + MOST_AWAITED]
        self.lengths.append((seen, steps))
        self.steps = steps

    def learning_rates(self, step: int) -> set[float]:
        """The learning rates that a step may have: one, or more if it may have been dispatched when
        the task was extended.

        Args:
          step: number of the step, from 1.
        """
        lengths: set[int] = set()
        for seen, steps in self.lengths:
            if step > seen + MOST_AWAITED:
                lengths = {steps}
            elif step > seen:
                lengths.add(steps)
        return {KINDS[self.kind].learning_rate(step, steps) for steps in lengths}


def has_ended(status: TaskStatus) -> bool:
    """Whether a task has ended, although that may not be shown before it is on disk."""
    return status.state in ENDED or status.reason == "its end is being written to disk"


class ServerModel:
    """Follows the commands that a server acknowledges, and compares them with what it shows.

    Attributes:
      tasks: by name, what is expected of the tasks, in the order of their registration.
    """

    def __init__(
        self,
        calm: dict[tuple[str, int], Outcome],
        same_bits: bool = True,
        same_chunks: bool = True,
        whole_turns: bool = True,
    ):
        """Starts without tasks.

        Args:
          calm: by kind and number of steps, what becomes of a task that nothing disturbs.
          same_bits: whether adapters have to equal those of calm tasks to the last bit. Otherwise
            they may differ by `TOLERANCE`, as sums of another order do. All else has to be the
            same in any case.
          same_chunks: whether global batches fill as many chunks as those of calm tasks. Devices
            that share a batch (dp) have chunks of their own.
          whole_turns: whether results arrive for whole turns only, and no round is begun with tasks
            that leave it.
        """
        self.tasks: dict[str, Expected] = {}
        self._calm, self._same_bits = calm, same_bits
        self._same_chunks, self._whole_turns = same_chunks, whole_turns
        # By kind and step, the tokens that calm tasks have computed at ends of rounds.
        self._calm_ends: dict[tuple[str, int], set[int]] = defaultdict(set)
        for (kind, _), outcome in calm.items():
            for step, found in outcome.computed.items():
                self._calm_ends[kind, step] |= found
        # By task, the last step that the present server has computed; the last one that the table
        # had counted when it was started; and the tokens that were computed again, with padding.
        self._last: dict[str, int] = {}
        self._high: Counter[str] = Counter()
        self._again: Counter[str] = Counter()
        # What the table has of these, and of statuses.
        self._written: dict[str, tuple[int, int, TaskStatus]] = {}
        # By task and step, the tokens that were computed when the step was counted, with padding.
        self._chunks: dict[tuple[str, int], int] = {}
        # By task and step, those that were begun when a server was started.
        self._begun: set[tuple[str, int]] = set()
        # By task and step, the learning rate with which it was computed first since the task was
        # extended.
        self._rates: dict[tuple[str, int], float] = {}
        self._round = 0
        # By task, what it was seen to have used last.
        self._meters: dict[str, Meter] = {}
        # By task whose end is in the table, its status there.
        self._ended: dict[str, TaskStatus] = {}

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
        if own is None or own.cancelled or (status and has_ended(status)):
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
                seen = self._last.get(name, 0)
                own.extend(value, seen)
                for step in range(seen + 1, MOST_STEPS + 1):
                    self._rates.pop((name, step), None)

    def begin_server(self, live: LiveTraining) -> None:
        """A server has been started, perhaps again.

        Args:
          live: the server.
        """
        self._round = 0
        for status in live.statuses():
            name = status.name
            high, again, written = self._written.get(name, (0, 0, None))
            self._high[name], self._again[name] = high, again
            # What the table has counted never falls back, though steps may.
            self._meters[name] = written.meter if written else Meter()
            assert status.meter == self._meters[name], (status, written)
            if before := self._ended.get(name):
                assert status == before, (status, before)
            own = self.tasks[name]
            self._last[name] = high if own.cancelled else status.step
            self._begun.add((name, high + 1))

    def note_written(self, live: LiveTraining) -> None:
        """The table of a server has got all that has changed, but for commands that have not been
        carried out yet.

        Args:
          live: the server.
        """
        for own in live._tasks:
            last = max(self._high[own.name], self._last.get(own.name, 0))
            self._written[own.name] = last, self._again[own.name], own.status()

    def end_without_saving(self, live: LiveTraining) -> None:
        """A server ends. What its table tells of tasks that have ended holds for ever.

        Args:
          live: the server.
        """
        for own in live._tasks:
            if own.kept:
                # Results of an ended task that came later need not be in the table.
                late = ("step", "loss", "held_out_loss", "best_step", "meter")
                _, _, written = self._written[own.name]
                before = {field: getattr(written, field) for field in late}
                self._ended[own.name] = own.status()._replace(**before)

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
        if step > self._high[event.task]:
            self._chunks[event.task, step] = event.fields["computed_tokens"]
        else:
            self._again[event.task] += event.fields["computed_tokens"]
        rate = event.fields["lr"]
        assert rate in self.tasks[event.task].learning_rates(step), (event, self.tasks[event.task])
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
            before = self._meters.get(status.name, Meter())
            for field, used in dataclasses.asdict(status.meter).items():
                assert used >= getattr(before, field), (status, before)
            self._meters[status.name] = status.meter
        self._check_totals(live)
        placed = [own for own in statuses if not has_ended(own)]
        running = [own.priority for own in placed if own.state == "running"]
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
        # Of a long history, the states after the first one are left out.
        pairs = list(itertools.pairwise(states))[len(states) >= _LAST_STATES :]
        assert all(b in FOLLOWING[a] for a, b in pairs), status
        assert times == sorted(times), status
        assert status.priority == own.priority, status
        unknown = own.kind == "epochs" and own.steps == EPOCHS_STEPS
        assert status.steps == own.steps or (unknown and status.steps is None), (status, own)
        assert status.step <= own.steps, status
        assert (status.state == "cancelled") == own.cancelled, status
        assert own.paused >= (status.state == "paused"), status
        assert not own.paused or status.state in ("paused", *ENDED), status
        assert not (own.paused and status.state in TRAINED), status
        # What a task that was cancelled has used depends on the steps whose results have been seen.
        last = self._last.get(status.name, 0) if own.cancelled else status.step
        step = max(last, self._high[status.name])
        assert self._may_have_used(status, step), (status, own, step)
        self._check_recomputed(status, own)
        if status.state in TRAINED:
            assert status.step == self._calm[own.kind, own.steps].step, status
        if status.state == "failed":
            self._check_failure(status, own)

    def _may_have_used(self, status: TaskStatus, step: int) -> bool:
        """Whether a task may have used so much, as far as results after this step and before the
        next one have arrived."""
        kind = self.tasks[status.name].kind
        calm, (effective, computed, trained) = self._calm[kind, step], tokens(status.meter)
        if (effective, trained) != (calm.tokens[0], calm.tokens[2]):
            return False
        ends = self._calm_ends[kind, step]
        if self._whole_turns:
            return computed in ends
        least, most = self._computed_tokens(status.name, step)
        if self._same_chunks:
            following = self._calm.get((kind, step + 1), calm).tokens[1]
            return least <= computed <= max(following, most, *ends)
        return least <= computed <= most + self._most_chunks(kind)

    def _computed_tokens(self, name: str, step: int) -> tuple[int, int]:
        """The least and the largest number of tokens that a task has computed when it has trained
        so many steps and has not begun another. They differ only where a step may have been begun
        in chunks of other devices before it was computed."""
        kind = self.tasks[name].kind
        if self._same_chunks:
            return self._calm[kind, step].tokens[1], self._calm[kind, step].tokens[1]
        told = {k: self._chunks[name, k] for k in range(1, step + 1)}
        most = {k: self._most_chunks(kind) for k in told if (name, k) in self._begun}
        return sum(told.values()), sum(max(told[k], most.get(k, 0)) for k in told)

    def _most_chunks(self, kind: str) -> int:
        """The largest number of tokens of a step, with padding, on two devices that share a batch.
        No half of it needs more chunks than the whole."""
        computed = [self._calm[kind, k].tokens[1] for k in range(MOST_STEPS + 1)]
        return 2 * max(b - a for a, b in itertools.pairwise(computed))

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
        """Steps that were computed again after the table had counted them count as such. So do
        turns of a step that was begun again, which the model does not see."""
        again, found = self._again[status.name], status.meter.recomputed_tokens
        several_turns = len(self._calm_ends[own.kind, 0]) > 1
        if several_turns or own.cancelled or not self._whole_turns:
            assert found >= again, (status, again)
        else:
            assert found == again, (status, again)

    def _check_failure(self, status: TaskStatus, own: Expected) -> None:
        if own.problem:
            assert own.problem in status.reason, status
        elif own.data_replaced:
            assert "changed since" in status.reason or "changed after" in status.reason, status
        else:
            calm = self._calm[own.kind, own.steps]
            assert (calm.state, calm.reason) == ("failed", status.reason), status
            assert calm.step == status.step

    def names_of_calm_run(self, live: LiveTraining) -> list[str]:
        """The tasks with an adapter whose values depend on their names.

        Args:
          live: the server, whose tasks have all ended.
        """
        trained = [status.name for status in live.statuses() if status.state in TRAINED]
        return [name for name in trained if KINDS[self.tasks[name].kind].dropout]

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
                assert status.state == "failed", (status, own)
                continue
            calm = alone.get(status.name, self._calm[own.kind, own.steps])
            if own.data_replaced and status.state == "failed":
                continue
            assert (status.state, status.reason) == (calm.state, calm.reason), (status, own)
            assert status.step == calm.step, status
            # A task that fails or stops early may have begun a further step.
            whole = calm.state == "succeeded" and calm.step == own.steps
            exact = self._same_tokens(status, calm)
            assert exact or not whole, (status, calm.tokens)
            assert exact or self._may_have_used(status, calm.step), (status, calm)
            if calm.adapter is None:
                continue
            found = without_card(adapter_bytes(folder / "adapters" / status.name))
            assert found.keys() == calm.adapter.keys(), status
            live.adapter(status.name)
            if self._same_chunks:
                assert status.meter.held_out_tokens == calm.held_out_tokens, (status, calm)
            if self._has_calm_rates(status):
                assert self._same_adapter(found, calm.adapter), (status, own)
                assert self._same_measurements(status, calm), (status, calm.held_out)

    def _same_tokens(self, status: TaskStatus, calm: Outcome) -> bool:
        """Nothing is lost or counted twice: each step counts as it was computed first."""
        if self._same_chunks:
            return tokens(status.meter) == calm.tokens
        effective, computed, trained = tokens(status.meter)
        least, most = self._computed_tokens(status.name, status.step)
        return (effective, trained) == calm.tokens[::2] and least <= computed <= most

    def _has_calm_rates(self, status: TaskStatus) -> bool:
        """Whether a task was trained with the learning rates of a calm one. One that was extended
        after it had begun is not, if its rates decay."""
        own = self.tasks[status.name]
        return all(
            self._rates[status.name, step] == KINDS[own.kind].learning_rate(step, own.steps)
            for step in range(1, status.step + 1)
        )

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
