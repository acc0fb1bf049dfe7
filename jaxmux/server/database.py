"""What a tuning server keeps in its folder: commands, tasks, adapters and events."""

import dataclasses
import errno
import json
import math
import os
import re
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from jaxmux.atomic_files import sync
from jaxmux.engine import TaskProgress
from jaxmux.engine.tasks.progress import as_line
from jaxmux.field_checks import to_object
from jaxmux.runs.metrics import LineLog
from jaxmux.runs.run_directory import RunDirectoryError
from jaxmux.specifications.reading import from_json

from . import At, Command, End, Meter, StateChange

if TYPE_CHECKING:
    from . import Event
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from jaxmux.engine import TaskEvaluation, TaskUpdate, TrainedTask
from jaxmux.engine.rounds.results import RoundRecord
from jaxmux.errors import first_line
from jaxmux.models import Backbone, checkpoint_tensors, devices_bytes
from jaxmux.peft import Adapter, SlotArrays, export_adapter, import_adapter
from jaxmux.planner.numbers import numbered
from jaxmux.runs.checkpoints import Checkpoints
from jaxmux.runs.metrics import LOG_BYTES, has_details, host_bytes, round_line
from jaxmux.runs.run_directory import Retry
from jaxmux.runs.summary import notes_of_task
from jaxmux.runs.trackers import RunTrackers
from jaxmux.sharding import PlacedBackbone
from jaxmux.tasks import Task, TaskError

from . import Event, Extension, SavedTask
from .folder import ServerDirectory
from .task import ENDED

_SEGMENT = re.compile(r"(\d+)\.jsonl")


class Journal:
    """Commands in the order in which they were carried out, divided into segments.

    A segment holds the commands after the checkpoint of its number, and before the next one. A
    command is a line of JSON with a checksum, and with what its task had done and used by then. A
    line at the end of a segment that is not complete was never carried out.
    """

    def __init__(self, folder: Path):
        """Opens the journal; `begin` has to be called before `append`.

        Args:
          folder: its folder; it is created if it does not exist.
        """
        self._folder = folder
        # The descriptor of the segment that is written, and its length; -1 if there is none.
        self._file, self._length = -1, 0
        folder.mkdir(exist_ok=True)
        sync(folder.parent)

    @property
    def numbers(self) -> list[int]:
        """The numbers of the segments, ascending."""
        names = (_SEGMENT.fullmatch(path.name) for path in self._folder.iterdir())
        return sorted(int(name[1]) for name in names if name)

    def read(self, after: int) -> list[Command]:
        """The commands that were carried out after a checkpoint.

        Args:
          after: number of the checkpoint; 0 for all commands from the beginning.

        Raises:
          RunDirectoryError: a line is damaged, so commands are lost.
        """
        return [
            command
            for number in self.numbers
            if number >= after
            for command in _commands(self._path(number))
        ]

    def begin(self, number: int) -> None:
        """Begins a segment, or goes on with it: the next commands come after the checkpoint of this
        number.

        Args:
          number: number of the checkpoint, not smaller than that of any segment.

        Raises:
          OSError: the segment cannot be created. The one before it goes on.
        """
        path = self._path(number)
        length = _complete_length(path.read_bytes()) if path.exists() else 0
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            os.ftruncate(file, length)
            sync(self._folder)
        except OSError:
            os.close(file)
            raise
        self.close()
        self._file, self._length = file, length

    def append(self, commands: Sequence[Command]) -> None:
        """Returns when commands are on disk.

        Args:
          commands: the commands, in their order.

        Raises:
          OSError: they cannot be written, and will not be read.
        """
        lines = b"".join(map(_line, commands))
        try:
            if self._file < 0:
                raise OSError(errno.EIO, "not writable since an earlier error")
            written = 0
            while written < len(lines):
                written += os.pwrite(self._file, lines[written:], self._length + written)
            os.fsync(self._file)
        except OSError as e:
            self._go_back()
            raise OSError(e.errno, e.strerror, str(self._folder)) from None
        self._length += len(lines)

    def forget(self, before: int) -> None:
        """Deletes the segments that no checkpoint needs any more.

        Args:
          before: number of the oldest checkpoint.
        """
        for number in self.numbers:
            if number < before:
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Closes the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _go_back(self) -> None:
        """Removes what was written in vain. If that fails too, nothing more is written, because a
        damaged line would be followed by others."""
        try:
            os.ftruncate(self._file, self._length)
            os.fsync(self._file)
        except OSError:
            self.close()

    def _path(self, number: int) -> Path:
        return self._folder / f"{number}.jsonl"


