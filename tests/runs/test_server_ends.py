"""A task that has ended stays as it is, whatever ends the server; and a server ends in order."""

import dataclasses
import json
import shutil
import threading

import pytest

from jaxmux import AdamW, Bottleneck, LoRA, Schedule
from jaxmux.errors import Interrupted
from jaxmux.field_checks import LARGEST_INTEGER
from jaxmux.models import BackboneConfig
from jaxmux.peft import export_adapter, import_adapter, kind_of
from jaxmux.tasks import Task, TaskError

from .crash_images import copy_now
from .server_steps import finish, step
from .test_server_faults import serve, task  # noqa: F401


def test_ends_survive_a_kill(serve, task, adapter_bytes, tmp_path):  # noqa: F811
    folder = tmp_path / "server"
    with serve(folder, checkpoint_every=1000) as server:
        server.register(task("good"))
        server.register(task("bad", data="missing.jsonl"))
        server.register(task("lasting", steps=1000))
        server.register(task("cancelled", steps=1000))
        step(server)
        while server.status("good").state != "succeeded":
            step(server)
        server.cancel("cancelled")
        # What they have used is known when the results of the last round have arrived.
        step(server, 3)
        ended = [server.status(name) for name in ("good", "bad", "cancelled")]
        copy = copy_now(folder, tmp_path / "copy")
        adapter = adapter_bytes(copy / "adapters" / "good")
    assert not any((copy / "checkpoints").iterdir())
    with serve(copy, checkpoint_every=1000) as server:
        assert [server.status(own.name) for own in ended] == ended
        step(server, 3)
        assert [server.status(own.name) for own in ended] == ended
        server.cancel("lasting")
        step(server)
    assert adapter_bytes(copy / "adapters" / "good") == adapter
    # Nothing that has ended is told again, after the kill or after a server that ended in order.
    with serve(copy) as server:
        step(server)
    events = map(json.loads, (copy / "events.jsonl").read_text().splitlines())
    told = [event["task"] for event in events if event.get("state") == "succeeded"]
    assert told == ["good"]


def test_a_name_that_is_used_again_belongs_to_the_new_task(serve, task, tmp_path):  # noqa: F811
    folder = tmp_path / "server"
    with serve(folder, most_ended=1, checkpoint_every=1000) as server:
        for name, steps in (("a", 2), ("b", 1), ("a", 4)):
            server.register(task(name, steps=steps))
            finish(server)
        step(server)
        copy = copy_now(folder, tmp_path / "copy")
    with serve(copy, most_ended=1) as server:
        assert (server.status("a").state, server.status("a").steps) == ("succeeded", 4)


def test_leaving_a_server_saves_what_steps_have_trained(serve, task, tmp_path):  # noqa: F811
    with serve(tmp_path, checkpoint_every=1000) as server:
        server.register(task("a", steps=50))
        step(server, 5)
        events = server.events()
        waiting = server.pause("a")
        server.close()
        # Nobody waits for a thread that does not exist.
        assert "before the command" in str(waiting.exception(timeout=0))
        assert list(events) == []
    with serve(tmp_path) as server:
        # The first round may have begun in the first step or in the second.
        assert server.status("a").step in (4, 5)


def test_the_adapter_with_which_a_task_has_begun_may_go(serve, task, tmp_path):  # noqa: F811
    with serve(tmp_path / "server") as server:
        server.register(task("first", steps=1))
        finish(server)
        start = shutil.copytree(tmp_path / "server" / "adapters" / "first", tmp_path / "start")
        server.register(task("second", steps=3, resume_from=str(start)))
        step(server)
        while not server.status("second").step:
            step(server)
    shutil.rmtree(start)
    with serve(tmp_path / "server") as server:
        finish(server)
        assert server.status("second").state == "succeeded"


def test_an_adapter_that_cannot_be_written_stops_nothing_else(
    serve,  # noqa: F811
    task,  # noqa: F811
    adapter_bytes,
    tmp_path,
):
    """Its task ends once more when the server is started again, with the same adapter."""
    folder, said = tmp_path / "server", []
    with serve(folder, said, checkpoint_every=2) as server:
        (folder / "adapters").mkdir(exist_ok=True)
        (folder / "adapters" / "bad").write_text("in its way")
        for name, steps in (("bad", 2), ("good", 2), ("long", 30)):
            server.register(task(name, steps=steps))
        step(server, 12)
        shown = {own.name: own for own in server.statuses()}
        assert (shown["bad"].state, shown["bad"].step) == ("running", 2)
        assert shown["bad"].reason == "its end is being written to disk"
        assert shown["good"].state == "succeeded"
        assert not server._tasks["bad"].kept and server._tasks["good"].kept
        copy = copy_now(folder, tmp_path / "copy")
    assert sum("adapter bad: cannot be written yet" in line for line in said) == 1
    assert "succeeded" not in {
        event["state"]
        for event in map(json.loads, (copy / "events.jsonl").read_text().splitlines())
        if event["kind"] == "state" and event["task"] == "bad"
    }
    (copy / "adapters" / "bad").unlink()
    with serve(copy) as server:
        # It is in a checkpoint, so it does not train again.
        assert server.status("long").step > 2
        while server.status("bad").state != "succeeded":
            step(server)
        assert server.status("bad").meter == shown["bad"].meter
    assert adapter_bytes(copy / "adapters" / "bad").keys() == (
        adapter_bytes(copy / "adapters" / "good").keys()
    )


