"""A server in this process, driven through a random sequence of commands, faults and crashes.

Everything follows from a seed. The real engine trains tiny tasks, and `ServerModel` says after
every round what must be true. A crash copies the folder as it is between two system calls of the
server, damages the copy as a crash could, and starts a server on the copy.
"""

import json
import shutil
import threading
import time
from collections import deque
from pathlib import Path
from random import Random

from jaxmux.live.states import ENDED
from jaxmux.runs import tuning_server as tuning_server_module
from jaxmux.runs.server_options import ServerOptions
from jaxmux.runs.tuning_server import tuning_server
from jaxmux.tasks import TaskError

from . import crash_images
from .server_model import Expected, ServerModel, damaged_lines
from .simulated_disk import Crash, SimulatedDisk
from .simulated_tasks import EPOCHS_STEPS, KINDS, MOST_STEPS, OPTIONS, make_task

# Slots and rank of the pool; each pair costs a compilation.
POOLS = ((2, 4), (3, 4), (4, 8))
# How often an operation is chosen.
WEIGHTS = {
    "step": 30,
    "register": 16,
    "register_bad_data": 2,
    "register_slow_data": 2,
    "let_slow_data_go": 2,
    "replace_data": 1,
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


class Simulation:
    """A server, its model, and the disk between them.

    Attributes:
      history: the last operations, in words.
      operations: number of operations so far.
      said: the lines that the servers have said.
    """

    def __init__(
        self, seed, backbone, data, calm, adapter_bytes, folder, monkeypatch, meshes=("",)
    ):
        """Starts a server in an empty folder.

        Args:
          seed: an int or a text, from which everything follows.
          backbone: folder of the backbone.
          data: paths of records by name.
          calm: outcomes of calm tasks, for `ServerModel`.
          adapter_bytes: function that reads an adapter folder.
          folder: an empty folder for all files.
          monkeypatch: the fixture of pytest.
          meshes: the meshes on which servers are started; "" stands for one device.
        """
        self.random = Random(seed)
        self.history: deque[str] = deque(maxlen=40)
        self.operations = 0
        self._backbone, self._data, self._meshes = backbone, data, meshes
        self._adapter_bytes, self._files = adapter_bytes, folder
        self._model = ServerModel(calm)
        self._disk = SimulatedDisk(monkeypatch, folder)
        self._images = 0
        self._folder = folder / "server0"
        self.said: list[str] = []
        self._tears = 0
        # By task, the event that lets its data be read.
        self._slow: dict[str, threading.Event] = {}
        self._raises: set[str] = set()
        self._patch(monkeypatch)
        self._start()

    def run(self, operations: int) -> None:
        """Carries out random operations, and then lets everything come to its end.

        Args:
          operations: their number.
        """
        kinds, weights = list(WEIGHTS), list(WEIGHTS.values())
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
        self._model.check_end(self._live, self._folder, self._adapter_bytes)
        self._close()
        self._start()
        self._model.check_end(self._live, self._folder, self._adapter_bytes)
        self._close()
        assert damaged_lines(self._folder / "events.jsonl") <= self._tears

    def close(self) -> None:
        """Lets the server and its threads end, also after a failure."""
        self._disk.full = self._disk.slow = False
        self._disk.allowed = None
        for event in self._slow.values():
            event.set()
        self._close()

    def _patch(self, monkeypatch) -> None:
        """Puts seams around the preparation of data and the loading of the backbone."""
        prepare, load = tuning_server_module.prepare_task, tuning_server_module.load_on
        loaded = {}

        def prepare_slowly(task, **keywords):
            if waits := self._slow.get(task.name):
                waits.wait()
            if task.name in self._raises:
                raise RuntimeError("the source broke down")
            return prepare(task, **keywords)

        def load_once(deployment, *arguments):
            if str(deployment) not in loaded:
                loaded[str(deployment)] = load(deployment, *arguments)
            return loaded[str(deployment)]

        monkeypatch.setattr(tuning_server_module, "prepare_task", prepare_slowly)
        monkeypatch.setattr(tuning_server_module, "load_on", load_once)

    def _start(self) -> None:
        self._slots, rank = self.random.choice(POOLS)
        sizes = {
            "reserved_slots": self._slots,
            "reserved_rank": rank,
            "checkpoint_every": self.random.choice((1, 2, 3, 5, 20)),
            "keep_checkpoints": self.random.choice((2, 3)),
        }
        if mesh := self.random.choice(self._meshes):
            sizes["mesh"] = mesh
        self._note(f"start with {sizes}")
        options = ServerOptions(**OPTIONS | sizes)
        self._context = tuning_server(self._backbone, self._folder, options, say=self.said.append)
        self._live = self._context.__enter__()
        tell = self._live._store.tell
        self._live._store.tell = lambda event: (self._model.take_event(event), tell(event))
        self._model.lost |= self._disk.lost
        self._model.begin_server(self._live)
        self._model.check(self._live, self._slots)

    def _close(self) -> None:
        """Lets the present server end. Nothing is saved, because nobody runs `LiveTraining.run`."""
        context, self._context = self._context, None
        if context:
            context.__exit__(None, None, None)

    # Operations. Each is chosen by its name without the underscore.

    def _step(self) -> None:
        self._idle()
        self._live.step()
        self._model.lost |= self._disk.lost
        self._idle()
        self._model.check(self._live, self._slots)

    def _register(self, kind=None, **expected) -> str:
        waiting = [s for s in self._live.statuses() if s.state not in ENDED]
        if len(waiting) >= MOST_LIVE:
            return self._step() or ""
        kind = kind or self.random.choice([kind for kind in KINDS if kind != "replaced"])
        name = f"t{len(self._model.tasks)}"
        steps = EPOCHS_STEPS if kind == "epochs" else self.random.randint(1, MOST_STEPS - 2)
        path = self._data[KINDS[kind][0]]
        if expected.pop("own_data", False):
            path = shutil.copy(path, self._files / f"{name}.jsonl")
        self._raises.discard(name)
        if problem := expected.get("problem"):
            path = self._bad_data(problem, name)
        own = Expected(kind, steps, self.random.randrange(3), **expected)
        task = make_task(kind, name, steps, str(path))
        self._command("register", name, own, task, own.priority)
        return name

    def _bad_data(self, problem: str, name: str) -> str:
        path = self._files / f"{name}.jsonl"
        if problem == "broke down":
            self._raises.add(name)
            return self._data["short"]
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
        name = self._register("adamw", own_data=True)
        for _ in range(self.random.randrange(4)):
            self._step()
        if name in self._model.tasks:
            shutil.copy(self._data[KINDS["replaced"][0]], self._files / f"{name}.jsonl")
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
        name = self._any_task()
        known = self._model.tasks[name].steps if name in self._model.tasks else 1
        steps = self.random.randint(max(1, known - 1), MOST_STEPS)
        self._command("extend", name, steps, steps)

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
        """Crashes while commands are written: those whose lines are complete are carried out."""
        wanted = [("set_priority", self._any_task(), self.random.randrange(4)) for _ in range(2)]
        wanted.append(("pause", self._any_task(), None))
        distinct = {name: (kind, name, value) for kind, name, value in wanted}
        permitted = []
        for kind, name, value in distinct.values():
            if not self._model.refuses(kind, name, value, self._status(name)):
                permitted.append((kind, name, value))
                getattr(self._live, kind)(name, *([] if value is None else [value]))
        journal = self._live._store._journal
        before = journal._length
        self._disk.allowed = self.random.randrange(400)
        if not permitted or journal._file < 0:
            self._disk.allowed = None
            return self._crash()
        try:
            self._live.step()
            raise AssertionError("the journal was not written")
        except Crash:
            pass
        finally:
            self._disk.allowed = None
        segment = self._folder / "journal" / f"{self._live._store._number}.jsonl"
        written = segment.read_bytes()[before:].count(b"\n")
        for kind, name, value in permitted[:written]:
            self._model.carry_out(kind, name, value)
        self._note(f"{written} of {permitted} were written")
        self._crash()

    def _restart(self) -> None:
        """Ends and starts the server as one should."""
        self._disk.slow = False
        self._idle()
        self._live.save()
        self._close()
        saved = {} if self._disk.full else {s.name: s.step for s in self._live.statuses()}
        self._let_all_slow_data_go()
        self._disk.full = False
        self._start()
        for name, step in saved.items():
            assert self._live.status(name).step == step, (self._live.status(name), step)

    def _crash(self) -> None:
        """Goes on with an image of the folder as it is now, damaged as a crash could damage it."""
        self._idle()
        self._images += 1
        image = self._files / f"server{self._images}"
        shutil.copytree(self._folder, image)
        unsynced = self._disk.unsynced(self._folder)
        self._disk.slow = self._disk.full = False
        self._let_all_slow_data_go()
        self._close()
        damaged = self._damage(image, unsynced)
        shutil.rmtree(self._folder)
        self._folder, said = image, len(self.said)
        self._disk.sync(image)
        self._start()
        if damaged:
            assert any("is damaged" in line for line in self.said[said:]), damaged
        numbers = crash_images.checkpoint_numbers(image)
        for name, step in self._disk.steps.get(max(numbers, default=-1), {}).items():
            assert self._live.status(name).step == step, (self._live.status(name), step)

    def _damage(self, image: Path, unsynced) -> list[str]:
        """Damages an image; returns what newest checkpoints were damaged."""
        random, damaged = self.random, []
        checkpoints, numbers = image / "checkpoints", crash_images.checkpoint_numbers(image)
        if random.random() < 0.5:
            crash_images.lose_power(random, image, self._folder, unsynced)
        if random.random() < 0.4:
            self._tear_events(image / "events.jsonl")
        if random.random() < 0.3 and checkpoints.is_dir():
            number = max(numbers, default=0) + 1
            crash_images.leave_unfinished_checkpoint(random, checkpoints, number)
        replaceable = len(numbers) > 1 or (numbers and (image / "journal" / "0.jsonl").exists())
        if random.random() < 0.3 and replaceable:
            newest = checkpoints / str(numbers[-1])
            arrays = sorted(path for path in newest.iterdir() if path.name.startswith("task."))
            if arrays and random.random() < 0.5:
                shutil.rmtree(random.choice(arrays))
            else:
                crash_images.torn(random, newest / "run" / "metadata")
                (newest / "run" / "metadata").write_bytes(b"{")
            damaged.append(str(newest))
        self._note(f"damaged: {damaged}")
        return damaged

    def _tear_events(self, path: Path) -> None:
        content = path.read_bytes()
        end = self.random.randrange(max(0, len(content) - 400), len(content) + 1)
        path.write_bytes(content[:end])
        self._tears += 1
        begin = content.rfind(b"\n", 0, end) + 1
        for line in content[begin:].splitlines():
            try:
                self._model.lost.add(json.loads(line)["task"])
            except (ValueError, TypeError):
                pass

    # Helpers.

    def _note(self, text: str) -> None:
        self.history.append(f"{self.operations}: {text}")

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

    def _command(self, kind: str, name: str, value=None, *arguments) -> None:
        """Gives a command, trains a round, and compares the answer with the model's."""
        self._note(f"{kind} {name} {value}")
        refused = self._model.refuses(kind, name, value, self._status(name))
        given = arguments if kind == "register" else (name, *arguments)
        full = self._disk.full
        future = getattr(self._live, kind)(*given)
        self._live._carry_out(self._live._commands.take())
        error = future.exception(timeout=0)
        if refused:
            assert isinstance(error, TaskError), (kind, name, value, error)
        elif error:
            assert full and isinstance(error, OSError), (kind, name, value, error)
        else:
            self._model.carry_out(kind, name, value)
        if self.random.random() < 0.5:
            self._step()

    def _let_all_slow_data_go(self) -> None:
        for event in self._slow.values():
            event.set()
        self._slow.clear()

    def _idle(self) -> None:
        """Waits for threads, but not for those that are slow on purpose."""
        preparation = self._live._preparation
        while True:
            with preparation._lock:
                active = {task.name for task, _ in preparation._active.values()}
            if active <= self._slow.keys():
                break
            time.sleep(0.0005)
        if not self._disk.slow:
            self._live._store._writer.submit(lambda: None).result()
