"""Faults of the disk that a server survives: each test is one of those that simulations found."""

import json
import resource
import shutil

import jax
import numpy as np
import pytest

from jaxmux import SGD, AdamW, Lion
from jaxmux.server.saving import Saving
from jaxmux.server.server import ServerOptions, tuning_server
from jaxmux.server.store import ServerStore

from .crash_images import copy_now
from .server_steps import finish, settle, step, step_until
from .simulated_disk import SimulatedDisk
from .simulated_tasks import OPTIONS
from .simulated_tasks import make_task as simulated_task


@pytest.fixture(scope="module")
def serve(backbone):
    """Opens a server on the tiny backbone."""

    def open_server(folder, said=None, **options):
        chosen = ServerOptions(**OPTIONS | options)
        return tuning_server(
            backbone, folder, chosen, say=[].append if said is None else said.append
        )

    return open_server


@pytest.fixture(scope="module")
def task(make_task, data):
    def make(name, **fields):
        fields = {} if "epochs" in fields else {"steps": 6} | fields
        return make_task(name, **fields) if fields else make_task(name, epochs=2)

    return make


def test_commands_after_a_checkpoint_that_was_not_completed_hold(
    serve, task, tmp_path, monkeypatch
):
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(task("a"))
        step(server)
        with monkeypatch.context() as patch:
            patch.setattr(ServerStore, "_write_checkpoint", lambda *_: None)
            server.save()
        server.pause("a")
        step(server)
    with serve(folder) as server:
        server.resume("a")
        server.step()
        copy = shutil.copytree(folder, tmp_path / "copy")
    with serve(copy) as server:
        assert server.status("a").state != "paused"


def test_a_damaged_only_checkpoint_gives_way_to_the_beginning(serve, task, tmp_path):
    folder, said = tmp_path / "server", []
    with serve(folder) as server:
        server.register(task("a"))
        step(server, 3)
        server.save()
        server.set_priority("a", 4)
        step(server)
        copy = shutil.copytree(folder, tmp_path / "copy")
    (copy / "checkpoints" / "1" / "run" / "metadata").write_text("{")
    with serve(copy, said) as server:
        assert server.status("a").priority == 4
        finish(server)
        status = server.status("a")
    assert (status.state, status.step) == ("succeeded", 6)
    assert "the checkpoint of step 1 is damaged" in said[0]
    assert said[0].endswith("its tasks begin anew")
    # The table knows of its steps before the crash.
    assert status.meter.recomputed_tokens > 0


@pytest.mark.parametrize("lost", ["place", "paused"])
def test_a_task_that_is_extended_after_its_last_step_was_dispatched_trains_on(
    lost, serve, task, tmp_path
):
    with serve(tmp_path / "server") as server:
        # They leave one place to the others.
        for name in ("long", "longer"):
            server.register(task(name, steps=1000), priority=2)
        server.register(task("a", steps=2))
        step_until(server, "a", 1)
        # Its last step has been dispatched, and its result has not been fetched.
        assert (server.status("a").state, server.status("a").step) == ("running", 1)
        if lost == "place":
            server.register(task("b", steps=3), priority=1)
            server._runner.carry_out()
            settle(server)
        else:
            server.pause("a")
        step(server)
        assert server.status("a").state in ("queued", "paused")
        assert server.status("a").step == 2
        server.extend("a", 4)
        step(server)
        for name in ("long", "longer"):
            server.cancel(name)
        if lost == "paused":
            server.resume("a")
        finish(server)
        assert (server.status("a").state, server.status("a").step) == ("succeeded", 4)


