"""A server with a watched directory: how it starts, what it prints, and how it ends."""

import dataclasses
import functools
import io
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import gin
import pytest
from rich.console import Console

from jaxmux import (
    DPO,
    DoRA,
    Engine,
    Interrupted,
    LoRA,
    PlanningError,
    RunDirectoryError,
    Task,
    tuning_server,
)
from jaxmux.cli import gin_bindings
from jaxmux.cli.arguments import train_options
from jaxmux.cli.main import run_command
from jaxmux.errors import OutOfDeviceMemory
from jaxmux.runs.metrics import objects
from jaxmux.runs.run_directory import lock_state
from jaxmux.server import Meter, ServerOptions, StateChange, TaskStatus, serve
from jaxmux.server.console import ServerConsole
from jaxmux.server.inbox.accepted import Intake
from jaxmux.server.inbox.directory import Place, WatchedDirectory, WatchedDirectoryError
from jaxmux.server.inbox.status import Shown
from jaxmux.server.serving import with_fewer_places, within_pool
from jaxmux.specifications import TenantLimits

from .conftest import ROW, RUN, SERVER

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "watched_directory.md").read_text()
# Microbatches of one row, as an elastic server of the simulation has.
SIZES = SERVER | {"tokens_per_microbatch": ROW}
OPTIONS = ServerOptions(**SIZES)


@pytest.fixture(autouse=True)
def clean_gin():
    """gin's configuration is global."""
    yield
    gin.clear_config()


@pytest.fixture
def specify(tmp_path, data):
    """Writes a specification of a tenant, with its data."""

    def write(place: str, **fields) -> None:
        path = tmp_path / "inbox" / f"{place}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        (path.parent / "a.jsonl").write_text(Path(data["short"]).read_text())
        adapter = {"kind": "lora", "rank": 2, "target_modules": ["q_proj", "down_proj"]}
        defaults = {"name": path.stem, "data": "a.jsonl", "batch_size": 4, "adapter": adapter}
        path.write_text(json.dumps(defaults | {"steps": 3} | fields))

    return write


@pytest.fixture
def served(backbone, tmp_path):
    """Serves until a condition holds, then sends SIGTERM to this process. Returns what it
    printed."""

    def run(until, **options) -> str:
        printed = io.StringIO()
        console = ServerConsole(Console(file=printed, width=80), options.pop("log_every", None))
        done = threading.Event()

        def stop():
            while not done.is_set() and not until():
                time.sleep(0.02)
            if not done.is_set():
                os.kill(os.getpid(), signal.SIGTERM)

        thread = threading.Thread(target=stop)
        thread.start()
        try:
            with pytest.raises(Interrupted) as stopped:
                serve(
                    backbone,
                    tmp_path / "inbox",
                    tmp_path / "server",
                    OPTIONS,
                    TenantLimits(),
                    console=console,
                    every=0.02,
                    **options,
                )
        finally:
            done.set()
            thread.join()
        assert stopped.value.signal_number == signal.SIGTERM and stopped.value.saved
        return printed.getvalue()

    return run


def status_file(place: Path) -> Path:
    return place.with_suffix(".status.json")


def state_of(place: Path) -> str:
    path = status_file(place)
    return json.loads(path.read_text())["state"] if path.exists() else ""


def step_of(place: Path) -> int:
    path = status_file(place)
    return json.loads(path.read_text()).get("step", 0) if path.exists() else 0


def wait_until(condition, process: subprocess.Popen) -> None:
    """Waits for a condition while a server runs in another process."""
    end = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, f"ended too early: {process.communicate()}"
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def test_a_server_trains_until_a_signal_comes_and_goes_on_later(served, specify, tmp_path):
    specify("acme/short")
    specify("acme/long", steps=3000)
    specify("acme/wrong", steps=0)
    inbox, server = tmp_path / "inbox", tmp_path / "server"
    printed = served(lambda: state_of(inbox / "acme" / "short") == "succeeded", config_text="# x\n")
    lines = printed.splitlines()
    assert lines[1:3] == [f"watching {inbox}", "a task is a file TENANT/NAME.json in it"]
    assert "acme.long: running, 3000 steps" in lines
    assert any(
        re.fullmatch(r"acme.short: succeeded after 3 steps, loss \d\.\d{4}", x) for x in lines
    )
    assert f"adapter acme.short: {server}/adapters/acme.short" in lines
    assert sum("wrong.json: refused: steps should be" in line for line in lines) == 1
    assert "stopping after this round; a second signal stops at once" in lines
    assert len(lines) <= 9
    assert (server / "config.gin").read_text() == "# x\n"
    before = json.loads((inbox / "acme" / "long.status.json").read_text())["step"]
    trained = iter(lambda: json.loads((inbox / "acme" / "long.status.json").read_text())["step"], 0)
    printed = served(lambda: next(trained) > before + 3, log_every=1)
    assert "tasks of an earlier start: 1 preparing, 1 succeeded" in printed
    assert re.search(r"^acme.long step \d+/3000 loss \d", printed, re.MULTILINE)


