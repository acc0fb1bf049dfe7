"""A server in this process, whose crashes and restarts are simulated."""

import functools
import shutil
import sqlite3
import threading
import time
from collections import deque
from contextlib import closing, suppress
from pathlib import Path
from random import Random

from jaxmux.engine import EngineSize
from jaxmux.server import LiveTraining, saving, server, store
from jaxmux.server.folder import DATABASE
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.task import ENDED

from . import crash_images
from .server_model import ServerModel
from .simulated_disk import Crash, SimulatedDisk
from .simulated_tasks import OPTIONS

# Slots and rank of the pool; each pair costs a compilation. Another rank changes the last bits.
POOLS = ((2, 4), (3, 4))
POOLS_OF_ALL_RANKS = ((3, 4), (2, 8))
# It begins with a slot and a row, and grows to all slots and two rows.
ELASTIC_POOLS = ((3, 4),)


class SimulatedServer:
    """A server, its model, and the disk between them.

    Attributes:
      history: the last operations, in words.
      operations: number of operations so far.
      said: the lines that the servers have said.
      started: the meshes on which servers were started.
      sizes: the sizes that the engine has had.
    """

    def __init__(
        self,
        seed,
        backbone,
        data,
        calm,
        adapter_bytes,
        folder,
        monkeypatch,
        *,
        pools=POOLS,
        meshes=("",),
        elastic=False,
        same_bits=True,
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
          pools: slots and rank of the pools with which servers are started.
          meshes: the meshes on which servers are started; "" stands for one device.
          elastic: whether servers grow and shrink with their load.
          same_bits: whether adapters have to equal those of calm tasks to the last bit.
        """
        self.random = Random(seed)
        self.history: deque[str] = deque(maxlen=40)
        self.operations = 0
        self._backbone, self._data = backbone, data
        self._pools, self._meshes, self._elastic = pools, meshes, elastic
        self._adapter_bytes, self._files = adapter_bytes, folder
        same_chunks = not any("dp" in mesh for mesh in meshes)
        whole_turns = not any(meshes)
        self._model = ServerModel(calm, same_bits, same_chunks, whole_turns)
        self._disk = SimulatedDisk(monkeypatch, folder)
        self._images = 0
        self._folder = folder / "server0"
        self.said: list[str] = []
        self.started: set[str] = set()
        self.sizes: set[EngineSize] = set()
        # Each mesh comes once before one comes again.
        self._next_meshes: list[str] = []
        self._tears = 0
        # By task, the event that lets its data be read.
        self._slow: dict[str, threading.Event] = {}
        self._raises: set[str] = set()
        # The tasks whose slow data have begun to be read.
        self._reading: set[str] = set()
        self._patch(monkeypatch)
        self._start()

    def close(self) -> None:
        """Lets the server and its threads end, also after a failure."""
        self._disk.full = self._disk.slow = False
        self._disk.crash = None
        for event in self._slow.values():
            event.set()
        self._close()

    def _patch(self, monkeypatch) -> None:
        """Puts seams around the preparation of data and the loading of the backbone."""
        prepare, load = server.prepare_task, server.load_on
        loaded = {}

        def prepare_slowly(task, **keywords):
            if waits := self._slow.get(task.name):
                self._reading.add(task.name)
                waits.wait()
            if task.name in self._raises:
                raise RuntimeError("the source broke down")
            return prepare(task, **keywords)

        def load_once(deployment, *arguments):
            if str(deployment) not in loaded:
                loaded[str(deployment)] = load(deployment, *arguments)
            return loaded[str(deployment)]

        # After fewer rounds than usual, so that it happens in a simulation.
        soon_smaller = functools.partial(LiveTraining, quiet_rounds=4)
        # What could not be written is tried again without a wait.
        for seconds in ("_FIRST_WAIT", "_LONGEST_WAIT"):
            monkeypatch.setattr(store, seconds, 0.0)
        # What tasks have used is written after every round.
        monkeypatch.setattr(saving, "_USE_EVERY", 0.0)
        monkeypatch.setattr(server, "LiveTraining", soon_smaller)
        monkeypatch.setattr(server, "prepare_task", prepare_slowly)
        monkeypatch.setattr(server, "load_on", load_once)

    def _start(self) -> None:
        self._slots, rank = self.random.choice(self._pools)
        sizes = {
            "reserved_slots": self._slots,
            "reserved_rank": rank,
            "checkpoint_every": self.random.choice((1, 2, 3, 5, 20)),
            "keep_checkpoints": self.random.choice((2, 3)),
        }
        if not self._next_meshes:
            self._next_meshes = self.random.sample(self._meshes, len(self._meshes))
        if mesh := self._next_meshes.pop():
            sizes["mesh"] = mesh
        self.started.add(mesh)
        if self._elastic:
            sizes["elastic"] = True
        self._note(f"start with {sizes}")
        options = ServerOptions(**OPTIONS | sizes)
        self._context = tuning_server(self._backbone, self._folder, options, say=self.said.append)
        self._live = self._context.__enter__()
        tell = self._live._store.tell
        self._live._store.tell = lambda event: (self._model.take_event(event), tell(event))
        self._model.begin_server(self._live)
        write = self._live._saving.write

        def write_and_note(*commanded):
            write(*commanded)
            self._model.note_written(self._live)

        self._live._saving.write = write_and_note
        self._model.check(self._live, self._slots, self._elastic)

    def _close(self) -> None:
        """Lets the present server end without saving anything."""
        context, self._context = self._context, None
        if context:
            self._model.end_without_saving(self._live)
            with suppress(Crash):
                context.__exit__(Crash, Crash(), None)

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
        image = crash_images.copy_now(self._folder, self._files / f"server{self._images}")
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
        steps = self._disk.steps.get(max(numbers, default=-1), {})
        for own in self._live._tasks:
            # A task may have ended after the checkpoint.
            if own.key in steps and not own.ended:
                assert own.status().step == steps[own.key], (own, steps)

    def _damage(self, image: Path, unsynced) -> list[str]:
        """Damages an image; returns what newest checkpoints were damaged."""
        # The files differ a little each time, and with them how many numbers are drawn.
        random, damaged = Random(self.random.random()), []
        checkpoints, numbers = image / "checkpoints", crash_images.checkpoint_numbers(image)
        if random.random() < 0.5:
            crash_images.lose_power(random, image, self._folder, unsynced)
        if random.random() < 0.4:
            self._tear_events(random, image / "events.jsonl")
        if random.random() < 0.3 and checkpoints.is_dir():
            number = max(numbers, default=0) + 1
            crash_images.leave_unfinished_checkpoint(random, checkpoints, number)
        begins_anew = self._live._store._count < self._live._store._keep
        replaceable = len(numbers) > 1 or (numbers and begins_anew)
        if random.random() < 0.3 and replaceable:
            newest = checkpoints / str(numbers[-1])
            if (newest / "tasks").exists() and random.random() < 0.5:
                shutil.rmtree(newest / "tasks")
                is_read = self._has_going_tasks(image, numbers[-1])
            else:
                crash_images.torn(random, newest / "run" / "metadata")
                (newest / "run" / "metadata").write_bytes(b"{")
                is_read = True
            damaged += [str(newest)] if is_read else []
        self._note(f"damaged: {damaged}")
        return damaged

    def _has_going_tasks(self, image: Path, checkpoint: int) -> bool:
        """Whether a task of a checkpoint goes on by the table, so that its arrays are read."""
        with closing(sqlite3.connect(image / DATABASE)) as database:
            rows = database.execute("SELECT key, state FROM tasks").fetchall()
        going = {key for key, state in rows if state not in ENDED}
        return not going.isdisjoint(self._disk.steps.get(checkpoint, {}))

    def _tear_events(self, random: Random, path: Path) -> None:
        content = path.read_bytes()
        end = random.randrange(max(0, len(content) - 400), len(content) + 1)
        path.write_bytes(content[:end])
        self._tears += 1

    def _note(self, text: str) -> None:
        self.history.append(f"{self.operations}: {text}")

    def _let_all_slow_data_go(self) -> None:
        for event in self._slow.values():
            event.set()
        self._slow.clear()

    def _begun_reading(self, name: str) -> None:
        """Waits until slow data are about to be read."""
        while name not in self._reading:
            time.sleep(0.0005)

    def _idle(self) -> None:
        """Waits for threads, but not for those that are slow on purpose."""
        preparation = self._live._preparation
        while True:
            with preparation._lock:
                active = {reading.task.name for reading in preparation._active}
            if active <= self._slow.keys():
                break
            time.sleep(0.0005)
        if not self._disk.slow:
            self._live._store._writer.submit(lambda: None).result()
        if (size := self._live._size) and (ahead := size._ahead):
            while not ahead.ready:
                time.sleep(0.0005)
