"""Follows the files of a run directory."""

import json
import os
import re
import stat
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from jaxmux.errors import InputError
from jaxmux.runs.run_directory import LockState, lock_state

from .line_file import LineFile, line_at
from .run_view import RunView, TaskView, metric_of

# If there are more new lines than this, the page loads everything again.
_MOST_SENT = 2000
# Largest size in bytes of a run.json, server.json, tasks.json or summary.json that is read.
_MOST_RECORD = 64 * 2**20
# States of tasks that only a running process can have.
_TRAINING = ("running", "preparing")


class UIError(InputError):
    """The page cannot be shown. The message says why, and what to do."""


class RunReader:
    """The run in a directory. Every thread may call all methods. `path` is the absolute path of the
    directory, `version` the number of the newest change."""

    def __init__(self, path: str | Path, wait: bool = False):
        """Opens the directory of a training run or of a server and reads its record, but no other
        file. With `wait`, the run may begin later. Raises UIError if there is no such directory, or
        it belongs to neither."""
        self.path = Path(path).absolute()
        self.version = 0
        self._lock = threading.Lock()
        self._record: dict[str, Any] = {}
        self._summary: dict[str, Any] | None = None
        # The content of tasks.json: tasks that have ended while others train.
        self._statuses: dict[str, Any] | None = None
        # The content of refused.json: the specifications that a server refuses.
        self._refused: dict[str, Any] = {}
        self._holder = LockState("unknown", 0.0)
        # The state of the run at the last change.
        self._told: str | None = None
        self._seen: dict[str, tuple[int, int, int]] = {}
        self._begin()
        if not wait:
            self._refuse_others()

    def _refuse_others(self) -> None:
        if not self.path.is_dir():
            raise UIError(f"run directory {self.path}: there is no such folder")
        if self._record:
            return
        records = [n for n in ("run.json", "server.json") if (self.path / n).exists()]
        if records:
            raise UIError(f"{self.path / records[0]}: it is damaged, or none of jaxmux's")
        inner = sorted(p.parent.name for p in self.path.glob("*/*.json") if _is_record(p))
        hint = f"; it holds the runs {', '.join(inner[:5])}" if inner else ""
        raise UIError(
            f"run directory {self.path}: holds neither run.json of a training run nor server.json "
            f"of a server{hint}"
        )

    def poll(self) -> dict[str, Any] | None:
        """Reads the lines that were appended since the last call, up to some megabytes per file.

        Returns:
          Additions to the page as JSON; None if nothing has changed. If there is an entry "reload",
          the page must load the whole `state` again.
        """
        with self._lock:
            others = self._paths() != [[file.path for file in log] for log in self._logs]
            again = others or any(file.replaced() for file in self._files) or self._read_record()
            if again:
                self._begin()
            changed = any(
                [self._read_summary(), self._read_statuses(), self._read_refused(), again]
            )
            self._holder = lock_state(self.path)
            lines = sum(map(self._read_log, self._logs))
            self._view.take_results((self._summary or self._statuses or {}).get("tasks", {}))
            new = self._view.take_new()
            # The states of tasks depend on the state of the run.
            before, self._told = self._told, self._state()
            changed |= before != self._told
            if not (lines or changed):
                return None
            self.version += 1
            if changed or new.pop("again") or lines > _MOST_SENT:
                return {"version": self.version, "reload": True}
            new["tasks"] = self._shown(new["tasks"])
            return {"version": self.version, **new, "run": self._run()}

    @property
    def unread(self) -> bool:
        """Whether another call of `poll` would immediately find more lines."""
        return any(file.left for file in self._files)

    def state(self) -> dict[str, Any]:
        with self._lock:
            view = self._view
            return {
                "version": self.version,
                "run": self._run(),
                "tasks": self._rows(),
                "sweeps": self._record.get("sweeps") or {},
                "loss": {name: task.loss.points() for name, task in view.tasks.items()},
                "held_out": {name: task.held_out for name, task in view.tasks.items()},
                "rounds": view.rounds.points(),
                "events": view.newest_events(),
                "details": sorted(view.details),
            }

    def _rows(self) -> list[dict[str, Any]]:
        """The rows of the tasks and of the refused specifications."""
        tasks, refused = self._view.tasks, self._refused.get("refused", [])
        others = [
            TaskView(entry["task"], state="waiting" if entry.get("waits") else "refused").row
            for entry in refused
            if entry["task"] not in tasks
        ]
        return self._shown([*(task.row for task in tasks.values()), *others])

    def _shown(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Adds to the rows the reason why a specification or its change is refused, and the seconds
        that are left. If the process has ended, tasks in training are shown as stopped."""
        errors = {entry["task"]: entry["error"] for entry in self._refused.get("refused", [])}
        state, tasks = self._state(), self._view.tasks
        has_ended, shown = state in ("stopped", "failed", "lost"), []
        for row in rows:
            name, changed = row["name"], {"error": errors.get(row["name"])}
            if has_ended and row["state"] in _TRAINING:
                changed["state"] = "stopped"
            elif state == "training" and name in tasks:
                changed["left"] = self._view.seconds_left(tasks[name])
            shown.append(row | changed)
        return shown

    def details(self, number: int) -> dict[str, Any] | None:
        """The line of a round (number from 0) in rounds.jsonl; None if the line has no details."""
        with self._lock:
            position = self._view.details.get(number)
            if position is None:
                return None
            try:
                line = line_at(*position)
            except (ValueError, OSError):
                return None
            return line if isinstance(line, dict) and line.get("round") == number else None

    def task(self, name: str) -> dict[str, Any] | None:
        """The content of the page for one task; None if the page lists no task of this name.

        Returns:
          A dict with name, specification (as in run.json, or as a server has accepted it; None if
          there is none), rate and norm (points of the learning rate and of the gradient's norm, as
          in `Series.points`), skips (the last skipped updates as pairs of step and reason), samples
          (step, prompt and completion of each), result (its entry in summary.json or tasks.json, or
          None), adapter (the path of its folder; None before it is written).
        """
        with self._lock:
            if not any(row["name"] == name for row in self._rows()):
                return None
            view = self._view.tasks.get(name) or TaskView(name)
            results = (self._summary or self._statuses or {}).get("tasks", {})
            return {
                "name": name,
                "specification": self._specification(name),
                "rate": view.rate.points(),
                "norm": view.norm.points(),
                "skips": list(view.skips),
                "samples": sorted((*key, text) for key, text in view.samples.items()),
                "result": results.get(name),
                "adapter": self._adapter(name),
            }

    def _specification(self, name: str) -> Any:
        """The specification of a task as JSON; None if no file has it."""
        if name in self._record.get("tasks", {}):
            return self._record["tasks"][name]
        # SQLite keeps two files beside an open database.
        database, *others = (self.path / f"server.db{end}" for end in ("", "-wal", "-shm"))
        if not database.exists() or not all(_is_plain(path) for path in (database, *others)):
            return None
        # Imported here because the import takes half a second and most visitors look at no
        # specification.
        from jaxmux.server.database import read_origin

        return read_origin(database, name)

    def _adapter(self, name: str) -> str | None:
        """The path of a task's adapter; None if the name is a path, or if the adapter or the folder
        of all adapters is a link or not a folder."""
        path = self.path / "adapters" / name
        try:
            kinds = [os.lstat(folder).st_mode for folder in (path.parent, path)]
        except (OSError, ValueError):
            return None
        return str(path) if path.name == name and all(map(stat.S_ISDIR, kinds)) else None

    def _begin(self) -> None:
        """Discards everything, and begins again before the first line of every file."""
        self._seen.clear()
        self._summary = self._statuses = None
        self._refused = {}
        self._read_record()
        self._view = RunView("server" in self._record)
        for name, task in self._record.get("tasks", {}).items():
            adapter = task.get("adapter", {})
            fields = {"steps": task.get("steps"), "kind": adapter.get("kind")}
            fields |= metric_of(task)
            self._view.task(name, rank=adapter.get("rank"), **fields)
        self._logs = [[LineFile(path) for path in parts] for parts in self._paths()]

    def _paths(self) -> list[list[Path]]:
        """The files of each log. A server may rename a file to an earlier file before it was
        read."""
        # Rounds are read first, because without them rounds would be counted from updates.
        names = ("rounds", "events")
        if not self._view.server:
            names = ("rounds", "metrics", "held_out", "samples")
        return [self._parts(name) for name in names]

    @property
    def _files(self) -> list[LineFile]:
        return [file for log in self._logs for file in log]

    def _parts(self, name: str) -> list[Path]:
        """The files of a log: the earlier files of a server, oldest first, then the newest."""
        try:
            ends = re.findall(rf"^{name}\.(\d+)\.jsonl$", "\n".join(os.listdir(self.path)), re.M)
        except OSError:
            ends = []
        numbers = sorted(map(int, ends)) if self._view.server else []
        return [self.path / f"{name}{part}.jsonl" for part in (*(f".{n}" for n in numbers), "")]

    def _read_log(self, log: list[LineFile]) -> int:
        """Reads a piece of the first file of a log that has unread lines; returns the number of
        lines."""
        lines = 0
        for file in log:
            lines += self._read_lines(file)
            if file.left:
                break
        return lines

    def _read_lines(self, file: LineFile) -> int:
        """Reads a piece of a file; returns the number of lines."""
        add = {"rounds": partial(self._view.add_round, file.path)}
        add |= {"metrics": self._view.add_metric, "held_out": self._view.add_held_out}
        add |= {"samples": self._view.add_sample}
        add |= {"events": self._view.add_event}
        before, lines = file.damaged, 0
        for line in file.read():
            lines += 1
            file.damaged += not add[file.path.name.partition(".")[0]](line)
        return lines + (file.damaged > before)

    def _read_record(self) -> bool:
        """Reads run.json or server.json; returns whether it has changed."""
        before = self._record
        for name in ("run.json", "server.json"):
            content = self._changed(name)
            if isinstance(content, dict):
                if name == "run.json" and _is_training(content):
                    self._record = content
                elif name == "server.json" and "backbone" in content:
                    self._record = {**content, "server": True, "tasks": {}}
        return self._record != before

    def _read_summary(self) -> bool:
        before = self._summary
        content = self._changed("summary.json")
        if isinstance(content, dict) and isinstance(content.get("tasks"), dict):
            self._summary = content
        elif self._summary is not None and not (self.path / "summary.json").exists():
            self._summary = None
            return True
        return self._summary != before

    def _read_statuses(self) -> bool:
        content = self._changed("tasks.json")
        if isinstance(content, dict) and isinstance(content.get("tasks"), dict):
            before, self._statuses = self._statuses, content
            return before != content
        return False

    def _read_refused(self) -> bool:
        content = self._changed("refused.json")
        entries = content.get("refused") if isinstance(content, dict) else None
        if isinstance(entries, list) and all(_is_refusal(entry) for entry in entries):
            before, self._refused = self._refused, content
            return before != content
        return False

    def _state(self) -> str:
        """The state of the run: "waiting" (it has not begun), "finished", "compiling" (it loads the
        backbone or compiles programs), "training", "idle" (a server has nothing to train),
        "stopped" (the process has ended), "failed" (an exception has ended the process), "lost"
        (the process was killed), or "unknown" (there is no lock)."""
        holder, view = self._holder, self._view
        if not self._record:
            return "waiting"
        if holder.holder == "alive":
            states = [task.row["state"] for task in view.tasks.values()]
            if view.server and not {"running", "preparing", "queued"} & set(states):
                return "idle"
            # Lines that are older than the process's lock were written by an earlier process.
            return "training" if view.worked > holder.since else "compiling"
        if self._summary:
            return "finished"
        ends = {"ended": "stopped", "failed": "failed", "killed": "lost"}
        return ends.get(holder.holder, "unknown")

    def _changed(self, name: str) -> Any:
        """The content of a JSON file if it has changed since the last call; None if it has not
        changed or cannot be read."""

        def is_new(status: os.stat_result) -> bool:
            seen = status.st_ino, status.st_mtime_ns, status.st_size
            before, self._seen[name] = self._seen.get(name), seen
            return seen != before

        return _read_json(self.path / name, is_new)

    def _run(self) -> dict[str, Any]:
        """The content of the page's head."""
        record, view = self._record, self._view
        shape = record.get("shape") or record.get("sizes") or {}
        counts = {file.path.name: file.damaged for file in self._files if file.damaged}
        return {
            "name": self.path.name,
            "path": str(self.path),
            "kind": "server" if view.server else "training" if record else "waiting",
            "backbone": Path(str(record.get("backbone", ""))).name,
            "format": record.get("backbone_format"),
            "shape": shape,
            "now": time.time(),
            "state": self._state(),
            "failure": None if self._summary else self._holder.failure,
            "trained": view.trained,
            "parts": view.time_parts(),
            "refused": self._refused.get("count", 0),
            "last": view.last,
            "damaged": counts,
            "unread": sum(file.left for file in self._files),
            "summary": self._summary and {k: v for k, v in self._summary.items() if k != "tasks"},
        }


def _read_json(path: Path, is_wanted: Callable[[os.stat_result], bool]) -> Any:
    """The content of a JSON file; None if the file is a link, too large, not wanted or damaged."""
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW), "rb") as file:
            status = os.fstat(file.fileno())
            return json.load(file) if status.st_size <= _MOST_RECORD and is_wanted(status) else None
    except (OSError, ValueError, RecursionError):
        return None


def _is_plain(path: Path) -> bool:
    """Whether the path is a regular file, and not a link, or does not exist."""
    try:
        return stat.S_ISREG(os.lstat(path).st_mode)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _is_training(content: dict[str, Any]) -> bool:
    tasks, sweeps = content.get("tasks"), content.get("sweeps") or {}
    if not (isinstance(tasks, dict) and isinstance(sweeps, dict)):
        return False
    return all(
        isinstance(task, dict) and isinstance(task.get("adapter"), dict) for task in tasks.values()
    ) and all(
        isinstance(sweep, dict) and isinstance(sweep.get("values"), dict)
        for sweep in sweeps.values()
    )


def _is_refusal(entry: Any) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("task", "error")
    )


def _is_record(path: Path) -> bool:
    return path.name in ("run.json", "server.json")