def _line(command: Command) -> bytes:
    fields: dict[str, Any] = {"kind": command.kind, "task": command.task, "time": command.time}
    if command.kind == "register":
        task, priority, files = command.value
        fields |= {"specification": to_object(task), "priority": priority, "files": dict(files)}
    elif command.kind == "end":
        history, progress, steps, warnings = command.value
        fields["value"] = {
            "history": [change._asdict() for change in history],
            "progress": progress and progress.to_json(),
            "steps": steps,
            "warnings": warnings,
        }
    elif command.value is not None:
        fields["value"] = command.value
    if command.at:
        fields["at"] = {"step": command.at.step, "meter": dataclasses.asdict(command.at.meter)}
    text = json.dumps(fields)
    return f'{{"checksum": {zlib.crc32(text.encode())}, "command": {text}}}\n'.encode()


def _commands(path: Path) -> list[Command]:
    """The commands of a segment."""
    content = path.read_bytes()
    content = content[: _complete_length(content)]
    return [_command(path, i, line) for i, line in enumerate(content.split(b"\n")[:-1], 1)]


def _command(path: Path, number: int, line: bytes) -> Command:
    try:
        found = json.loads(line)
        fields = found["command"]
        if zlib.crc32(json.dumps(fields).encode()) != found["checksum"]:
            raise ValueError("its checksum differs")
        value = fields.get("value")
        if fields["kind"] == "register":
            # Older journals know nothing of files.
            files = fields.get("files", {})
            value = from_json(fields["specification"]), fields["priority"], files
        elif fields["kind"] == "end":
            value = _end(value)
        at = fields.get("at")
        at = at and At(at["step"], Meter(**at["meter"]))
        return Command(fields["kind"], fields["task"], value, fields["time"], at)
    except (ValueError, KeyError, TypeError) as e:
        raise RunDirectoryError(
            f"{path}, line {number}: damaged ({e}), so commands are lost; restore the file from a "
            "backup, or delete it and the later ones to go on without their commands"
        ) from None


def _end(fields: dict[str, Any]) -> End:
    return End(
        tuple(StateChange.of(change) for change in fields["history"]),
        fields["progress"] and TaskProgress.from_json(fields["progress"]),
        fields["steps"],
        # Older journals know nothing of warnings.
        tuple(fields.get("warnings", ())),
    )


def _complete_length(content: bytes) -> int:
    """The length of the lines that end."""
    return content.rfind(b"\n") + 1


# Times in the file are rounded to so many digits of a second.
_DIGITS = 3


class Told(NamedTuple):
    """What events tell of a task.

    Attributes:
      steps: number of steps that it had trained.
      state: its last state; None if they tell of none.
    """

    steps: int
    state: str | None


class EventLog(LineLog):
    """The file events.jsonl, with those before it."""

    def told(self, registered: Mapping[str, float]) -> dict[str, Told]:
        """By task, what the kept events tell of it.

        Args:
          registered: by name of the tasks of interest, when they were registered, in seconds since
            1970. Earlier events belong to other tasks of the same names.
        """
        tasks: dict[str, Told] = {}
        for line in self.lines(min(registered.values(), default=math.inf)):
            try:
                event = json.loads(line)
                name, kind = event["task"], event["kind"]
                since = registered.get(name)
                if since is None or event["time"] < round(since, _DIGITS):
                    continue
                before = tasks.get(name, Told(0, None))
                if kind == "update":
                    # A task that was started again from an earlier step may not be back yet.
                    steps = max(before.steps, event["task_step"])
                    tasks[name] = before._replace(steps=steps)
                elif kind == "state":
                    tasks[name] = before._replace(state=event["state"])
            except (ValueError, KeyError, TypeError):
                pass  # A line that a crash has cut off.
        return tasks

    def write(self, event: "Event") -> None:
        """Appends an event.

        Args:
          event: the event. Numbers that are not finite become null.
        """
        fields = {"time": round(event.time, _DIGITS), "task": event.task, "kind": event.kind}
        self.append(fields | event.fields)


# A line of rounds.jsonl has details at least so often, in seconds.
_DETAILS_EVERY = 60.0
# So many problems are told together.
_MOST_PROBLEMS = 5
# What checkpoints are among the problems of a store.
_CHECKPOINT = "checkpoint"


class Kept(NamedTuple):
    """What an earlier server has kept.

    Attributes:
      saved: the tasks of the newest checkpoint.
      commands: the commands since then.
      totals: what all tasks together had used at the checkpoint; None if it does not tell.
      told: by name, what the events tell of tasks, some of it perhaps from after the checkpoint.
      rounds: number of rounds that have been trained, those after the checkpoint included.
    """

    saved: list[SavedTask]
    commands: list[Command]
    totals: Meter | None
    told: dict[str, Told]
    rounds: int


