"""A watched directory: its files say what is wanted, and status files tell what became of it."""

import json
import os
import shutil
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from jaxmux import AdamW, LoRA
from jaxmux.runs import ServerOptions, TenantLimits
from jaxmux.runs.directory_watcher import DirectoryWatcher
from jaxmux.runs.server import tuning_server
from jaxmux.runs.watched_directory import Place, WatchedDirectory

from .conftest import POOL, RUN

OPTIONS = ServerOptions(
    **RUN,
    **POOL,
    reserved_slots=2,
    checkpoint_every=2,
    keep_checkpoints=2,
)
ADAPTER = {"kind": "lora", "rank": 2, "target_modules": ["q_proj", "down_proj"]}
ENDED = ("succeeded", "failed", "cancelled")


class Server:
    """A server that watches `inbox`, one poll and one round at a time."""

    def __init__(self, live, watcher, inbox: Path, folder: Path, said: list[str]):
        self.live, self.watcher, self.inbox, self.folder = live, watcher, inbox, folder
        self.said = said

    def poll(self, times: int = 1) -> None:
        for _ in range(times):
            self.watcher.poll()
            self.live.step()
            while self.live._preparation.seconds_left is not None:
                time.sleep(0.001)

    def poll_until(self, condition) -> None:
        for _ in range(500):
            if condition():
                return
            self.poll()
            time.sleep(0.005)  # adapters and checkpoints are written meanwhile
        raise AssertionError([self.live.statuses(), self.said])

    def status(self, place: str) -> dict:
        return json.loads((self.inbox / f"{place}.status.json").read_text())

    def state(self, place: str) -> str | None:
        path = self.inbox / f"{place}.status.json"
        return self.status(place)["state"] if path.is_file() else None

    def until(self, place: str, *states: str) -> dict:
        self.poll_until(lambda: self.state(place) in states)
        return self.status(place)


@pytest.fixture(scope="module")
def watch(backbone):
    """Opens a server that watches `tmp/inbox` with the folder `tmp/server`."""

    @contextmanager
    def open_server(tmp: Path, **limits):
        said: list[str] = []
        inbox, folder = tmp / "inbox", tmp / "server"
        limits = TenantLimits(**limits)
        known = folder.exists()
        directory = WatchedDirectory(inbox, limits, known)
        directory.begin()
        try:
            with tuning_server(backbone, folder, OPTIONS, say=said.append) as live:
                watcher = DirectoryWatcher(directory, live, folder, limits, said.append, every=0)
                yield Server(live, watcher, inbox, folder, said)
                live.save(wait=True)
        finally:
            directory.close()

    return open_server


@pytest.fixture
def put(tmp_path, data):
    """Writes a specification, and the data of its tenant."""

    def write(place: str, **fields) -> Path:
        path = tmp_path / "inbox" / f"{place}.json"
        (path.parent / "data").mkdir(parents=True, exist_ok=True)
        for name in ("short", "long"):
            if not (path.parent / "data" / f"{name}.jsonl").exists():
                shutil.copy(data[name], path.parent / "data" / f"{name}.jsonl")
        defaults = {
            "name": path.stem,
            "data": "data/short.jsonl",
            "batch_size": 4,
            "adapter": ADAPTER,
        }
        if "epochs" not in fields:
            defaults["steps"] = 3
        path.write_text(json.dumps(defaults | fields))
        return path

    return write


def test_a_task_from_a_file_gets_the_adapter_of_the_same_task_from_python(
    watch, put, tmp_path, backbone, make_task, adapter_bytes
):
    put("acme/one", steps=4)
    with watch(tmp_path) as server:
        status = server.until("acme/one", "succeeded")
        server.poll_until(lambda: server.status("acme/one")["adapter"])
        folder = Path(server.status("acme/one")["adapter"])
    assert (status["task"], status["step"], status["steps"]) == ("acme.one", 4, 4)
    assert [change["state"] for change in status["history"]] == [
        *("preparing", "queued", "running", "succeeded")
    ]
    assert status["meter"]["effective_tokens"] > 0 and status["error"] is None
    adapter = LoRA(rank=2, target_modules=("q_proj", "down_proj"))
    with tuning_server(backbone, tmp_path / "python", OPTIONS) as live:
        live.register(make_task("same", steps=4, adapter=adapter, optimizer=AdamW()))
        while not live.statuses() or live.statuses()[0].state != "succeeded":
            live.step()
    assert adapter_bytes(folder) == adapter_bytes(tmp_path / "python" / "adapters" / "same")


