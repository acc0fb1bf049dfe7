"""A server in this process, driven through a random sequence of commands, faults and crashes.

Everything follows from a seed. The real engine trains tiny tasks, and `ServerModel` says after
every round what must be true. A crash copies the folder as it is between two system calls of the
server, damages the copy as a crash could, and starts a server on the copy.
"""

import shutil
import threading
from collections.abc import Mapping

from jaxmux.server.task import ENDED
from jaxmux.tasks import TaskError

from .server_model import Expected, damaged_lines
from .simulated_disk import Crash
from .simulated_server import SimulatedServer
from .simulated_tasks import EPOCHS_STEPS, KINDS, MOST_STEPS, Outcome, make_task, train_calmly

# How often an operation is chosen.
WEIGHTS = {
    "step": 30,
    "register": 16,
    "register_bad_data": 2,
    "register_slow_data": 2,
    "let_slow_data_go": 2,
    "replace_data": 2,
    "cancel": 3,
    "pause": 8,
    "resume": 9,
    "set_priority": 8,
    "extend": 6,
    "command_for_nobody": 1,
    "full_disk": 3,
    "slow_disk": 3,
    "crash": 2,
    "crash_in_command": 1,
    "restart": 1,
}
MOST_LIVE = 12


class Simulation(SimulatedServer):
    """Drives a server through random operations."""

    def run(self, operations: int, weights: Mapping[str, int] = WEIGHTS) -> None:
        """Carries out random operations, and then lets everything come to its end.

        Args:
          operations: their number.
          weights: how often each kind of operation is chosen.
        """
        kinds, weights = list(weights), list(weights.values())
        for _ in range(operations):
            self.operations += 1
            kind = self.random.choices(kinds, weights)[0]
            self._note(kind)
            getattr(self, f"_{kind}")()
        self.finish()

    def finish(self) -> None:
        """Ends all faults, resumes all tasks, trains to the end and compares the results."""
        self._note("finish")
        self._disk.full = self._disk.slow = False
        for name in list(self._slow):
            self._slow.pop(name).set()
        for name, own in self._model.tasks.items():
            if own.paused and self._live.status(name).state == "paused":
                self._command("resume", name)
        for _ in range(2000):
            self._step()
            if all(status.state in ENDED for status in self._live.statuses()):
                break
        else:
            raise AssertionError(self._live.statuses())
        self._idle()
        self._live.save()
        self._idle()
        alone = self._train_calmly(self._model.names_of_calm_run(self._live))
        self._model.check_end(self._live, self._folder, self._adapter_bytes, alone)
        self._close()
        self._start()
        self._model.check_end(self._live, self._folder, self._adapter_bytes, alone)
        self._close()
        assert damaged_lines(self._folder) <= self._tears

    # Operations. Each is chosen by its name without the underscore.

    def _step(self) -> None:
        self._idle()
        self._live.step()
        self.sizes.add(self._live._engine.size)
        self._idle()
        self._model.check(self._live, self._slots, self._elastic)

    def _register(self, kind=None, then=None, **expected) -> str:
        waiting = [s for s in self._live.statuses() if s.state not in ENDED]
        if len(waiting) >= MOST_LIVE:
            return self._step() or ""
        kind = kind or self.random.choice(list(KINDS))
        name = f"t{len(self._model.tasks)}"
        steps = EPOCHS_STEPS if kind == "epochs" else self.random.randint(1, MOST_STEPS - 2)
        path = None
        self._raises.discard(name)
        if expected.pop("own_data", False):
            path = shutil.copy(self._data[KINDS[kind].data], self._files / f"{name}.jsonl")
        elif problem := expected.get("problem"):
            path = self._bad_data(problem, name)
        own = Expected(kind, steps, self.random.randrange(3), **expected)
        task = make_task(kind, name, steps, self._data, path)
        self._command("register", name, own, task, own.priority, then=then)
        return name

    def _bad_data(self, problem: str, name: str) -> str | None:
        path = self._files / f"{name}.jsonl"
        if problem == "broke down":
            self._raises.add(name)
            return None
        # An earlier registration of this name may have been refused.
        path.unlink(missing_ok=True)
        if problem == "JSON":
            path.write_text('{"prompt": "apple", "completion": " red"}\n{"prompt": "pl')
        return str(path)

    def _register_bad_data(self) -> None:
        self._register("adamw", problem=self.random.choice(("JSON", "not found", "broke down")))

    def _register_slow_data(self) -> None:
        if len(self._slow) < 2:
            name = f"t{len(self._model.tasks)}"
            self._slow[name] = threading.Event()
            if self._register("sgd") != name or name not in self._model.tasks:
                self._slow.pop(name, threading.Event()).set()

    def _let_slow_data_go(self) -> None:
        if self._slow:
            self._slow.pop(self.random.choice(sorted(self._slow))).set()
        self._idle()

    def _replace_data(self) -> None:
        name = f"t{len(self._model.tasks)}"
        when = self.random.choice(("before they are read", "while they are read", "later"))
        self._note(f"{name}: data replaced {when}")

        def replace():
            # A file of another size; the kind "adamw" has short data.
            shutil.copy(self._data["long"], self._files / f"{name}.jsonl")

        changed = {"own_data": True, "problem": "changed after the task was registered"}
        if when == "before they are read":
            self._register("adamw", then=replace, **changed)
        elif when == "while they are read":
            self._slow[name] = threading.Event()
            if self._register("adamw", **changed) == name and name in self._model.tasks:
                self._begun_reading(name)
                replace()
            self._slow.pop(name).set()
        elif self._register("adamw", own_data=True) == name:
            for _ in range(self.random.randrange(4)):
                self._step()
            # They have been read. They are read again if the server is started again.
            self._idle()
            if name in self._model.tasks:
                replace()
                self._model.tasks[name].data_replaced = True

    def _cancel(self) -> None:
        self._command("cancel", self._any_task())

    def _pause(self) -> None:
        self._command("pause", self._any_task())

    def _resume(self) -> None:
        paused = [n for n, own in self._model.tasks.items() if own.paused and not own.cancelled]
        self._command("resume", self.random.choice(paused) if paused else self._any_task())

    def _set_priority(self) -> None:
        priority = self.random.randrange(4)
        self._command("set_priority", self._any_task(), priority, priority)

    def _extend(self) -> None:
        # Often one whose learning rates tell when it was extended, and then often before a crash.
        names = [status.name for status in self._live.statuses() if status.state == "running"]
        decaying = [name for name in names if self._model.tasks[name].kind == "cosine"]
        if decaying and self.random.random() < 0.7:
            name = self.random.choice(decaying)
        else:
            decaying, name = [], self._any_task()
        known = self._model.tasks[name].steps if name in self._model.tasks else 1
        steps = self.random.randint(max(1, known - 1), MOST_STEPS)
        self._command("extend", name, steps, steps)
        if decaying and self.random.random() < 0.5:
            self._crash()

    def _command_for_nobody(self) -> None:
        self._command("cancel", "nobody")

    def _full_disk(self) -> None:
        self._disk.full = False if self._disk.full else self.random.choice((True, "partly"))
        self._tears += self._disk.full == "partly"
        self._note(f"full: {self._disk.full}")

    def _slow_disk(self) -> None:
        self._disk.slow = not self._disk.slow
        self._note(f"slow: {self._disk.slow}")
        self._idle()

    def _crash_in_command(self) -> None:
        """Crashes before or after the transaction of commands: none or all of them hold."""
        wanted = [("set_priority", self._any_task(), self.random.randrange(4)) for _ in range(2)]
        wanted.append(("pause", self._any_task(), None))
        distinct = {name: (kind, name, value) for kind, name, value in wanted}
        permitted = []
        for kind, name, value in distinct.values():
            if not self._model.refuses(kind, name, value, self._status(name)):
                permitted.append((kind, name, value))
                getattr(self._live, kind)(name, *([] if value is None else [value]))
        if not permitted:
            return self._crash()
        self._disk.crash = self.random.choice(("before", "after"))
        written = self._disk.crash == "after" and not self._disk.full
        try:
            self._live._runner.carry_out()
            crashed = False
        except Crash:
            crashed = True
        self._disk.crash = None
        if crashed and written:
            self._model.note_written(self._live)
            for kind, name, value in permitted:
                self._model.carry_out(kind, name, value)
        self._note(f"{permitted} were {'' if written else 'not '}written")
        self._crash()

    # Helpers.

    def _train_calmly(self, names: list[str]) -> dict[str, Outcome]:
        """What becomes of tasks on a server of their own, by name."""
        tasks = {}
        for name in names:
            own = self._model.tasks[name]
            tasks[name] = make_task(own.kind, name, own.steps, self._data)
        folder = self._files / "calm"
        return train_calmly(self._backbone, tasks, folder, self._adapter_bytes) if tasks else {}

    def _any_task(self) -> str:
        """Name of a task, mostly of one that has not ended."""
        statuses = self._live.statuses()
        alive = [status.name for status in statuses if status.state not in ENDED]
        if alive and self.random.random() < 0.95:
            return self.random.choice(alive)
        return self.random.choice([status.name for status in statuses] or ["nobody"])

    def _status(self, name: str):
        try:
            return self._live.status(name)
        except TaskError:
            return None

    def _command(self, kind: str, name: str, value=None, *arguments, then=None) -> None:
        """Gives a command, calls a function, trains a round, and compares the answer with the
        model's."""
        self._note(f"{kind} {name} {value}")
        refused = self._model.refuses(kind, name, value, self._status(name))
        given = arguments if kind == "register" else (name, *arguments)
        full = self._disk.full
        future = getattr(self._live, kind)(*given)
        if then:
            then()
        self._live._runner.carry_out()
        error = future.exception(timeout=0)
        if refused:
            assert isinstance(error, TaskError), (kind, name, value, error)
        elif error:
            assert full and isinstance(error, OSError), (kind, name, value, error)
        else:
            self._model.carry_out(kind, name, value)
        if self.random.random() < 0.5:
            self._step()