class ServerStore:
    """The `Store` of a server with a folder.

    Commands are on disk before they are carried out. Adapters and checkpoints are written by one
    thread in the order in which they come. If they cannot be written, training goes on: adapters
    are tried again with the next checkpoint or by `retry`, and the commands since the last
    checkpoint are kept.
    """

    def __init__(
        self,
        directory: ServerDirectory,
        backbone: Backbone | PlacedBackbone,
        keep: int,
        trackers: RunTrackers,
        say: Callable[[str], None],
        events_bytes: int = LOG_BYTES,
    ):
        """Opens the files.

        Args:
          directory: the folder of the server.
          backbone: the backbone, whose name and fingerprint adapters record.
          keep: number of checkpoints to keep.
          trackers: the trackers, which `close` closes.
          say: function that prints one line; it is told what cannot be written or read, and how
            many warnings tasks have.
          events_bytes: size in bytes at which events.jsonl and rounds.jsonl are set aside.
        """
        self._directory, self._backbone, self._say = directory, backbone, say
        self._base = checkpoint_tensors(
            backbone.name_or_path, backbone.compute_dtype, backbone.config.backbone_format
        )
        self._keep = keep
        self._checkpoints = Checkpoints(directory.checkpoints, keep, say)
        self._journal = Journal(directory.journal)
        self._events = EventLog(directory.events, say, events_bytes)
        self._rounds = LineLog(directory.rounds, say, events_bytes)
        # When the last line of rounds.jsonl with details was written, by `time.monotonic`.
        self._detailed_at = -math.inf
        self._trackers = trackers
        self._writer = ThreadPoolExecutor(1)
        # The adapters that have not been written.
        self._adapters: dict[str, tuple[TrainedTask, Callable[[], Adapter]]] = {}
        # Whether some of these have been tried in vain, and when to try again.
        self._has_unwritten, self._adapters_retry = False, Retry()
        self._number = 0
        self._last: Future[None] | None = None
        # Whether the last checkpoint could not be written, and when to write another one.
        self._checkpoint_retry = Retry()
        # By kind, why the last thing of it could not be written, without and with its name.
        self._problems: dict[str, tuple[str, str]] = {}
        self._written: Callable[[], None] = lambda: None

    def read(self) -> Kept:
        """What an earlier server has kept in the folder. Call it once, before any other method.

        Raises:
          RunDirectoryError: checkpoints or commands are damaged.
        """
        segments = self._journal.numbers
        # Segment 0 holds the commands before the first checkpoint.
        found = self._checkpoints.newest(_begun, beginning=0 in segments)
        saved, totals = [], None
        if found:
            totals = found.record.get("totals") and Meter(**found.record["totals"])
            saved = [
                _saved(fields, found.arrays.get(name))
                for name, fields in found.record["tasks"].items()
            ]
        number = found.number if found else 0
        self._refuse_gap(number, segments)
        commands = self._journal.read(number)
        # Later segments than the checkpoint's are there if the checkpoints of their numbers were
        # not completed or are damaged. The next commands come after those in all of them.
        self._number = max([number, *segments])
        self._journal.begin(self._number)
        goes_on = (own for own in saved if own.history[-1].state not in ENDED)
        registered = {own.task.name: own.history[0].time for own in goes_on}
        registered |= {own.task: own.time for own in commands if own.kind == "register"}
        for name, registered_at in registered.items():
            self._trackers.register(name, registered_at)
        # Commands may be about tasks that had ended.
        began = {own.task.name: own.history[0].time for own in saved}
        registered |= {
            own.task: began[own.task]
            for own in commands
            if own.task in began and own.task not in registered
        }
        # Every round is counted once. After a crash, those since the checkpoint were trained too.
        last = self._rounds.last()
        rounds = max(found.record.get("rounds", 0) if found else 0, _after(last))
        return Kept(saved, commands, totals, self._events.told(registered), rounds)

    @property
    def behind(self) -> bool:
        return self._checkpoint_retry.has_failed

    def check(self, task: Task) -> None:
        try:
            same = from_json(json.loads(json.dumps(to_object(task)))) == task
        except (ValueError, KeyError, TypeError):
            same = False
        if not same:
            raise TaskError(
                f"task {task.name!r}: a server that is started again could not read it; neither it "
                "nor its adapter, optimizer or data may be of a subclass"
            )

    def record(self, commands: Sequence[Command]) -> None:
        self._journal.append(commands)
        for own in commands:
            if own.kind == "register":
                self._trackers.register(own.task, own.time)

    def export(self, trained: TrainedTask, adapter: Callable[[], Adapter]) -> None:
        self._adapters[trained.task.name] = trained, adapter
        self._writer.submit(self._write_adapters)

    def is_exporting(self, name: str) -> bool:
        return name in self._adapters

    def when_written(self, call: Callable[[], None]) -> None:
        self._written = call

    def adapter(self, task: Task) -> Adapter:
        if (waiting := self._adapters.get(task.name)) is not None:
            return waiting[1]()
        folder = self._directory.adapter(task.name)
        return import_adapter(folder, self._backbone.config, base=self._base)[1]

    def save(
        self, tasks: Sequence[SavedTask], totals: Meter, rounds: int, wait: bool = False
    ) -> bool:
        is_ready = not self._last or self._last.done()
        if not (wait or is_ready and self._checkpoint_retry.is_due):
            # The disk is slower than training, or full: a later call saves more.
            return False
        number = self._number + 1
        try:
            self._journal.begin(number)
        except OSError as e:
            self._checkpoint_retry.note_failure()
            self._note(_CHECKPOINT, f"checkpoint {number}", f"cannot be begun ({e.strerror})")
            return False
        self._number = number
        self._last = self._writer.submit(self._write_checkpoint, number, tasks, totals, rounds)
        return True

    def retry(self) -> None:
        if self._has_unwritten and self._adapters_retry.is_due:
            self._has_unwritten = False
            self._writer.submit(self._write_adapters)

    def wait(self) -> str | None:
        self._writer.submit(self._write_adapters).result()
        texts = [text for _, text in self._problems.values()]
        if (more := len(texts) - _MOST_PROBLEMS) > 0:
            texts[_MOST_PROBLEMS:] = [f"and {more} more"]
        return "; ".join(texts) or None

    def tell(self, event: Event) -> None:
        self._events.write(event)
        if event.kind == "warning":
            count = len(event.fields["warnings"])
            it = "it" if count == 1 else "them"
            self._say(f"{event.task}: {numbered(count, 'warning')}; its status tells {it}")

    def tell_round(self, record: RoundRecord, spent: Mapping[str, float]) -> None:
        # Tasks come and go, so what microbatches hold is told now and then in any case.
        now = time.monotonic()
        is_detailed = has_details(record.index) or now - self._detailed_at > _DETAILS_EVERY
        if is_detailed:
            self._detailed_at = now
        line = round_line(record, spent, devices_bytes(), host_bytes(), is_detailed)
        self._rounds.append({**line, "time": round(time.time(), 3)})

    def track(
        self, updates: Sequence[TaskUpdate], evaluations: Sequence[TaskEvaluation], time: float
    ) -> None:
        for results in (updates, evaluations):
            lines = [{**as_line(result), "time": time} for result in results]
            self._trackers.log(lines, held_out=results is evaluations)

    def close(self) -> None:
        """Waits until everything is on disk, and closes the files."""
        self._writer.shutdown()
        self._checkpoints.close()
        self._journal.close()
        self._events.close()
        self._rounds.close()
        self._trackers.close(finished=False)

    def _note(self, kind: str, what: str, problem: str) -> None:
        """Says why something cannot be written, unless that was said of the last of its kind."""
        before, _ = self._problems.get(kind, (None, None))
        self._problems[kind] = problem, f"{what}: {problem}"
        if problem != before:
            self._say(f"{what}: {problem}; training goes on")

    def _write_adapters(self) -> None:
        """Writes the adapters that have not been written."""
        before = len(self._adapters)
        for waiting in list(self._adapters.values()):
            trained, adapter = waiting
            task = trained.task
            what, folder = f"adapter {task.name}", self._directory.adapter(task.name)
            try:
                export_adapter(
                    folder,
                    adapter(),
                    task.adapter,
                    self._backbone.config,
                    self._backbone.name_or_path,
                    base_fingerprint=self._backbone.fingerprint,
                    base=self._base,
                    notes=notes_of_task(trained),
                    rendering=trained.rendering,
                )
                for parent in (folder.parent, self._directory.path):
                    sync(parent)
            except Exception as e:  # of the disk, of the devices, or of what the task holds
                self._note(what, what, f"cannot be written yet ({_why(e)})")
                continue
            self._problems.pop(what, None)
            # Meanwhile another task may have got the name, and ended.
            if self._adapters[task.name] is waiting:
                del self._adapters[task.name]
        if self._adapters:
            self._adapters_retry.note_failure()
        else:
            self._adapters_retry.note_success()
        self._has_unwritten = bool(self._adapters)
        if len(self._adapters) < before:
            self._written()

    def _write_checkpoint(
        self, number: int, tasks: Sequence[SavedTask], totals: Meter, rounds: int
    ) -> None:
        self._write_adapters()
        try:
            arrays = {own.task.name: own.arrays() for own in tasks if own.arrays}
            record = {"tasks": {own.task.name: _fields(own) for own in tasks}, "rounds": rounds}
            record |= _totals(totals)
            self._refuse_too_large(sum(x.nbytes for own in arrays.values() for x in own.values()))
            self._checkpoints.save(number, record, arrays)
            self._checkpoints.wait()
            numbers = self._checkpoints.numbers
            self._checkpoint_retry.note_success()
            self._problems.pop(_CHECKPOINT, None)
            # Until there are others to fall back on, the beginning takes the place of the first.
            if len(numbers) >= self._keep:
                self._journal.forget(before=numbers[0])
        except Exception as e:  # of the disk, of the devices, or of what the tasks hold
            self._checkpoint_retry.note_failure()
            self._note(_CHECKPOINT, f"checkpoint {number}", f"cannot be written ({_why(e)})")

    def _refuse_gap(self, number: int, segments: Sequence[int]) -> None:
        """RunDirectoryError if commands are missing between a checkpoint, 0 for none, and later
        segments of the journal."""
        later = [segment for segment in segments if segment >= number]
        if later != list(range(number, number + len(later))):
            after = f"checkpoint {number}" if number else "the beginning"
            raise RunDirectoryError(
                f"{self._directory.journal}: the commands after {after} are missing, and there are "
                f"later ones ({later[-1]}.jsonl); restore the folder {self._directory.path} from a "
                "backup, or delete it to begin anew"
            )

    def _refuse_too_large(self, needed: int) -> None:
        """OSError if the disk has no room for arrays of so many bytes. Otherwise it would be full
        until writing them fails, also for commands and adapters."""
        if shutil.disk_usage(self._directory.checkpoints).free < needed:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _why(error: Exception) -> str:
    """Why something could not be written, in the same words whichever file it was."""
    text = getattr(error, "strerror", None) or first_line(error)
    full = os.strerror(errno.ENOSPC)
    return full if full in text else text