@pytest.mark.parametrize("restart", [False, True])
def test_a_task_whose_patience_ended_with_its_last_step_is_not_extended_beyond_it(
    restart, serve, tmp_path, data
):
    """It was paused when its last step had been dispatched."""
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(simulated_task("patient", "a", 3, data))
        step_until(server, "a", 2)
        assert server.status("a").step == 2
        server.pause("a")
        step(server)
        assert (server.status("a").state, server.status("a").step) == ("paused", 3)
        if not restart:
            server.extend("a", 7)
            step(server)
        server.save()
    with serve(folder) as server:
        settle(server)
        if restart:
            step(server)
            server.extend("a", 7)
        server.resume("a")
        finish(server)
        status = server.status("a")
    assert (status.state, status.step, status.best_step) == ("stopped early", 3, 1)
    assert "without a lower one than after step 1" in status.reason


def test_a_learning_rate_of_a_million_ends_in_time_and_reaches_no_other_task(
    serve, task, tmp_path, adapter_bytes
):
    """With steps enough the task fails. With fewer it gives numbers that are finite, if useless."""
    ruined = [
        task(f"{kind.__name__}-{steps}", steps=steps, optimizer=kind(1e6))
        for kind in (AdamW, SGD, Lion)
        for steps in (2, 1000)
    ]
    folders = [tmp_path / "alone", tmp_path / "beside"]
    for folder, others in zip(folders, ([], ruined), strict=True):
        with serve(folder) as server:
            for own in (task("a", steps=20), *others):
                server.register(own)
            finish(server)
            assert server.status("a").state == "succeeded"
            for own in others:
                status = server.status(own.name)
                if own.steps == 2:
                    assert (status.state, status.step) == ("succeeded", 2)
                    leaves = jax.tree.leaves(server.adapter(own.name))
                    assert all(np.isfinite(leaf).all() for leaf in leaves)
                else:
                    assert status.state == "failed" and status.step < 20
                    assert "not finite in 3 consecutive updates" in status.reason
    alone, beside = (adapter_bytes(folder / "adapters" / "a") for folder in folders)
    assert alone == beside


def test_epochs_cannot_be_cut_short_before_their_data_are_read_again(serve, task, tmp_path):
    folder = tmp_path / "server"
    with serve(folder) as server:
        server.register(task("a", epochs=2))
        step(server, 6)
        server.save()
        trained = server.status("a").step
        assert trained > 2
    with serve(folder) as server:
        refused = server.extend("a", 2)
        finish(server)
        assert "it has 8 steps already" in str(refused.exception(timeout=0))
        assert (server.status("a").state, server.status("a").step) == ("succeeded", 8)


def test_steps_that_are_computed_a_third_time_count_as_recomputed(serve, task, tmp_path):
    folder = tmp_path / "server"
    with serve(folder, checkpoint_every=1000) as server:
        server.register(task("a"))
        step(server, 6)
        copy = shutil.copytree(folder, tmp_path / "copy")
    with serve(copy, checkpoint_every=1000) as server:
        settle(server)
        step(server, 3)
        assert 0 < server.status("a").step < 4
        last = shutil.copytree(copy, tmp_path / "last")
    with serve(last) as server:
        finish(server)
        meter = server.status("a").meter
    events = [json.loads(line) for line in (last / "events.jsonl").read_text().splitlines()]
    first = [event for event in events if event["kind"] == "update"][:4]
    assert meter.recomputed_tokens >= sum(event["computed_tokens"] for event in first)


def test_a_full_disk_stops_neither_training_nor_the_next_checkpoint(
    serve, task, tmp_path, monkeypatch
):
    disk, said, folder = SimulatedDisk(monkeypatch, tmp_path), [], tmp_path / "server"
    with serve(folder, said, checkpoint_every=2) as server:
        # It ends while the disk is full, however soon it began.
        server.register(task("a", steps=6))
        server.register(task("b", steps=9))
        step(server, 4)
        disk.full = "partly"
        step(server, 6)
        # A success that a crash would undo is none yet.
        status = server.status("a")
        assert (status.step, status.state) == (6, "running")
        assert status.reason == "its end is being written to disk"
        disk.full = False
        step(server, 2)
        server.save()
        assert server.status("a").state == "succeeded"
        before = server.status("b")
    assert any("adapter a: cannot be written yet" in line for line in said)
    assert any("server.db: cannot be written (No space left on device)" in line for line in said)
    # The line that the full disk cut off spoils no other.
    logs = [(folder / name).read_text() for name in ("events.jsonl", "rounds.jsonl")]
    lines = [line for log in logs for line in log.splitlines()]
    spoiled = [line for line in lines if not line.endswith("}")]
    assert len(spoiled) == 1
    with serve(folder) as server:
        assert server.status("b").step == before.step
        assert server.status("b").meter == before.meter
        server.adapter("a")
        finish(server)