def test_before_anything_was_trained_a_signal_need_not_wait(served, specify, monkeypatch):
    """The first round takes long."""
    specify("acme/one")
    begun, ended = threading.Event(), threading.Event()
    monkeypatch.setattr("jaxmux.server.serving._PATIENCE", 0.1)

    def round_of_compilation(self):
        begun.set()
        ended.wait(20)
        self._runner.carry_out()
        return False

    monkeypatch.setattr("jaxmux.server.LiveTraining.step", round_of_compilation)
    reasons = []

    def end_at_once(reason):
        reasons.append(reason)
        ended.set()

    began = time.monotonic()
    served(begun.is_set, end_at_once=end_at_once)
    assert time.monotonic() - began < 15
    assert str(reasons[0]) == "stopped by SIGTERM; nothing was trained since the start"


@pytest.mark.long
def test_an_error_of_training_ends_the_server(backbone, tmp_path, monkeypatch):
    def broken(self):
        raise ZeroDivisionError("broken")

    monkeypatch.setattr("jaxmux.server.LiveTraining.step", broken)
    quiet = ServerConsole(Console(quiet=True))
    with pytest.raises(ZeroDivisionError):
        serve(
            backbone,
            tmp_path / "inbox",
            tmp_path / "server",
            OPTIONS,
            TenantLimits(),
            console=quiet,
            every=0.02,
        )
    assert lock_state(tmp_path / "server").failure == "ZeroDivisionError: broken"


def test_a_server_without_memory_goes_on_with_half_of_its_places(
    served, specify, tmp_path, monkeypatch
):
    """Also where it cannot make room by itself, because the train state is lost."""
    specify("acme/one", steps=12)
    specify("acme/two", steps=12)
    inbox, train_round = tmp_path / "inbox", Engine.train_round
    sizes = []

    def full(engine, *arguments):
        if engine.size.slots == 3 and engine.rounds >= 4:
            raise OutOfDeviceMemory("the device ran out of memory")
        sizes.append(engine.size.slots)
        return train_round(engine, *arguments)

    def lost(engine):
        raise OutOfDeviceMemory("the device ran out of memory")

    monkeypatch.setattr(Engine, "train_round", full)
    with monkeypatch.context() as patched:
        patched.setattr(Engine, "resize", lambda *_: lost(None))
        printed = served(
            lambda: all(state_of(inbox / "acme" / n) == "succeeded" for n in ("one", "two"))
        )
    said = "the device ran out of memory; the server goes on from its last checkpoint with 1 place"
    assert printed.replace("\n", " ").count(said) == 1
    assert set(sizes) == {1, 3}
    status = json.loads(status_file(inbox / "acme" / "two").read_text())
    assert status["step"] == 12


@pytest.mark.long
def test_a_single_place_without_memory_is_the_end():
    tried = []

    def serve_with(options):
        tried.append(options.reserved_slots)
        try:
            raise OutOfDeviceMemory("full")
        except OutOfDeviceMemory as e:
            raise RuntimeError("training has ended with an exception") from e

    said = []
    with pytest.raises(RuntimeError, match="training has ended"):
        with_fewer_places(serve_with, dataclasses.replace(OPTIONS, reserved_slots=5), said.append)
    assert tried == [5, 2, 1] and len(said) == 2


def test_other_errors_do_not_take_places():
    def serve_with(options):
        raise RuntimeError("broken")

    with pytest.raises(RuntimeError, match="broken"):
        with_fewer_places(serve_with, OPTIONS, pytest.fail)


@pytest.mark.long
def test_a_server_that_does_not_fit_is_refused_before_anything_is_loaded(backbone, tmp_path):
    options = dataclasses.replace(OPTIONS, memory_gib=0.0003, remat="auto")
    with pytest.raises(PlanningError, match=r"a step of 3 slots of rank 4 .* needs .*, usable are"):
        with tuning_server(backbone, tmp_path / "server", options):
            pytest.fail("it has started")
    assert not (tmp_path / "server").exists()