def _after(line: dict[str, Any] | None) -> int:
    """Number of rounds up to that of a line of rounds.jsonl."""
    number = line.get("round") if line else None
    return number + 1 if isinstance(number, int) else 0


def _begun(record: dict[str, Any]) -> dict[str, None]:
    """The tasks whose arrays a checkpoint holds."""
    return {name: None for name, fields in record["tasks"].items() if "checksum" in fields}


def _fields(own: SavedTask) -> dict[str, Any]:
    """The entry of a task in a checkpoint."""
    return {
        "specification": to_object(own.task),
        "priority": own.priority,
        "arrival": own.arrival,
        "passes": own.passes,
        "history": [change._asdict() for change in own.history],
        "meter": dataclasses.asdict(own.meter),
        "fingerprints": dict(own.fingerprints),
        "progress": own.progress and own.progress.to_json(),
        "reached": own.reached,
        "steps": own.steps,
        "extensions": [list(extension) for extension in own.extensions],
        "begun_tokens": own.begun_tokens,
        "files": dict(own.files),
        "warnings": own.warnings,
    }


def _totals(totals: Meter) -> dict[str, Any]:
    """The entry of a checkpoint that tells what all tasks have used."""
    return {"totals": dataclasses.asdict(totals)}


def _saved(fields: dict[str, Any], arrays: SlotArrays | None) -> SavedTask:
    """The inverse of `_fields`, also of one of an earlier version.

    Args:
      arrays: the task's arrays by path.
    """
    return SavedTask(
        task=from_json(fields["specification"]),
        priority=fields["priority"],
        arrival=fields["arrival"],
        passes=fields["passes"],
        history=tuple(StateChange.of(change) for change in fields["history"]),
        meter=Meter(**fields["meter"]),
        fingerprints=fields["fingerprints"],
        progress=fields["progress"] and TaskProgress.from_json(fields["progress"]),
        arrays=None if arrays is None else lambda: arrays,
        reached=fields["reached"],
        steps=fields["steps"],
        extensions=tuple(Extension(*extension) for extension in fields.get("extensions", ())),
        begun_tokens=fields.get("begun_tokens", 0),
        # Older checkpoints know nothing of files and warnings.
        files=fields.get("files", {}),
        warnings=tuple(fields.get("warnings", ())),
    )