def test_a_file_that_is_still_written_is_not_taken_for_broken(watch, put, tmp_path):
    path = put("acme/one")
    text = path.read_text()
    with watch(tmp_path) as server:
        for end in range(10, 60, 10):
            path.write_text(text[:end])
            server.poll()
        path.write_text(text)
        assert server.state("acme/one") is None
        server.until("acme/one", "succeeded")
    assert not any("refused" in line for line in server.said)


def test_data_that_are_still_written_are_waited_for(watch, put, tmp_path):
    put("acme/one", batch_size=1, epochs=1)
    data = tmp_path / "inbox" / "acme" / "data" / "short.jsonl"
    lines = data.read_text().splitlines(keepends=True)
    with watch(tmp_path) as server:
        for count in range(1, len(lines) + 1):
            data.write_text("".join(lines[:count]))
            server.poll()
        assert server.until("acme/one", "succeeded")["steps"] == len(lines)


def test_data_that_come_after_the_specification_are_noticed(watch, put, tmp_path):
    put("acme/one", data="data/later.jsonl")
    with watch(tmp_path) as server:
        error = server.until("acme/one", "refused")["error"]
        assert error == (
            "one.json: data: 'data/later.jsonl' cannot be opened (No such file or directory)"
        )
        server.poll(3)
        folder = tmp_path / "inbox" / "acme" / "data"
        shutil.copy(folder / "short.jsonl", folder / "later.jsonl")
        server.until("acme/one", "succeeded")


def test_a_task_that_fails_is_told_of_its_own_files(watch, put, tmp_path):
    path = put("acme/one", data="data/bad.jsonl")
    (path.parent / "data" / "bad.jsonl").write_text('{"prompt": "no completion"}\n')
    with watch(tmp_path) as server:
        status = server.until("acme/one", "failed")
        found = "task 'acme.one': data/bad.jsonl:1: the fields fit no record form"
        assert status["reason"].startswith(found)
        assert status["history"][-1]["reason"] == status["reason"]


def test_a_mended_specification_is_taken_in(watch, put, tmp_path):
    put("acme/one", priority=1000)
    with watch(tmp_path) as server:
        assert server.until("acme/one", "refused")["error"] == (
            "one.json: priority should be an integer of at least -100 and of at most 100, "
            "found 1000"
        )
        put("acme/one", priority=7)
        assert server.until("acme/one", "succeeded")["priority"] == 7
    assert len([line for line in server.said if "refused" in line]) == 1


def test_changes_of_a_file_become_commands(watch, put, tmp_path):
    put("acme/one", steps=400)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        put("acme/one", steps=400, priority=3)
        server.poll_until(lambda: server.status("acme/one")["priority"] == 3)
        put("acme/one", steps=400, priority=3, paused=True)
        step = server.until("acme/one", "paused")["step"]
        server.poll(3)
        assert server.status("acme/one")["step"] == step
        put("acme/one", steps=step + 450, priority=3)
        server.until("acme/one", "running")
        server.poll_until(lambda: server.status("acme/one")["steps"] == step + 450)
        put("acme/one", steps=step + 451, priority=3)
        server.poll_until(lambda: server.status("acme/one")["steps"] == step + 451)
        assert server.status("acme/one")["error"] is None


REFUSED_CHANGES = {
    "fewer steps": ({"steps": 100}, "steps should be at least 400, as registered, found 100"),
    "another rank": (
        {"steps": 400, "adapter": ADAPTER | {"rank": 3}},
        "adapter.rank cannot change from 2 to 3 once the task is registered; nothing was changed",
    ),
    "epochs": (
        {"epochs": 90},
        "epochs cannot change to 90 once the task is registered; give a larger number of steps "
        "instead",
    ),
    "no JSON": (None, "is no JSON: Expecting property name enclosed in double quotes, line 1, "),
}


