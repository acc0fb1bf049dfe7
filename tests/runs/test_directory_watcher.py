"""A watched directory: its files say what is wanted, and status files tell what became of it."""

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from jaxmux import AdamW, LoRA
from jaxmux.server.inbox.directory import Place
from jaxmux.server.server import tuning_server

from .crash_images import copy_now
from .watched_server import ADAPTER, OPTIONS, known

ENDED = ("succeeded", "failed", "cancelled")


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


def test_warnings_of_a_task_are_told_once_to_its_tenant_and_counted_for_the_operator(
    watch, put, tmp_path
):
    put("acme/plain", steps=1)
    put("acme/odd", steps=100_000, batch_size=50)
    put("beta/short", steps=1, data="data/context.jsonl")
    records = [{"prompt": "red", "completion": " fig", "system": "Be kind."}] * 4
    path = tmp_path / "inbox/beta/data/context.jsonl"
    path.write_text("".join(json.dumps(own) + "\n" for own in records))

    def warnings(place):
        return server.status(place)["warnings"]

    def told(folder):
        events = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
        return {own["task"]: own["warnings"] for own in events if own["kind"] == "warning"}

    with watch(tmp_path) as server:
        server.until("beta/short", "succeeded")
        server.until("acme/plain", "succeeded")
        server.until("acme/odd", "running")
        (context,), (batch,) = warnings("beta/short"), warnings("acme/odd")
        assert "fields that are not read: 'system' (4 records)" in context
        assert "batch_size is 50, above the 14 samples" in batch
        assert warnings("acme/plain") == []
        counted = {own.split(":")[0]: own for own in server.said if "warning" in own}
        assert counted.keys() == {"acme.odd", "beta.short"}
        assert counted["acme.odd"] == "acme.odd: 1 warning; its status tells it"
        assert told(server.folder) == {"beta.short": [context], "acme.odd": [batch]}
        killed = copy_now(tmp_path, tmp_path / "killed")
    for place in (tmp_path, killed):
        before = (place / "server/events.jsonl").read_text().count('"warning"')
        with watch(place) as server:
            server.until("acme/odd", "running")
            server.until("beta/short", "succeeded")
            assert (warnings("beta/short"), warnings("acme/odd")) == ([context], [batch])
            assert not any("warning" in line for line in server.said)
        assert (place / "server/events.jsonl").read_text().count('"warning"') == before


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


def test_data_on_whose_way_there_was_a_link_are_noticed(watch, put, tmp_path):
    put("acme/one", data="deep/link/short.jsonl")
    folder = tmp_path / "inbox" / "acme"
    (folder / "deep").mkdir()
    (folder / "deep" / "link").symlink_to(folder / "data")
    with watch(tmp_path) as server:
        assert "found a symbolic link" in server.until("acme/one", "refused")["error"]
        (folder / "deep" / "link").unlink()
        (folder / "data").rename(folder / "deep" / "link")
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
    assert [line for line in server.said if "refused" in line] == [
        "acme/one.json: refused: priority should be an integer of at least -100 and of at most "
        "100, found 1000"
    ]


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
        record = server.folder / "refused.json"
        own = {"task": "acme.one", "error": server.status("acme/one")["error"], "waits": False}
        assert json.loads(record.read_text()) == {"count": 1, "refused": [own]}
        path.unlink()
        server.poll_until(lambda: server.state("acme/one") is None)
        assert json.loads(record.read_text()) == {"count": 0, "refused": []}