def refusal(backbone, watched, run_dir) -> str:
    quiet = ServerConsole(Console(quiet=True))
    with pytest.raises((RunDirectoryError, WatchedDirectoryError)) as error:
        serve(backbone, watched, run_dir, OPTIONS, TenantLimits(), console=quiet)
    return str(error.value)


def test_files_of_tenants_and_of_the_server_are_apart(backbone, tmp_path):
    for watched, run_dir in (("a", "a/b"), ("a/b", "a"), ("a", "a")):
        found = refusal(backbone, tmp_path / watched, tmp_path / run_dir)
        assert "should be apart from the watched directory" in found
    assert list(tmp_path.iterdir()) == []


def test_a_watched_directory_has_one_server(backbone, tmp_path):
    inbox = tmp_path / "inbox"
    directory = WatchedDirectory(inbox, TenantLimits(), False)
    directory.begin()
    try:
        found = refusal(backbone, inbox, tmp_path / "server")
    finally:
        directory.close()
    assert f"watched directory {inbox}: in use by another process" in found


def test_another_directory_does_not_look_like_deleted_tasks(backbone, served, specify, tmp_path):
    specify("acme/one", steps=3000)
    inbox, run_dir = tmp_path / "inbox", tmp_path / "server"
    served(lambda: state_of(inbox / "acme" / "one") == "running")
    found = refusal(backbone, tmp_path / "other", run_dir)
    assert f"its tasks come from {inbox}, not from {tmp_path / 'other'}" in found
    # As if the disk were not mounted.
    inbox.rename(tmp_path / "aside")
    inbox.mkdir()
    assert ".lock is missing in it" in refusal(backbone, inbox, run_dir)
    inbox.rmdir()
    assert ".lock is missing in it" in refusal(backbone, inbox, run_dir)
    assert not inbox.exists() and not (tmp_path / "other").exists()


def test_a_refused_start_leaves_no_directory_behind(tmp_path):
    quiet = ServerConsole(Console(quiet=True))
    with pytest.raises(ValueError):
        serve(
            tmp_path / "nowhere",
            tmp_path / "inbox",
            tmp_path / "server",
            OPTIONS,
            TenantLimits(),
            console=quiet,
        )
    assert list(tmp_path.iterdir()) == []


def test_tenants_take_turns():
    intake = Intake(None, None, TenantLimits())
    places = [Place("a", str(i)) for i in range(4)] + [Place("b", "x"), Place("c", "y")]
    order = [f"{place.tenant}{place.name}" for place in intake.in_turns(places)]
    assert order == ["a0", "bx", "cy", "a1", "a2", "a3"]
    first = intake.in_turns(places)
    assert [next(first).tenant for _ in range(2)] == ["b", "c"]
    assert next(intake.in_turns(places)).tenant == "a"


def task_status(name: str, state: str, step: int = 0, **fields) -> TaskStatus:
    history = (StateChange(state, None, 0.0),)
    loss = 1.0 if step else None
    meter = Meter(effective_tokens=100 * step)
    default = TaskStatus(name, state, None, 0, step, 9, loss, None, None, 0.5, meter, history)
    return default._replace(**fields)


@pytest.mark.parametrize(
    ("names", "told"),
    [
        ("task 'acme.a'", "another tenant's task"),
        ("tasks 'acme.a', 'umbrella.b'", "other tenants' tasks"),
        ("tasks 'acme.a', 'beta.b'", "tasks 'beta.b' and others"),
        ("tasks 'beta.a', 'beta.b'", "tasks 'beta.a', 'beta.b'"),
    ],
)
def test_a_status_file_names_no_tasks_of_other_tenants(names, told):
    status = task_status("beta.e", "queued", reason=f"{names} of higher priority took places")
    shown = json.loads(Shown("beta.e", status).text())
    assert shown["reason"] == f"{told} of higher priority took places"