def test_other_changes_are_refused_and_change_nothing(watch, put, tmp_path):
    path = put("acme/one", steps=400)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        for fields, expected in REFUSED_CHANGES.values():
            if fields is None:
                path.write_text("{")
            else:
                put("acme/one", priority=5, **fields)
            server.poll_until(lambda: server.status("acme/one")["error"])
            status = server.status("acme/one")
            assert status["error"].startswith(f"one.json: {expected}")
            assert (status["state"], status["priority"], status["steps"]) == ("running", 0, 400)
            put("acme/one", steps=400)
            server.poll_until(lambda: server.status("acme/one")["error"] is None)


def test_a_deleted_file_cancels_and_one_that_is_missing_for_a_moment_does_not(watch, put, tmp_path):
    path = put("acme/one", steps=400)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        path.rename(path.with_suffix(".bak"))
        server.poll()
        path.with_suffix(".bak").rename(path)
        server.poll(4)
        assert server.state("acme/one") == "running"
        path.unlink()
        assert server.until("acme/one", "cancelled")["step"] > 0
        assert not (server.folder / "inputs" / "acme.one").exists()
        # The name belongs to the task that has ended.
        put("acme/one", steps=500)
        server.poll_until(lambda: server.status("acme/one")["error"])
        assert server.status("acme/one")["error"] == (
            "one.json: has ended (cancelled); give the file and the task another name"
        )


def test_the_status_of_a_refused_file_goes_with_it(watch, put, tmp_path):
    path = put("acme/one", steps=0)
    with watch(tmp_path) as server:
        server.until("acme/one", "refused")
        path.unlink()
        server.poll_until(lambda: server.state("acme/one") is None)


def test_waiting_tasks_are_told_their_place(watch, put, tmp_path):
    for name in "abcd":
        put(f"acme/{name}", steps=400)
    put("beta/e", steps=400, priority=-1)
    with watch(tmp_path) as server:
        server.poll_until(lambda: server.state("beta/e") == "queued")
        server.poll(2)
        places = {p: server.status(p)["place_in_queue"] for p in ("acme/c", "acme/d", "beta/e")}
        assert places["beta/e"] == 3 and sorted(places.values()) == [1, 2, 3]
        # It may have begun before the data of the others were read.
        reason = server.status("beta/e")["reason"]
        assert reason.endswith("all 2 places are taken") and "acme" not in reason


def test_the_tenant_cannot_reach_the_data_of_an_accepted_task(watch, put, tmp_path):
    put("acme/one", steps=12)
    with watch(tmp_path) as server:
        server.until("acme/one", "preparing", "queued", "running")
        shutil.rmtree(tmp_path / "inbox" / "acme" / "data")
        server.poll_until(lambda: server.state("acme/one") == "running")
        server.live.save()
    with watch(tmp_path) as server:
        server.until("acme/one", "succeeded")


def test_copies_are_deleted_when_no_checkpoint_needs_them(watch, put, tmp_path):
    put("acme/one", steps=3)
    with watch(tmp_path) as server:
        server.until("acme/one", "succeeded")
        copies = server.folder / "inputs" / "acme.one"
        server.live._store._writer.submit(lambda: None).result()
        kept = [int(p.name) for p in (server.folder / "checkpoints").iterdir()]
        assert copies.exists()
        put("acme/two", steps=40)
        server.until("acme/two", "succeeded")
        server.live._store._writer.submit(lambda: None).result()
        server.poll(2)
        assert not copies.exists()
        left = [int(p.name) for p in (server.folder / "checkpoints").iterdir()]
        assert min(left) >= max(kept, default=0) + 2