def test_after_the_end_of_a_task_every_change_is_refused(watch, put, tmp_path):
    put("acme/one", priority=2)
    put("acme/bad", data="data/bad.jsonl", paused=True)
    (tmp_path / "inbox" / "acme" / "data" / "bad.jsonl").write_text('{"prompt": "no completion"}\n')
    changes = ({"priority": 7}, {"priority": 2, "paused": True}, {"priority": 2, "steps": 4})
    with watch(tmp_path) as server:
        server.until("acme/one", "succeeded")
        server.until("acme/bad", "failed")
        for change in changes:
            put("acme/one", **change)
            server.poll_until(lambda: server.status("acme/one")["error"])
            assert server.status("acme/one")["error"] == (
                "one.json: has ended (succeeded); give the file and the task another name"
            )
            put("acme/one", priority=2)
            server.poll_until(lambda: server.status("acme/one")["error"] is None)
    put("acme/one", priority=-3)
    with watch(tmp_path) as server:
        server.poll_until(lambda: server.status("acme/one")["error"])
        server.poll(2)
        assert server.status("acme/bad")["error"] is None


def test_a_change_that_comes_with_the_end_of_a_task_is_refused(watch, put, tmp_path, monkeypatch):
    put("acme/one")
    with watch(tmp_path) as server:
        server.until("acme/one", "running")
        put("acme/one", priority=4)
        for _ in range(2):
            server.watcher.poll()  # the command waits for the end of a round
        monkeypatch.setattr(server.live._runner, "carry_out", lambda: False)
        while known(server.live) != {"acme.one": "succeeded"}:
            server.live.step()
        monkeypatch.undo()
        server.poll_until(lambda: server.status("acme/one")["error"])
        assert "has ended (succeeded)" in server.status("acme/one")["error"]


def test_waiting_tasks_are_told_their_place(watch, put, tmp_path):
    for name in "abcdf":
        put(f"acme/{name}", steps=400)
    put("beta/e", steps=400, priority=-1)
    with watch(tmp_path) as server:
        server.poll_until(lambda: server.state("beta/e") == "queued")
        server.poll(2)
        places = {p: server.status(p)["place_in_queue"] for p in ("acme/d", "acme/f", "beta/e")}
        assert places["beta/e"] == 3 and sorted(places.values()) == [1, 2, 3]
        # It may have begun before the data of the others were read.
        reason = server.status("beta/e")["reason"]
        assert reason.endswith("all 3 places are taken") and "acme" not in reason


def test_the_tenant_cannot_reach_the_data_of_an_accepted_task(watch, put, tmp_path):
    put("acme/one", steps=12)
    with watch(tmp_path) as server:
        server.until("acme/one", "preparing", "queued", "running")
        shutil.rmtree(tmp_path / "inbox" / "acme" / "data")
        server.poll_until(lambda: server.state("acme/one") == "running")
        server.live.save()
    with watch(tmp_path) as server:
        server.until("acme/one", "succeeded")


def test_copies_of_ended_tasks_are_deleted_though_no_checkpoint_follows(
    watch, put, tmp_path, data, adapter_bytes
):
    """They do not count any more, and a server that is killed then does not need them."""
    size = Path(data["short"]).stat().st_size
    put("acme/one")
    put("acme/bad", data="data/bad.jsonl")
    (tmp_path / "inbox" / "acme" / "data" / "bad.jsonl").write_text('{"prompt": "no completion"}\n')
    with watch(tmp_path, copied_bytes=size + 100, checkpoint_every=1000) as server:
        server.until("acme/one", "succeeded")
        server.until("acme/bad", "failed")
        inputs = server.folder / "inputs"
        server.poll_until(lambda: not any(inputs.iterdir()))
        copy = copy_now(server.folder, tmp_path / "copy")
        assert not any((copy / "checkpoints").iterdir())
        put("acme/two", steps=400)
        server.until("acme/two", "running")
    shutil.rmtree(server.folder)
    copy.rename(server.folder)
    before = adapter_bytes(server.folder / "adapters" / "acme.one")
    with watch(tmp_path) as server:
        server.until("acme/two", "running")
        assert server.state("acme/one") == "succeeded" and server.state("acme/bad") == "failed"
    assert adapter_bytes(server.folder / "adapters" / "acme.one") == before


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