def test_the_table_fits_a_terminal_of_80_columns(monkeypatch):
    printed = io.StringIO()
    terminal = Console(file=printed, width=80, height=20, force_terminal=True)
    console = ServerConsole(terminal)
    waiting = [task_status(f"t.{i}", "queued") for i in range(30)]
    long = "t." + "x" * 98
    running = functools.partial(task_status, long, "running", rank=256)
    console.start([])
    console.show([running(1), *waiting], "adapters")
    later = time.monotonic() + 5
    monkeypatch.setattr(time, "monotonic", lambda: later)
    failed = task_status("t.b", "failed", reason="task 't.b': why\x1b[2J" + "y" * 1000)
    last = [running(6), *waiting, failed]
    console.show(last, "adapters")
    console.stop()
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", printed.getvalue())
    lines = text.splitlines()
    assert all(len(line) <= 80 for line in lines if "FAILED" not in line)
    assert "FAILED t.b: why\\x1b[2Jyyy" in text and "y" * 600 not in text
    # Five steps took five seconds, and three are left.
    assert re.search(r"t\.x+…x+ +running +256 +6/9 +1\.0000 +100 +0:00:0[34]", text)
    assert re.search(r"t\.0 +queued +0/9 +place 1 *\n", text)
    assert "20 more" in text
    # This line is longer than the table is wide.
    totals = r"1 running, 30 queued, 1 failed; \d+ tokens/s without padding"
    assert any(re.fullmatch(totals, line.strip()) for line in lines)


def test_the_console_forgets_what_the_server_forgets():
    console = ServerConsole(Console(quiet=True))
    console.start([task_status("t.a", "succeeded")])
    console.show([task_status("t.b", "running", 1), task_status("t.c", "succeeded")], "adapters")
    last = task_status("t.d", "running", 1)
    console.show([last], "adapters")
    assert console._statuses == {"t.d": last} and list(console._trained) == ["t.d"]


def test_there_is_no_table_without_tasks_that_train_or_wait():
    printed = io.StringIO()
    console = ServerConsole(Console(file=printed, width=80, force_terminal=True))
    console.start([])
    console.show([task_status("t.a", "succeeded")], "adapters")
    console.stop()
    assert "1 succeeded" in printed.getvalue() and "place" not in printed.getvalue()


def test_a_command_line_that_makes_no_sense_is_refused(capsys):
    for option, message in {
        "--restart": "a server continues, or gets a new --run_dir",
        "--distributed": "--watch serves in one process",
        "--watch=": "--watch should name a directory",
    }.items():
        with pytest.raises(SystemExit):
            train_options(["--watch=inbox", option], "jaxmux train")
        assert message in capsys.readouterr().err


def test_a_mistyped_watched_folder_is_not_created(tmp_path, capsys):
    (tmp_path / "inbox").mkdir()
    path = tmp_path / "inbx"
    assert run_command("train", [f"--watch={path}"], "jaxmux train") == 2
    assert f"--watch={path}: no such folder; did you mean inbox?" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["inbox"]


def test_a_config_is_for_training_or_for_a_server(write_config, tmp_path, capsys):
    serves = tmp_path / "serve.gin"
    serves.write_text("serve.backbone = 'b'\nTenantLimits.rank = 7\n")
    assert run_command("train", [f"--gin_file={serves}"], "jaxmux train") == 2
    assert "does not set fine_tune.backbone; it is one for --watch=DIR" in capsys.readouterr().err
    watch = f"--watch={tmp_path / 'inbox'}"
    assert run_command("train", [watch, f"--gin_file={write_config()}"], "jaxmux train") == 2
    assert "does not set serve.backbone, which --watch needs" in capsys.readouterr().err
    both = [watch, f"--gin_file={write_config()}", "--gin.serve.backbone='b'"]
    assert run_command("train", both, "jaxmux train") == 2
    assert "sets parameters of fine_tune, but with --watch tasks" in capsys.readouterr().err
    gin_bindings.parse([str(serves)], ["serve.reserved_slots=3"])
    config, limits = gin_bindings.serve_config()
    assert (config.backbone, config.reserved_slots, limits) == ("b", 3, TenantLimits(rank=7))
    (tmp_path / "resolved.gin").write_text(gin_bindings.resolved_serve_config())
    gin_bindings.parse([str(tmp_path / "resolved.gin")], [])
    assert gin_bindings.serve_config() == (config, limits)


def test_the_config_in_the_help_names_real_parameters(capsys, tmp_path):
    with pytest.raises(SystemExit):
        train_options(["--help"], "jaxmux train")
    example = capsys.readouterr().out.split("a config for --watch:")[1].split("\n\n")[0]
    path = tmp_path / "example.gin"
    path.write_text("\n".join(line.strip() for line in example.splitlines()))
    gin_bindings.parse([str(path)], [])
    config, limits = gin_bindings.serve_config()
    assert config.reserved_slots == 16 and limits.steps == 20_000