@pytest.mark.parametrize("fails", ["server.db", "checkpoint 2"])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_disk_that_takes_no_more_bytes_leaves_what_was_written_intact(
    fails, serve, task, tmp_path, monkeypatch
):
    """The limit on the size of files holds for writes of C and C++ too."""
    folder, said = tmp_path / "server", []
    with serve(folder, said) as server:
        server.register(task("a", steps=30))
        step(server, 3)
        server.save()
        settle(server)
        saved = server.status("a").step
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (256, limits[1]))
        try:
            with monkeypatch.context() as patch:
                if fails != "server.db":
                    # Without the table there is no checkpoint.
                    patch.setattr(Saving, "write", lambda *_: None)
                step(server, 2)
                server.save()
                settle(server)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert any(f"{fails}: cannot be written" in line for line in said), said
        copy = copy_now(folder, tmp_path / "copy")
        step(server)
        server.save()
        settle(server)
        later = server.status("a").step
    with serve(copy) as server:
        assert server.status("a").step == saved
    with serve(folder) as server:
        assert server.status("a").step == later


def test_what_a_full_disk_refused_is_written_at_the_end(serve, task, tmp_path, monkeypatch):
    disk, folder = SimulatedDisk(monkeypatch, tmp_path), tmp_path / "server"
    with serve(folder) as server:
        server.register(task("a"))
        step(server, 2)
        disk.full = True
        while server.status("a").step < 6:
            step(server)
        step(server, 3)
        server.save()
        assert server.status("a").state == "running"
        assert "adapter a: cannot be written yet" in server.problem
        assert "server.db: cannot be written" in server.problem
        disk.full = False
        server.save()
        assert server.status("a").state == "succeeded" and server.problem is None
    with serve(folder) as server:
        assert server.status("a").state == "succeeded"
        server.adapter("a")


def test_a_final_save_waits_for_the_one_before(serve, task, tmp_path, monkeypatch):
    disk, folder = SimulatedDisk(monkeypatch, tmp_path), tmp_path / "server"
    with serve(folder, checkpoint_every=2) as server:
        server.register(task("a", steps=30))
        step(server, 2)
        disk.slow = True
        for _ in range(6):
            server.step()
        disk.slow = False
        server.save()
        status = server.status("a")
    with serve(folder) as server:
        assert server.status("a").step == status.step


def test_a_loss_of_power_spares_names_and_adapters(serve, task, tmp_path, monkeypatch):
    """Only checkpoints, which have checksums, and the logs may lose what was written last."""
    disk, folder = SimulatedDisk(monkeypatch, tmp_path), tmp_path / "server"
    with serve(folder) as server:
        server.register(task("a", steps=2))
        finish(server)
        server.save()
        settle(server)
        contents, entries = disk.unsynced(folder)
    lost = {path.relative_to(folder).parts[0] for path in (*contents, *entries)}
    assert lost <= {".lock", "checkpoints", "events.jsonl", "rounds.jsonl"}


def test_a_folder_whose_record_was_half_written_is_used(serve, task, tmp_path):
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / ".server.json.partial").write_text('{"form')
    with serve(tmp_path / "server") as server:
        server.register(task("a", steps=1))
        finish(server)


def test_a_paused_task_shows_its_steps_when_its_data_have_been_read(serve, task, tmp_path):
    with serve(tmp_path / "server") as server:
        server.register(task("a", epochs=2))
        server.pause("a")
        step(server, 2)
        assert server.status("a").steps == 8