def test_a_crash_before_a_task_is_registered_leaves_no_copies_of_its_files(watch, put, tmp_path):
    """The task is taken in anew."""
    put("acme/one")
    with watch(tmp_path) as server:
        for _ in range(4):
            server.watcher.poll()  # the command waits for the end of a round
        assert (server.folder / "inputs" / "acme.one").exists()
        copy = copy_now(server.folder, tmp_path / "copy")
        server.live.step()
    shutil.rmtree(server.folder)
    copy.rename(server.folder)
    with watch(tmp_path) as server:
        assert server.live.statuses() == []
        assert not (server.folder / "inputs" / "acme.one").exists()
        server.until("acme/one", "succeeded")


def test_a_failure_after_a_task_was_registered_leaves_the_copies_of_its_files(
    watch, put, tmp_path, monkeypatch
):
    """Its command is on disk, and has not been carried out."""
    put("acme/one")
    with watch(tmp_path) as server:

        def broken(own):
            raise ZeroDivisionError

        monkeypatch.setattr(server.live._tasks, "add", broken)
        for _ in range(4):
            server.watcher.poll()
        with pytest.raises(ZeroDivisionError):
            server.live.run()
        for _ in range(2):
            server.watcher.poll()
        assert server.state("acme/one") is None
    with watch(tmp_path) as server:
        assert known(server.live) == {"acme.one": "preparing"}
        server.until("acme/one", "succeeded")
        assert [*known(server.live)] == ["acme.one"]


def test_a_task_that_has_ended_does_not_begin_anew(watch, put, tmp_path):
    """However few the server knows after their end, and whenever it is killed."""
    names = "abc"
    paths = [put(f"acme/{name}", steps=20) for name in names]

    def states():
        return {server.state(f"acme/{name}") for name in names}

    with watch(tmp_path, most_ended=1) as server:
        server.poll_until(lambda: all(server.state(f"acme/{name}") for name in names))
        server.step_until(lambda: {*known(server.live).values()} == {"succeeded"})
        for _ in range(5):
            server.live.step()
        images = [copy_now(server.folder, tmp_path / "killed")]
        server.poll_until(lambda: states() == {"succeeded"})
        server.live._saving.changed = True
        server.live.save()
        server.poll(5)
        images.append(copy_now(server.folder, tmp_path / "killed_later"))
    for image in images:
        shutil.rmtree(server.folder)
        image.rename(server.folder)
        with watch(tmp_path, most_ended=1) as server:
            trained = []
            server.live._tasks._export = lambda own, _, to=trained: to.append(own.task.name)
            server.poll(5)
            assert states() == {"succeeded"} and len(known(server.live)) == 3
            assert trained == []
    with watch(tmp_path, most_ended=1) as server:
        put("acme/a", steps=21)
        server.poll_until(lambda: "has ended (succeeded)" in "".join(server.said))
        paths[0].unlink()
        server.poll_until(lambda: "acme.a" not in known(server.live))
        assert server.state("acme/a") == "succeeded"
        put("acme/a", steps=2)
        server.poll_until(lambda: server.status("acme/a").get("steps") == 2)
        assert server.until("acme/a", "succeeded")["step"] == 2


