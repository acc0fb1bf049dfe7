"""A server with a folder: tasks come and go, and survive the end of the process."""

import json
import re
import shutil
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext

from jaxmux.data import Source
from jaxmux.runs import RunDirectoryError
from jaxmux.server.database import METADATA, Database
from jaxmux.server.server import ServerOptions, tuning_server

from .conftest import SERVER
from .server_steps import step

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"


@pytest.fixture(scope="session")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder, **options):
        said = options.pop("said", [])
        chosen = ServerOptions(**SERVER | options)
        return tuning_server(backbone, folder, chosen, say=said.append)

    return open_server


@pytest.fixture(scope="session")
def step_until():
    """Steps a server until a condition holds."""

    def run(server, condition):
        for _ in range(2000):
            server.step()
            if condition():
                return
            while server._preparation.seconds_left is not None:
                time.sleep(0.001)
            # Ends are shown when they are on disk.
            server._store.wait()
        raise AssertionError(server.statuses())

    return run


@pytest.fixture(scope="session")
def tasks(make_task, data):
    return {
        "a": make_task("a", steps=9),
        "b": make_task("b", data=data["long"], steps=7, seed=3),
        "c": make_task("c", data=data["long"], epochs=2, batch_size=7),
        "d": make_task("d", data=Source(data["chat"], chat_template=TEMPLATE), steps=4, seed=5),
    }


@pytest.fixture(scope="session")
def cards():
    """By task, the card of the adapter that `calm` has."""
    return {}


@pytest.fixture(scope="session")
def calm(tasks, serve, step_until, adapter_bytes, cards, tmp_path_factory):
    """The adapters that tasks get from a server without anything else happening, by task."""
    folder = tmp_path_factory.mktemp("calm") / "server"
    with serve(folder) as server:
        for task in tasks.values():
            server.register(task)
        step_until(server, lambda: all(s.state == "succeeded" for s in server.statuses()))
        meters = {status.name: status.meter for status in server.statuses()}
    cards.update({name: (folder / "adapters" / name / "README.md").read_text() for name in tasks})
    return {name: adapter_bytes(folder / "adapters" / name) for name in tasks}, meters


@pytest.mark.usefixtures("calm")
def test_cards_of_a_server_tell_of_the_training_but_of_no_folder(cards, tasks, backbone):
    for name, task in tasks.items():
        text = cards[name]
        assert f"`{Path(task.data.path).name}`" in text and f"`{backbone.name}`" in text
        assert "Training, last step" in text and "Fingerprint of the training data" in text
        for path in (task.data.path, str(backbone)):
            assert str(Path(path).parent) not in text
    assert "`chat_template.jinja` renders" in cards["d"] and "jinja" not in cards["a"]


@pytest.mark.slow
def test_the_documented_program_runs(tmp_path, monkeypatch, capsys):
    """With fewer steps."""
    page = (Path(__file__).parents[2] / "docs" / "tuning_server.md").read_text()
    (program,) = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    assert len(program.splitlines()) <= 20
    for documented, taken in ((20, 6), (10, 3)):
        assert program.count(f"steps={documented})") == 1
        program = program.replace(f"steps={documented})", f"steps={taken})")
    monkeypatch.chdir(tmp_path)
    exec(compile(program, "docs/tuning_server.md", "exec"), {})
    printed = capsys.readouterr().out
    assert printed.count("mood update {") == 6 and printed.count("urgent update {") == 3
    for name in ("mood", "urgent"):
        assert f"{name} state {{'state': 'succeeded'" in printed
    assert "mistake state {'state': 'cancelled'" in printed and "Meter(" in printed
    assert (tmp_path / "runs/server/adapters/mood/adapter_model.safetensors").exists()
    assert not (tmp_path / "runs/server/adapters/mistake").exists()


def ended(server, *names):
    return lambda: all(server.status(name).state in ("succeeded", "failed") for name in names)


def test_a_server_that_is_started_again_loses_nothing(
    tasks, serve, step_until, calm, adapter_bytes, tmp_path
):
    """The folder is copied in the middle of training, as if the process had ended there."""
    adapters, meters = calm
    folder, copies = tmp_path / "server", []
    with serve(folder, checkpoint_every=2) as server:
        for task in tasks.values():
            server.register(task)
        for i in range(8):
            step(server)
            if i in (1, 7):
                copies.append(shutil.copytree(folder, tmp_path / f"copy{i}"))
    for copy in copies:
        with serve(copy) as server:
            step_until(server, ended(server, *tasks))
            for name in tasks:
                meter = server.status(name).meter
                assert server.status(name).state == "succeeded"
                for field in ("effective_tokens", "computed_tokens", "trained_tokens"):
                    assert getattr(meter, field) == getattr(meters[name], field)
        for name in tasks:
            assert adapter_bytes(copy / "adapters" / name) == adapters[name]


def test_commands_survive_the_end_of_the_process(tasks, serve, step_until, tmp_path):
    """No checkpoint is written between the commands and the end."""
    folder = tmp_path / "server"
    with serve(folder, checkpoint_every=1000) as server:
        for task in tasks.values():
            server.register(task)
        step_until(server, lambda: server.status("b").state == "running")
        server.pause("a")
        server.cancel("b")
        server.set_priority("d", 7)
        server.extend("d", 6)
        server.step()
        copy = shutil.copytree(folder, tmp_path / "copy")
    with serve(copy) as server:
        assert server.status("a").state == "paused"
        assert server.status("b").state == "cancelled"
        assert server.status("d").priority == 7
        step_until(server, ended(server, "c", "d"))
        assert server.status("d").step == 6
        server.resume("a")
        step_until(server, ended(server, "a"))