def test_a_server_that_cannot_save_says_so(
    serve,  # noqa: F811
    task,  # noqa: F811
    tmp_path,
    monkeypatch,
):
    said = []
    with serve(tmp_path, said, checkpoint_every=1000) as server:
        server.register(task("a", steps=50))
        step(server, 5)

        def full(*arguments):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(server._store._checkpoints, "save", full)
        server.save()
        assert server.problem == "checkpoint 1: cannot be written (No space left on device)"
    assert sum("No space left" in line for line in said) == 1
    message = str(Interrupted(15, saved=False, problem=server.problem))
    assert "not all was saved (checkpoint" in message


def test_the_history_of_a_task_is_bounded(serve, task, tmp_path):  # noqa: F811
    with serve(tmp_path) as server:
        server.register(task("a", steps=50))
        step(server)
        for i in range(120):
            (server.pause, server.resume)[i % 2]("a")
            server._runner.carry_out()
        step(server)
        history = server.status("a").history
    assert len(history) == 101
    assert history[0].state == "preparing" and history[1].state in ("paused", "queued")


def test_only_the_thread_that_trains_saves(serve, task, tmp_path):  # noqa: F811
    with serve(tmp_path) as server:
        thread = threading.Thread(target=server.run)
        thread.start()
        server.register(task("a")).result()
        with pytest.raises(RuntimeError, match="`run` saves by itself"):
            server.save()
        server.close()
        thread.join()


@dataclasses.dataclass(frozen=True)
class OwnTask(Task):
    owner: str = "me"


class OwnAdamW(AdamW):
    pass


def test_what_cannot_be_read_back_is_refused(serve, task, tmp_path):  # noqa: F811
    plain = task("a")
    fields = {field.name: getattr(plain, field.name) for field in dataclasses.fields(plain)}
    with serve(tmp_path) as server:
        for own in (OwnTask(**fields), dataclasses.replace(plain, optimizer=OwnAdamW(1e-3))):
            refused = server.register(own)
            step(server)
            with pytest.raises(TaskError, match="task 'a': .* of a subclass"):
                refused.result(timeout=0)
    with serve(tmp_path) as server:
        assert not server.statuses()


def test_numbers_and_names_of_commands_are_checked(serve, task, tmp_path):  # noqa: F811
    with serve(tmp_path) as server:
        warm = AdamW(1e-3, schedule=Schedule("linear", warmup_ratio=0.1))
        server.register(task("a", optimizer=warm))
        step(server, 2)
        for wrong in (LARGEST_INTEGER + 1, 10**5000):
            for change in (server.extend, server.set_priority):
                with pytest.raises(ValueError, match=r"at most 2\^53 - 1"):
                    change("a", wrong)
            with pytest.raises(TaskError, match=r"batch_size should be at most 2\^53 - 1"):
                task("b", batch_size=wrong)
        with pytest.raises(TypeError, match="name of a task should be a string"):
            server.cancel(["a"])
        extended = server.extend("a", LARGEST_INTEGER)
        step(server)
        assert extended.result(timeout=0) is None
        server.register(task("large", batch_size=LARGEST_INTEGER))
        step(server, 2)
        assert server.status("a").state == "running"


def test_an_adapter_of_another_kind_replaces_all_files(backbone, tmp_path):
    """A name that is used again may belong to a task of another kind."""
    config = BackboneConfig.from_folder(backbone)
    written = []
    for spec in (LoRA(rank=2), Bottleneck(size=8)):
        kind = kind_of(spec)
        adapter = kind.initial(spec, kind.targets(spec, config), config, 0, None)
        export_adapter(tmp_path / "a", adapter, spec, config, str(backbone))
        written.append({path.name for path in (tmp_path / "a").iterdir()})
    one, other = ({name for name in names if "safetensors" in name} for names in written)
    assert (one, other) == ({"adapter_model.safetensors"}, {"adapter.safetensors"})
    assert isinstance(import_adapter(tmp_path / "a", config)[0], Bottleneck)


def test_reasons_quote_only_the_beginning_of_what_is_wrong(serve, task, tmp_path):  # noqa: F811
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"x" * 100_000: 1}) + "\n")
    with serve(tmp_path / "server") as server:
        server.register(task("a", data=str(data)))
        step(server, 2)
        reason = server.status("a").reason
    assert "xxx" in reason and len(reason) < 2100