def test_of_a_task_that_ended_long_ago_the_status_stays(watch, put, tmp_path):
    """Also when a change is refused, is taken back, and after a restart."""
    one, late = {"steps": 2, "priority": 1}, "one.json: has ended (succeeded); give the file and "
    changes = ({"priority": 5}, {"paused": True}, {"steps": 9})

    def refuse_and_take_back(server, change):
        put("acme/one", **{**one, **change})
        server.poll_until(lambda: server.status("acme/one")["error"])
        assert server.status("acme/one").pop("error").startswith(late)
        assert {**server.status("acme/one"), "error": None} == before
        put("acme/one", **one)
        server.poll_until(lambda: server.status("acme/one")["error"] is None)
        assert server.status("acme/one") == before

    with watch(tmp_path, most_ended=1) as server:
        put("acme/one", **one)
        server.until("acme/one", "succeeded")
        server.poll_until(lambda: server.status("acme/one")["adapter"])
        # As when the round of its end is counted later.
        own = server.live._tasks["acme.one"]
        own.meter.device_seconds += 1000.0
        own.dirty = True
        server.live._show(own)
        for name in ("two", "three"):
            put(f"acme/{name}", steps=1)
            server.until(f"acme/{name}", "succeeded")
        server.poll(3)
        before = server.status("acme/one")
        assert before["adapter"] and before["loss"] and before["meter"]["device_seconds"] > 1000
        for change in changes:
            refuse_and_take_back(server, change)
        put("acme/one", **{**one, "priority": 5})
        image = copy_now(server.folder, tmp_path / "killed")
    shutil.rmtree(server.folder)
    image.rename(server.folder)
    with watch(tmp_path, most_ended=1) as server:
        server.poll_until(lambda: server.status("acme/one")["error"])
        refuse_and_take_back(server, {"paused": True})
    status = tmp_path / "inbox" / "acme" / "one.status.json"
    status.unlink()
    with watch(tmp_path, most_ended=1) as server:
        server.poll(3)
        assert server.status("acme/one") == before


def test_a_deleted_task_is_known_until_its_status_file_tells_its_end(watch, put, tmp_path):
    """Then nothing is left of it, and no restart is needed."""
    other = {"acme.other": "succeeded"}
    put("acme/other", steps=1)
    with watch(tmp_path, most_ended=1) as server:
        server.until("acme/other", "succeeded")
        path = put("acme/one", steps=20)
        server.until("acme/one", "running")
        server.watcher._status_files._every = 1000.0
        server.step_until(lambda: known(server.live) == other | {"acme.one": "succeeded"})
        path.unlink()
        server.poll(6)
        assert len(known(server.live)) == 2 and server.state("acme/one") == "running"
        server.watcher._status_files._every = 0.0
        server.poll_until(lambda: known(server.live) == other)
        server.poll(2)
        assert server.state("acme/one") == "succeeded"
        assert list(server.watcher._watched) == [Place("acme", "other")]
        assert list(server.watcher._accepted) == ["acme.other"]
    with watch(tmp_path) as server:
        assert known(server.live) == other


def test_a_file_that_comes_while_its_name_is_forgotten_is_read_anew(watch, put, tmp_path):
    put("acme/other", steps=1)
    path = put("acme/one", steps=1)
    with watch(tmp_path) as server:
        server.until("acme/other", "succeeded")
        server.until("acme/one", "succeeded")
        path.unlink()
        server.poll_until(lambda: Place("acme", "one") not in server.watcher._watched)
        put("acme/one", steps=2)
        server.poll(3)
        assert "has ended (succeeded)" in server.status("acme/one")["error"]
        # As if the server had looked before the file came.
        server.live._tasks._forget_task("acme.one")
        server.poll_until(lambda: server.status("acme/one").get("steps") == 2)
        assert server.until("acme/one", "succeeded")["step"] == 2


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


def test_in_a_folder_with_too_many_files_known_tasks_go_on_and_new_ones_are_refused(
    watch, put, tmp_path
):
    folder = tmp_path / "inbox" / "acme"
    with watch(tmp_path, folder_entries=50) as server:
        put("acme/one", steps=400)
        server.until("acme/one", "running")
        for i in range(60):
            (folder / f"{i}.json").write_text("{}")
        put("acme/one", steps=400, priority=1)
        # Writing status files changes which of the entries come first.
        server.poll(4)
        written = {path.name for path in folder.glob("*.status.json")}
        server.poll(4)
        assert written == {path.name for path in folder.glob("*.status.json")}
        assert server.status("acme/one")["priority"] == 1 and len(written) > 10
        (refused, *_) = sorted(written - {"one.status.json"})
        assert server.status(f"acme/{refused.removesuffix('.status.json')}") == {
            "task": f"acme.{refused.removesuffix('.status.json')}",
            "state": "refused",
            "error": "is not read: a tenant's folder may hold 50 files; delete some",
        }
        (folder / "one.json").unlink()
        server.until("acme/one", "cancelled")
        assert server.said == [f"{folder}: has more than 50 files; no new specification is read"]