def test_the_status_of_the_documentation_has_the_keys_of_a_status(served, specify, tmp_path):
    specify("acme/billing", steps=3000)
    inbox = tmp_path / "inbox"
    served(lambda: state_of(inbox / "acme" / "billing") == "running")
    _, example = re.findall(r"```json\n(.*?)```", PAGE, flags=re.DOTALL)
    shown, found = json.loads(example), json.loads(status_file(inbox / "acme/billing").read_text())
    assert list(shown) == list(found)
    assert list(shown["meter"]) == list(found["meter"])
    assert list(shown["history"][0]) == list(found["history"][0])
    table = PAGE.split("| key | meaning |")[1].split("\n\n")[0]
    names = re.findall(r"^\|([^|]+)\|", table, re.MULTILINE)
    assert re.findall(r"`(\w+)`", "".join(names)) == list(found)


@pytest.mark.slow
def test_the_demo_serves_and_sigterm_saves_and_exits_with_143_within_10_seconds(tmp_path):
    """A second process is refused meanwhile."""
    tenant = tmp_path / "inbox" / "acme"
    tenant.mkdir(parents=True)
    source = ROOT / "jaxmux" / "demo" / "tasks" / "mood.train.jsonl"
    (tenant / "mood.jsonl").write_bytes(source.read_bytes())
    fields = {"name": "mood", "data": "mood.jsonl", "steps": 2000, "batch_size": 4}
    (tenant / "mood.json").write_text(json.dumps(fields | {"adapter": {"kind": "lora", "rank": 4}}))
    command = [sys.executable, "-m", "jaxmux.train", "--watch=inbox"]
    where = {"cwd": tmp_path, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    process = subprocess.Popen(command, **where)
    try:
        wait_until(lambda: step_of(tenant / "mood") > 0, process)
        second = subprocess.run(command, **where, timeout=60)
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        out, error = process.communicate(timeout=30)
        seconds = time.monotonic() - began
    finally:
        process.kill()
    assert second.returncode == 2
    assert "watched directory " in second.stderr and "in use by another process" in second.stderr
    assert process.returncode == 143, error
    assert seconds < 10
    assert error.splitlines()[-1].startswith("stopped by SIGTERM; ")
    assert "Traceback" not in error
    assert out.startswith("no --gin_file: serving the demo's model (")
    # What was trained is saved.
    assert "state saved, the same command continues from here" in error
    assert any((tmp_path / "runs" / "demo_server" / "checkpoints").iterdir())


@pytest.mark.slow
def test_a_server_that_is_killed_ends_with_the_adapter_of_a_calm_one(
    backbone, specify, pairs, adapter_bytes, tmp_path, monkeypatch, capsys
):
    """SIGKILL, some rounds after a checkpoint, between two turns of a global batch of DPO. Before,
    a second server is refused; later, the same command goes on in this process and is stopped by
    SIGTERM. CI crashes servers at their system calls, in test_crash_points.py."""
    steps = {"one": 60, "two": 50, "pairs": 18}
    for name in ("one", "two"):
        specify(f"acme/{name}", steps=steps[name])
    inbox, server = tmp_path / "inbox", tmp_path / "server"
    (inbox / "acme" / "pairs.jsonl").write_text(Path(pairs["train"]).read_text())
    of_pairs = {"data": "pairs.jsonl", "batch_size": 9, "objective": {"kind": "dpo"}}
    specify("acme/pairs", steps=steps["pairs"], **of_pairs)
    options = SIZES | {"checkpoint_every": 4, "round_tokens": 64}
    settings = [f"--gin.serve.{name}={value!r}" for name, value in options.items()]
    gin_file = tmp_path / "server.gin"
    gin_file.write_text(f"serve.backbone = {str(backbone)!r}\n")
    arguments = [f"--watch={inbox}", f"--run_dir={server}", f"--gin_file={gin_file}", *settings]
    command = [sys.executable, "-m", "jaxmux.train", *arguments]
    # JAX does not write its cache atomically, so what is killed only reads it.
    environment = os.environ | {"JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "1e9"}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(command, env=environment, **pipes)

    def updates(folder):
        events = objects((folder / "events.jsonl").read_bytes())
        return [event for event in events if event["kind"] == "update"]

    def saved_and_beyond():
        saved = [p.name for p in server.glob("checkpoints/*") if p.name.isdigit()]
        return saved and len(updates(server)) > 8

    def stopped_within_a_batch_of_pairs():
        process.send_signal(signal.SIGSTOP)
        rounds = [line["round"] for line in objects((server / "rounds.jsonl").read_bytes())]
        of_pairs = [update["step"] for update in updates(server) if update["task"] == "acme.pairs"]
        if len(of_pairs) > 2 and max(rounds) > max(of_pairs):
            return True
        process.send_signal(signal.SIGCONT)
        return False

    try:
        wait_until(saved_and_beyond, process)
        wait_until(stopped_within_a_batch_of_pairs, process)
        assert run_command("train", arguments, "jaxmux train") == 2
        error = capsys.readouterr().err
        assert lock_state(server).holder == "alive"
        assert "watched directory " in error and "in use by another process" in error
    finally:
        process.kill()
        output, _ = process.communicate()
    assert process.returncode == -signal.SIGKILL, output
    assert lock_state(server).holder == "killed"
    assert not (server / "adapters").exists(), "it was killed too late"

    signalled = []

    def stop():
        while not all(state_of(inbox / "acme" / name) == "succeeded" for name in steps):
            time.sleep(0.02)
        signalled.append(time.monotonic())
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr("jaxmux.cli.train_command._end_at_once", pytest.fail)
    thread = threading.Thread(target=stop, daemon=True)
    thread.start()
    assert run_command("train", arguments, "jaxmux train") == 143
    assert time.monotonic() - signalled[0] < 10
    thread.join()
    assert lock_state(server).holder == "ended"
    printed, error = capsys.readouterr()
    assert "tasks of an earlier start: 3 preparing" in printed
    assert error.splitlines()[-1].startswith("stopped by SIGTERM; state saved, the same command")
    assert "Traceback" not in error
    adapter = LoRA(rank=2, target_modules=("q_proj", "down_proj"))
    # Sums of the gradients of other turns would have another order.
    calmly = dataclasses.replace(OPTIONS, round_tokens=options["round_tokens"])
    with tuning_server(backbone, tmp_path / "calm", calmly, say=print) as calm:
        for name, own in steps.items():
            data, fields = str(inbox / "acme" / "a.jsonl"), {"batch_size": 4}
            if name == "pairs":
                data = str(inbox / "acme" / "pairs.jsonl")
                fields = {"batch_size": 9, "objective": DPO()}
            calm.register(Task(f"acme.{name}", data, adapter, steps=own, **fields))
        calm.step()
        while any(status.state != "succeeded" for status in calm.statuses()):
            calm.step()
    expected = adapter_bytes(tmp_path / "calm" / "adapters")
    assert len(expected) >= 6 and adapter_bytes(server / "adapters") == expected
    # Updates after the last checkpoint were written before the kill, and again after it.
    killed, calm = (
        {
            (update["task"], update["task_step"]): (update["loss"], update.get("metrics"))
            for update in updates(folder)
        }
        for folder in (server, tmp_path / "calm")
    )
    assert killed == calm and len(calm) == sum(steps.values())


def test_without_a_config_the_model_of_the_demo_is_served(tmp_path, monkeypatch, capsys):
    served = []

    def serve(*arguments, **_):
        served.append(arguments)
        raise Interrupted(signal.SIGTERM, saved=True)

    monkeypatch.chdir(tmp_path)
    (tmp_path / "inbox").mkdir()
    monkeypatch.setattr("jaxmux.cli.train_command.serve", serve)
    assert run_command("train", ["--watch=inbox"], "jaxmux train") == 143
    ((backbone, watched, run_dir, *_),) = served
    assert (backbone, watched, str(run_dir)) == ("jaxmux:demo/base", "inbox", "runs/demo_server")
    assert capsys.readouterr().out.startswith("no --gin_file: serving the demo's model (")


def test_tenants_may_ask_for_the_ranks_of_the_pool():
    pissa = LoRA(12, initialisation="pissa")
    for adapters, rank in (((), 16), ((DoRA(8),), 16), ((DoRA(20), pissa), 24), ((pissa,), 24)):
        options = ServerOptions(**RUN, reserved_rank=16, reserved_adapters=adapters)
        assert within_pool(TenantLimits(), options).rank == rank
        assert within_pool(TenantLimits(rank=5), options).rank == 5