def test_a_command_that_cannot_be_written_is_not_carried_out(
    tasks, serve, step_until, tmp_path, monkeypatch
):
    with serve(tmp_path / "server") as server:
        server.register(tasks["a"])
        step_until(server, lambda: server.status("a").state == "running")

        def full(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(Database, "write", full)
            refused = [server.register(tasks["b"]), server.cancel("a")]
            server.step()
        for future in refused:
            with pytest.raises(OSError, match="No space left"):
                future.result(timeout=0)
        assert [status.name for status in server.statuses()] == ["a"]
        server.register(tasks["d"])
        step_until(server, ended(server, "a", "d"))


def test_a_damaged_database_is_named(tasks, serve, tmp_path):
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(tasks["a"])
        server.step()
    (folder / "server.db").write_bytes(b"damaged" * 1000)
    with pytest.raises(RunDirectoryError, match=r"server\.db: damaged .*; restore the folder"):
        with serve(folder):
            pass


def test_a_database_of_a_later_version_is_refused(serve, tmp_path):
    with serve(tmp_path / "server"):
        pass
    with closing(sqlite3.connect(tmp_path / "server" / "server.db")) as database, database:
        database.execute("UPDATE alembic_version SET version_num = '9999'")
    with pytest.raises(RunDirectoryError, match="version 9999, and this version of jaxmux knows"):
        with serve(tmp_path / "server"):
            pass


def test_migrations_lead_to_the_tables_that_are_used(tmp_path):
    """By Alembic's own comparison, with types and defaults."""
    with closing(Database(tmp_path / "server.db")) as database:
        context = MigrationContext.configure(database._connection)
        assert compare_metadata(context, METADATA) == []


def test_data_that_changed_fail_a_task_that_had_begun(
    make_task, serve, step_until, write_lines, tmp_path
):
    path = write_lines({"prompt": "apple", "completion": " red"})
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(make_task("mine", data=path, steps=50))
        step_until(server, lambda: server.status("mine").step > 1)
        server.save()
    write_lines({"prompt": "apple", "completion": " green"})
    with serve(folder) as server:
        step_until(server, ended(server, "mine"))
        status = server.status("mine")
    assert status.state == "failed"
    assert "the data of task 'mine' changed since the task began" in status.reason


def test_data_that_are_away_for_a_while_only_pause_a_task_that_had_begun(
    make_task, serve, step_until, write_lines, tmp_path
):
    path = Path(write_lines({"prompt": "apple", "completion": " red"}))
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(make_task("mine", data=str(path), steps=12))
        step_until(server, lambda: server.status("mine").step > 1)
        server.save()
    path.rename(tmp_path / "away")
    with serve(folder) as server:
        step_until(server, lambda: server.status("mine").state == "paused")
        assert "records.jsonl" in server.status("mine").reason
        (tmp_path / "away").rename(path)
        server.resume("mine")
        step_until(server, ended(server, "mine"))
        assert server.status("mine").state == "succeeded"


def test_what_has_ended_is_saved_before_the_server_waits(tasks, serve, tmp_path):
    with serve(tmp_path / "server", checkpoint_every=1000) as server:
        owner = threading.Thread(target=server.run)
        owner.start()
        events = server.events()
        server.register(tasks["d"]).result()
        for event in events:
            if event.kind == "state" and event.fields["state"] == "succeeded":
                break
        while server._saving.changed:
            time.sleep(0.01)
        server._store._writer.submit(lambda: None).result()
        copy = shutil.copytree(tmp_path / "server", tmp_path / "copy")
    with serve(copy) as server:
        assert server.status("d").state == "succeeded"


def test_two_servers_cannot_share_a_folder(serve, tmp_path):
    with serve(tmp_path / "server"):
        with pytest.raises(RunDirectoryError, match="in use by another process"):
            with serve(tmp_path / "server"):
                pass


def test_a_folder_of_somebody_else_is_refused(serve, tmp_path):
    (tmp_path / "thesis.txt").write_text("precious")
    with pytest.raises(RunDirectoryError, match="holds thesis.txt but no server.json"):
        with serve(tmp_path):
            pass
    assert (tmp_path / "thesis.txt").read_text() == "precious"


def test_events_are_lines_of_json(tasks, serve, step_until, tmp_path):
    with serve(tmp_path / "server") as server:
        server.register(tasks["d"])
        step_until(server, ended(server, "d"))
    lines = (tmp_path / "server" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["state"] for e in events if e["kind"] == "state"] == [
        *("preparing", "queued", "running", "succeeded")
    ]
    assert [e["task_step"] for e in events if e["kind"] == "update"] == [1, 2, 3, 4]
    assert events == sorted(events, key=lambda event: event["time"])


def test_the_context_waits_for_the_thread_that_trains(tasks, serve, tmp_path):
    with serve(tmp_path / "server") as server:
        owner = threading.Thread(target=server.run)
        owner.start()
        server.register(tasks["a"]).result()
    owner.join(timeout=10)
    assert not owner.is_alive()
    with serve(tmp_path / "server") as server:
        assert server.status("a").state != "cancelled"