def test_after_a_restart_the_same_state_is_reached(watch, put, tmp_path):
    """Files that changed, appeared or vanished meanwhile are noticed."""
    put("acme/stays", steps=400)
    changed = put("acme/changed", steps=400)
    gone = put("beta/gone", steps=400)
    with watch(tmp_path) as server:
        server.poll_until(lambda: len(server.live.statuses()) == 3)
        server.until("beta/gone", "running", "queued")
        before = {status.name: status.step for status in server.live.statuses()}
    gone.unlink()
    changed.unlink()
    put("acme/changed", steps=400, priority=2, paused=True)
    put("beta/new", steps=400)
    with watch(tmp_path) as server:
        server.until("beta/gone", "cancelled")
        server.until("acme/changed", "paused")
        server.until("beta/new", "running")
        server.until("acme/stays", "running")
        assert server.status("acme/stays")["step"] >= before["acme.stays"]
        assert server.status("acme/changed")["priority"] == 2
        assert [s.name for s in server.live.statuses()].count("beta.new") == 1


def test_a_task_that_was_accepted_and_not_registered_is_taken_in_again(watch, put, tmp_path):
    put("acme/one")
    with watch(tmp_path) as server:
        for _ in range(4):
            server.watcher.poll()  # the command waits for the end of a round
        assert (server.folder / "specifications" / "acme.one.json").exists()
        copy = shutil.copytree(server.folder, tmp_path / "copy")
        server.live.step()
    shutil.rmtree(server.folder)
    copy.rename(server.folder)
    with watch(tmp_path) as server:
        assert server.live.statuses() == []
        assert not (server.folder / "inputs" / "acme.one").exists()
        server.until("acme/one", "succeeded")


def test_a_task_that_the_server_has_forgotten_does_not_begin_anew(watch, put, tmp_path):
    """Servers forget tasks some time after their ends."""
    put("acme/stays", steps=400)
    path = put("acme/one", steps=400)
    with watch(tmp_path) as server:
        server.until("acme/one", "running", "queued")
        path.unlink()
        server.until("acme/one", "cancelled")
        put("acme/one", steps=400)
        server.poll(4)

        name = server.live._tasks._ended.popleft()
        del server.live._tasks._tasks[name]
        server.live._forget(name)
        server.live._saving.changed = True
        server.poll(4)
        assert server.state("acme/one") == "cancelled"
    with watch(tmp_path) as server:
        server.poll(4)
        assert [status.name for status in server.live.statuses()] == ["acme.stays"]
        put("acme/one", steps=500)
        server.poll_until(lambda: "has ended (cancelled)" in "".join(server.said))
        path.unlink()
        server.poll(4)
        put("acme/one", steps=3)
        server.until("acme/one", "succeeded")


def test_a_task_that_the_server_has_paused_is_not_resumed_all_the_time(
    watch, put, tmp_path, monkeypatch
):
    """As when its copies are away: each time, its data would be read in vain."""
    put("acme/one", steps=4000)
    with watch(tmp_path) as server:
        server.poll_until(lambda: server.state("acme/one") == "running")
        server.poll(2)
    copies = tmp_path / "server" / "inputs" / "acme.one" / "data" / "short.jsonl"
    copies.rename(copies.with_suffix(".away"))
    with watch(tmp_path) as server:
        assert "file not found" in server.until("acme/one", "paused")["reason"]
        server.poll(3)
        resumed = []
        monkeypatch.setattr(server.live, "resume", resumed.append)
        server.poll(5)
        assert resumed == []
        copies.with_suffix(".away").rename(copies)
        monkeypatch.undo()
        server.watcher._watched[Place("acme", "one")].resume_at = 0.0
        server.until("acme/one", "running")


def link_to_secret(place: Path, secret: Path) -> None:
    place.symlink_to(secret)


def dangling_link(place: Path, secret: Path) -> None:
    place.symlink_to(secret.with_name("not_there"))


def hard_link(place: Path, secret: Path) -> None:
    place.hardlink_to(secret)


def fifo(place: Path, secret: Path) -> None:
    os.mkfifo(place)


@pytest.mark.parametrize("plant", [link_to_secret, dangling_link, hard_link, fifo])
@pytest.mark.parametrize("name", ["one.status.json", ".one.status.json.partial"])
def test_a_status_is_never_written_to_what_the_tenant_has_put_there(
    plant, name, watch, put, tmp_path
):
    secret = tmp_path / "secret"
    secret.write_text("precious")
    put("acme/one", steps=0)
    plant(tmp_path / "inbox" / "acme" / name, secret)
    with watch(tmp_path) as server:
        server.poll(3)
        status = tmp_path / "inbox" / "acme" / "one.status.json"
        assert status.is_file() and not status.is_symlink() and status.stat().st_nlink == 1
        assert server.state("acme/one") == "refused"
    assert secret.read_text() == "precious"
    assert not (tmp_path / "not_there").exists()