def test_of_more_specifications_than_permitted_some_are_read(watch, put, tmp_path):
    path = put("acme/z", steps=400)
    with watch(tmp_path, specifications=5) as server:
        server.until("acme/z", "running")
        others = [put(f"acme/{i:02}", steps=0) for i in range(20)]
        server.poll(4)
        assert (
            f"{path.parent}: has more than 5 specifications; the others are not read" in server.said
        )
        found = {p.name: json.loads(p.read_text()) for p in path.parent.glob("*.status.json")}
        states = [found.pop(f"{name}.status.json") for name in ("z", "00", "01", "02", "03")]
        assert states[0]["state"] == "running"
        assert all("steps should be" in status["error"] for status in states[1:])
        # As many others are told that they are not read; with millions, the rest learn nothing.
        assert len(found) == 5 and {status["error"] for status in found.values()} == {
            "is not read: a tenant may have 5 specifications; delete others"
        }
        path.unlink()
        server.until("acme/z", "cancelled")
        for other in others:
            other.unlink()
        server.poll(4)
        assert [p.name for p in path.parent.glob("*.status.json")] == ["z.status.json"]


def test_a_tenant_is_told_of_files_that_change_all_the_time(watch, put, tmp_path):
    path, data = put("acme/one"), tmp_path / "inbox" / "acme" / "data" / "short.jsonl"
    with watch(tmp_path) as server:
        for changing, what in ((path, "the file"), (data, "data/short.jsonl")):
            for _ in range(12):
                changing.write_text(changing.read_text() + " ")
                server.poll()
            status = server.status("acme/one")
            expected = f"{what} still changes; it is read when two looks find it the same"
            assert (status["state"], status["error"]) == ("waiting", expected)
            assert f"acme/one.json: waits: {expected}" in server.said
        assert server.until("acme/one", "succeeded")["error"] is None


def test_a_tenant_has_so_much_room_for_copies(watch, put, tmp_path, data):
    size = Path(data["short"]).stat().st_size
    put("acme/a", steps=400)
    put("acme/b", steps=400)
    put("beta/c", steps=400)
    with watch(tmp_path, copied_bytes=size + 1) as server:
        server.until("beta/c", "running")
        server.until("acme/a", "running")
        error = server.until("acme/b", "waiting")["error"]
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
        status = blocked.read_text()
        for _ in range(3):
            blocked.unlink()
            blocked.mkdir()
            put("acme/one", priority=5)
            server.poll(3)
            blocked.rmdir()
            put("acme/one")
            server.poll_until(lambda: blocked.is_file() and blocked.read_text() == status)
        assert sum("status files cannot be written" in line for line in server.said) == 1


def test_a_disk_that_cannot_be_written_is_waited_for(watch, put, tmp_path, monkeypatch):
    put("acme/one")
    with watch(tmp_path) as server:
        monkeypatch.setattr("jaxmux.server.inbox.watcher._SECONDS_TO_RETRY", 0.0)

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("jaxmux.server.inbox.accepted.copy_files", full)
            server.poll(4)
            error = server.status("acme/one")["error"]
            assert error == "its files cannot be copied yet (No space left on device)"
            assert server.state("acme/one") == "waiting"
        with monkeypatch.context() as patch:
            patch.setattr("jaxmux.server.database.Database.write", full)
            server.poll(4)
            assert "No space left" in server.status("acme/one")["error"]
            assert server.live.statuses() == []
        assert server.until("acme/one", "succeeded")["error"] is None