def test_a_tenants_folder_that_becomes_a_link_is_not_followed(watch, put, tmp_path):
    put("acme/one", steps=400)
    put("beta/one", steps=400)
    inbox = tmp_path / "inbox"
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        before = (inbox / "beta" / "one.status.json").read_text()
        shutil.rmtree(inbox / "acme")
        (inbox / "acme").symlink_to(inbox / "beta")
        server.watcher._directory.remove_status(Place("acme", "one"))
        with pytest.raises(OSError):
            server.watcher._directory.write_status(Place("acme", "one"), "stolen")
        assert (inbox / "beta" / "one.status.json").read_text() == before
        server.poll(4)
        assert server.live.status("acme.one").state == "cancelled"


def hostile_files(folder: Path, secret: Path) -> None:
    folder.mkdir(parents=True)
    os.mkfifo(folder / "fifo.json")
    (folder / "link.json").symlink_to(secret)
    (folder / "hard.json").hardlink_to(secret)
    (folder / "folder.json").mkdir()
    (folder / "blocked.json").write_text("{")
    (folder / "blocked.status.json").mkdir()
    (folder / "\x1b[2J\n.json").write_text("{}")
    (folder / os.fsdecode(b"\xff.json")).write_text("{}")
    (folder / f"{'n' * 245}.json").write_text("{}")
    (folder / f"{'n' * 97}.json").write_text('{"name": "' + "n" * 97 + '"}')
    (folder / "deep.json").write_text("[" * 60_000)
    (folder / "huge.json").write_text(" " * 10**6)
    (folder / "empty.json").write_text("")
    (folder / "number.json").write_text('{"name": "number", "steps": 1' + "0" * 5000 + "}")
    (folder / "outside.json").write_text('{"name": "outside", "data": "../b.jsonl", "steps": 1}')


def test_hostile_files_stop_neither_the_server_nor_others(watch, put, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text('{"name": "link", "data": "a.jsonl", "steps": 1}')
    hostile_files(tmp_path / "inbox" / "evil", secret)
    put("acme/one", steps=20)
    (tmp_path / "inbox" / "two.words").mkdir()
    (tmp_path / "inbox" / "\x1b[2J").mkdir()
    (tmp_path / "inbox" / "linked").symlink_to(tmp_path / "inbox" / "acme")
    with watch(tmp_path) as server:
        server.until("acme/one", "succeeded")
        assert [status.name for status in server.live.statuses()] == ["acme.one"]
        assert "should be a file, found a FIFO" in server.status("evil/fifo")["error"]
        assert "found a symbolic link" in server.status("evil/link")["error"]
        assert "hard links" in server.status("evil/hard")["error"]
        assert "found a folder" in server.status("evil/folder")["error"]
        assert "nests 60000" in server.status("evil/deep")["error"]
        assert "expected at most 65536" in server.status("evil/huge")["error"]
        long = server.status(f"evil/{'n' * 97}")["error"]
        assert long.endswith("have 101 characters; expected at most 99")
        assert "'..' could lead out of" in server.status("evil/outside")["error"]
    printed = "\n".join(server.said)
    assert printed.replace("\n", "").isprintable()
    assert len([line for line in server.said if "refused" in line]) <= 11
    for name in ("two.words", "\x1b[2J"):
        (line,) = (line for line in server.said if ascii(name) in line)
        assert line.endswith("and begins with a letter or digit")


def test_a_folder_with_too_many_files_is_not_read_and_its_tasks_go_on(watch, put, tmp_path):
    put("acme/one", steps=400)
    with watch(tmp_path, folder_entries=50) as server:
        server.until("acme/one", "running")
        for i in range(60):
            (tmp_path / "inbox" / "acme" / f"{i}.json").write_text("{}")
        (tmp_path / "inbox" / "acme" / "one.json").unlink()
        server.poll(4)
        assert server.state("acme/one") == "running"
        assert server.said == [f"{server.inbox}/acme: has more than 50 files, so they are not read"]


def test_no_more_specifications_than_permitted_are_read(watch, put, tmp_path):
    put("acme/z", steps=400)
    with watch(tmp_path, specifications=5) as server:
        server.until("acme/z", "running")
        for i in range(20):
            put(f"acme/{i}", steps=0)
        server.poll(4)
        found = {p.name for p in (tmp_path / "inbox" / "acme").glob("*.status.json")}
        assert len(found) == 5 and "z.status.json" in found
        assert "has 21 specifications, but a tenant may have 5" in "".join(server.said)


def test_a_tenant_has_so_much_room_for_copies(watch, put, tmp_path, data):
    size = Path(data["short"]).stat().st_size
    put("acme/a", steps=400)
    put("acme/b", steps=400)
    put("beta/c", steps=400)
    with watch(tmp_path, copied_bytes=size + 1) as server:
        server.until("beta/c", "running")
        server.until("acme/a", "running")
        error = server.until("acme/b", "refused")["error"]
        assert error.startswith("b.json: its files have 0.0 MiB, and those of the other tasks of ")


def test_a_name_that_is_taken_from_elsewhere_is_refused(watch, put, tmp_path, make_task):
    put("acme/one")
    with watch(tmp_path) as server:
        server.live.register(make_task("acme.one", steps=2))
        server.poll()
        error = server.until("acme/one", "refused")["error"]
        assert error == "task 'acme.one': a task of this name is registered already"


def test_unchanged_files_are_neither_read_nor_written_again(watch, put, tmp_path, monkeypatch):
    put("acme/one")
    put("acme/two", steps=0)
    with watch(tmp_path) as server:
        server.until("acme/one", "succeeded")
        server.poll_until(lambda: server.status("acme/one")["adapter"])
        server.poll(2)
        directory = server.watcher._directory
        for name in ("read", "write_status", "files"):
            monkeypatch.setattr(directory, name, lambda *_: pytest.fail("not needed"))
        server.poll(5)


def test_a_status_is_written_at_most_once_a_second(watch, put, tmp_path, monkeypatch):
    put("acme/one", steps=400)
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        server.watcher._status_files._every = 1.0
        written = []
        monkeypatch.setattr(server.watcher._directory, "write_status", lambda *a: written.append(a))
        end = time.monotonic() + 0.8
        while time.monotonic() < end:
            server.poll()
        assert len(written) <= 1


def test_a_status_that_cannot_be_written_is_written_later_and_told_once(watch, put, tmp_path):
    blocked = tmp_path / "inbox" / "acme" / "one.status.json"
    put("acme/two", steps=400)
    with watch(tmp_path) as server:
        server.watcher._status_files._every = 0.0
        server.until("acme/two", "running")
        blocked.mkdir()
        put("acme/one")
        server.poll_until(lambda: "acme.one" in [own.name for own in server.live.statuses()])
        server.poll_until(lambda: server.live.status("acme.one").state == "succeeded")
        server.poll(4)
        blocked.rmdir()
        # The task has ended, so nothing else would have its file written.
        assert server.until("acme/one", "succeeded")["step"] == 3
        assert sum("status files cannot be written" in line for line in server.said) == 1


def test_a_disk_that_cannot_be_written_is_waited_for(watch, put, tmp_path, monkeypatch):
    put("acme/one")
    with watch(tmp_path) as server:
        monkeypatch.setattr("jaxmux.runs.directory_watcher._SECONDS_TO_RETRY", 0.0)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("jaxmux.runs.accepted_tasks.copy_files", full)
            server.poll(4)
            error = server.status("acme/one")["error"]
            assert error == "its files cannot be copied yet (No space left on device)"
        with monkeypatch.context() as patch:
            patch.setattr("jaxmux.runs.journal.os.pwrite", full)
            server.poll(4)
            assert "No space left" in server.status("acme/one")["error"]
            assert server.live.statuses() == []
        assert server.until("acme/one", "succeeded")["error"] is None
