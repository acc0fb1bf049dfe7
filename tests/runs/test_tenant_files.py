"""A tenant's files are read inside the tenant's folder only, within limits, and copied whole."""

import json
import os
import random
import re
import shutil
import socket
import threading
from contextlib import nullcontext, suppress
from pathlib import Path

import pytest

from jaxmux.data import load_tokenizer
from jaxmux.engine import prepare_task
from jaxmux.models import BackboneConfig
from jaxmux.peft import LoRA, export_adapter, initial_adapter, resolve_targets
from jaxmux.specifications import SpecificationLimits, copy_files, files, task_from_json
from jaxmux.specifications.files import open_inside
from jaxmux.tasks import Task, TaskError

LIMITS = SpecificationLimits(data_bytes=100, record_bytes=30, records=4, adapter_bytes=50)
SECRET = '{"text": "secret"}\n'
ROWS = '{"text": "one"}\n{"text": "two"}\n'


@pytest.fixture
def place(tmp_path) -> Path:
    """A folder with the tenant's folder "mine" and a file of another tenant."""
    (tmp_path / "other.jsonl").write_text(SECRET)
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "a.jsonl").write_text(SECRET)
    mine = tmp_path / "mine"
    (mine / "in").mkdir(parents=True)
    (mine / "in" / "a.jsonl").write_text(ROWS)
    return tmp_path


def specification(**fields) -> str:
    return json.dumps({"name": "t", "data": "in/a.jsonl", "steps": 1} | fields)


def read(place: Path, limits: SpecificationLimits = LIMITS, **fields) -> Task:
    return task_from_json(specification(**fields), place / "mine", limits=limits)


def write_adapter(place: Path, weights: bytes = b"w" * 20, **changes) -> None:
    folder = place / "mine" / "start"
    folder.mkdir()
    settings = {"r": 16, "target_modules": ["q_proj"], "peft_type": "LORA"} | changes
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter_model.safetensors").write_bytes(weights)


def test_paths_are_absolute_and_inside_the_folder(place):
    write_adapter(place)
    task = read(place, eval_data="in/a.jsonl", resume_from="start")
    inside = place / "mine"
    assert task.data.path == task.eval_data.path == str(inside / "in" / "a.jsonl")
    assert task.resume_from == str(inside / "start")


def test_the_tenants_folder_itself_may_be_reached_through_a_link(place):
    (place / "link").symlink_to(place / "mine")
    task = task_from_json(specification(), place / "link")
    assert task.data.path == str(place / "mine" / "in" / "a.jsonl")


def link_to_file(mine: Path) -> None:
    (mine / "x.jsonl").symlink_to(mine.parent / "other.jsonl")


def link_inside(mine: Path) -> None:
    (mine / "x.jsonl").symlink_to("in/a.jsonl")


def dangling_link(mine: Path) -> None:
    (mine / "x.jsonl").symlink_to("nothing")


def link_loop(mine: Path) -> None:
    (mine / "x.jsonl").symlink_to("x.jsonl")


def link_to_process(mine: Path) -> None:
    (mine / "x.jsonl").symlink_to("/proc/self/environ")


def hard_link(mine: Path) -> None:
    (mine / "x.jsonl").hardlink_to(mine.parent / "other.jsonl")


def fifo(mine: Path) -> None:
    os.mkfifo(mine / "x.jsonl")


def folder(mine: Path) -> None:
    (mine / "x.jsonl").mkdir()


def unix_socket(mine: Path) -> None:
    here = os.getcwd()
    os.chdir(mine)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind("x.jsonl")
    finally:
        os.chdir(here)


REFUSED = {
    link_to_file: "found a symbolic link",
    link_inside: "found a symbolic link",
    dangling_link: "found a symbolic link",
    link_loop: "found a symbolic link",
    link_to_process: "found a symbolic link",
    hard_link: "has 2 hard links, so it may be somebody else's",
    fifo: "found a FIFO",
    folder: "found a folder",
    unix_socket: "found a socket",
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize(("make", "problem"), REFUSED.items(), ids=lambda v: str(v)[:20])
def test_anything_but_a_regular_file_of_its_own_is_refused(make, problem, place):
    make(place / "mine")
    for key in ("data", "eval_data"):
        with pytest.raises(TaskError, match=f"^specification: {key}: .*'x.jsonl'.*{problem}"):
            read(place, **{key: "x.jsonl"})


def test_a_link_in_the_middle_of_a_path_is_refused(place):
    (place / "mine" / "out").symlink_to(place / "other")
    with pytest.raises(TaskError, match="'out' should be a folder, found a symbolic link"):
        read(place, data="out/a.jsonl")


def test_a_folder_of_an_adapter_may_be_no_link(place):
    write_adapter(place)
    (place / "mine" / "start").rename(place / "other" / "start")
    (place / "mine" / "start").symlink_to(place / "other" / "start")
    with pytest.raises(TaskError, match="resume_from: 'start' should be a folder, found a symb"):
        read(place, resume_from="start")


@pytest.mark.parametrize("path", ["", "/etc/passwd", "..", "a/../b", "a//b", "./a", "a\0b", "a/"])
def test_opening_itself_refuses_paths_that_lead_out(path, place):
    with pytest.raises(TaskError, match="is no path inside"):
        open_inside(place / "mine", path, 100, "here")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(place):
    (place / "mine" / "in" / "a.jsonl").chmod(0)
    with pytest.raises(TaskError, match="'in/a.jsonl' cannot be opened .Permission denied"):
        read(place)


@pytest.mark.parametrize(
    ("path", "target"), [("in", "other"), ("in/a.jsonl", "other.jsonl"), ("in/a.jsonl", "fifo")]
)
def test_what_is_swapped_between_check_and_opening_is_refused(path, target, place, monkeypatch):
    os.mkfifo(place / "fifo")
    check = files._require

    def check_then_swap(part, *arguments):
        check(part, *arguments)
        if part == Path(path).name:
            (place / "mine" / path).rename(place / "moved")
            if target == "fifo":
                (place / target).rename(place / "mine" / path)
            else:
                (place / "mine" / path).symlink_to(place / target)

    monkeypatch.setattr(files, "_require", check_then_swap)
    with pytest.raises(TaskError, match="'in/a.jsonl' (cannot be opened|should be a file)"):
        open_inside(place / "mine", "in/a.jsonl", 100, "here")


def test_a_folder_that_a_thread_swaps_for_a_link_never_leads_out(place):
    mine, stop = place / "mine", threading.Event()

    def swap() -> None:
        while not stop.is_set():
            (mine / "in").rename(mine / "away")
            (mine / "in").symlink_to(place / "other")
            (mine / "in").unlink()
            (mine / "away").rename(mine / "in")

    thread = threading.Thread(target=swap)
    thread.start()
    try:
        for _ in range(3000):
            with suppress(TaskError), open_inside(mine, "in/a.jsonl", 100, "here") as file:
                assert file.read() == ROWS.encode()
    finally:
        stop.set()
        thread.join()


def test_files_stay_closed_after_refusals(place):
    fifo(place / "mine")
    before = len(os.listdir("/proc/self/fd")) if Path("/proc/self/fd").exists() else None
    for path in ("in/a.jsonl", "x.jsonl", "in", "in/b", "b/c"):
        with pytest.raises(TaskError):
            open_inside(place / "mine", path, 3, "here")
    if before is not None:
        assert len(os.listdir("/proc/self/fd")) == before


LARGE = {
    "bytes": ("{}\n" * 40, "has 120 bytes; expected at most 100"),
    "a line": ("{}\n" + " " * 31, "line 2 of in/a.jsonl has more than 30 bytes"),
    "lines": ("{}\n" * 5, "in/a.jsonl has more than 4 lines"),
    "blank lines": ("\n" * 5, "in/a.jsonl has more than 4 lines"),
}


@pytest.mark.parametrize(("content", "problem"), LARGE.values(), ids=LARGE)
def test_data_beyond_a_limit_is_refused(content, problem, place):
    (place / "mine" / "in" / "a.jsonl").write_text(content)
    with pytest.raises(TaskError, match=problem):
        read(place)


def test_data_at_the_limits_is_accepted(place):
    (place / "mine" / "in" / "a.jsonl").write_text(" " * 29 + "\n" + "{}\n" * 3)
    read(place)


@pytest.mark.parametrize("before", ["", "\n \n\t", "\ufeff", "\ufeff\n "])
def test_an_array_is_refused_because_limits_count_lines(before, place):
    path = place / "mine" / "in" / "a.json"
    path.write_text(f'{before}[{{"text": "a"}}]\n')
    with pytest.raises(TaskError, match="in/a.json holds a JSON array; write one object per line"):
        read(place, data="in/a.json")
    path.write_text(f'{before}{{"text": "[a"}}\n[\n')
    assert read(place, data="in/a.json").data.path == str(path)
    (place / "mine" / "in" / "a.jsonl").write_text("[1]\n")
    # Never read as an array, and so refused or left out with its line.
    read(place)


def test_epochs_that_are_too_many_steps_are_refused(place):
    limits = SpecificationLimits(steps=10)
    read(place, limits, steps=None, epochs=10, batch_size=2)
    with pytest.raises(TaskError, match="epochs=6 of 2 records .* up to 12 steps; .* at most 10"):
        read(place, limits, steps=None, epochs=6, batch_size=1)


BAD_ADAPTERS = {
    "another rank": ({"r": 8}, "r should be the rank of the task, 16, found 8"),
    "a rank beyond memory": ({"r": 10**12}, "r should be the rank of the task"),
    "no rank": ({"r": None}, "found null"),
    "an expression": ({"target_modules": "(.*)*x"}, "target_modules should be .*no regular"),
    "no modules": ({"target_modules": None}, "target_modules should be"),
    "another kind": (
        {"peft_type": "IA3", "feedforward_modules": "(.*)*x"},
        "holds no adapter of the kind 'lora'",
    ),
    "ranks of its own": ({"rank_pattern": {"(.*)*x": 4}}, "holds no adapter of the kind 'lora'"),
    "infinity": ({"lora_alpha": float("inf")}, "holds Infinity"),
    "large settings": ({"more": "x" * 70_000}, "bytes; expected at most 65536"),
}


@pytest.mark.parametrize(("changes", "problem"), BAD_ADAPTERS.values(), ids=BAD_ADAPTERS)
def test_settings_of_an_adapter_are_checked_before_it_is_loaded(changes, problem, place):
    write_adapter(place, **changes)
    with pytest.raises(TaskError, match=f"resume_from: .*adapter_config.json.*{problem}"):
        read(place, resume_from="start")


def test_a_task_that_begins_with_its_data_goes_on_from_its_largest_rank(place):
    write_adapter(place, r=24)
    eva = {"kind": "lora", "rank": 16, "initialisation": "eva", "eva_rho": 1.5}
    read(place, resume_from="start", adapter=eva)
    with pytest.raises(TaskError, match="r should be the rank of the task, 32, found 24"):
        read(place, resume_from="start", adapter=eva | {"eva_rho": 2.0})


def test_a_folder_of_pissa_is_said_to_be_a_lora_of_twice_the_rank(place):
    write_adapter(place, r=8, lora_alpha=12.0)
    pissa = {"kind": "lora", "rank": 4, "alpha": 6.0, "initialisation": "pissa"}
    with pytest.raises(TaskError) as caught:
        read(place, resume_from="start", adapter=pissa)
    found = re.search(
        "no adapter of the kind 'lora_from_weights', which folders hold as one of the kind 'lora'; "
        "to go on from such a folder, ask for an adapter with ({.*})$",
        str(caught.value),
    )
    changes = json.loads(found[1])
    assert changes == {"rank": 8, "alpha": 12.0, "initialisation": "kaiming"}
    read(place, resume_from="start", adapter=pissa | changes)
    shutil.rmtree(place / "mine" / "start")
    write_adapter(place, peft_type="IA3")
    with pytest.raises(TaskError, match="kind 'lora_from_weights'$"):
        read(place, resume_from="start", adapter=pissa)


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        ([5], None),
        ([5, 3], r"should be those of the task, \[5\], found \[5, 3\]"),
        ({"lm_head": [5]}, "expected a list of tokens of 'embed_tokens' only"),
    ],
    ids=str,
)
def test_trained_tokens_of_an_adapter_are_those_of_the_task(found, problem, place):
    write_adapter(place, trainable_token_indices=found)
    task = {"resume_from": "start", "adapter": {"kind": "lora", "trained_tokens": [5]}}
    with pytest.raises(TaskError, match=problem) if problem else nullcontext():
        read(place, **task)


def test_large_weights_are_refused(place):
    write_adapter(place, weights=bytes(51))
    with pytest.raises(TaskError, match="start/adapter_model.safetensors' has 51 bytes"):
        read(place, resume_from="start")


def test_pickled_weights_are_never_opened(place):
    write_adapter(place)
    weights = place / "mine" / "start" / "adapter_model.safetensors"
    weights.rename(weights.with_suffix(".bin"))
    with pytest.raises(TaskError, match="adapter_model.safetensors' cannot be opened"):
        read(place, resume_from="start")


def test_a_copy_has_the_same_files_and_task_wherever_the_tenant_goes(place):
    write_adapter(place)
    store = place / "store" / "t"
    text = specification(eval_data="in/a.jsonl", resume_from="start")
    task = copy_files(
        task_from_json(text, place / "mine", limits=LIMITS), place / "mine", store, LIMITS
    )
    found = {p.relative_to(store).as_posix() for p in store.rglob("*") if p.is_file()}
    adapter = {"start/adapter_config.json", "start/adapter_model.safetensors"}
    assert found == {"in/a.jsonl"} | adapter
    for name in found:
        assert (store / name).read_bytes() == (place / "mine" / name).read_bytes()
    shutil.rmtree(place / "mine")
    assert task_from_json(text, store, limits=LIMITS) == task
    assert (store.stat().st_mode & 0o077) == 0


def test_a_copy_checks_what_it_copies(place):
    task = read(place)
    (place / "mine" / "in" / "a.jsonl").unlink()
    (place / "mine" / "in" / "a.jsonl").symlink_to(place / "other.jsonl")
    with pytest.raises(TaskError, match="^t.json: data: .*found a symbolic link"):
        copy_files(task, place / "mine", place / "store" / "t", LIMITS)
    assert not list((place / "store").iterdir())


@pytest.mark.parametrize("name", ["in/a.jsonl", "start/adapter_model.safetensors"])
def test_a_file_that_grows_while_it_is_copied_is_refused(name, place, monkeypatch):
    write_adapter(place)
    task = read(place, resume_from="start")
    opened = files.open_inside

    def grown(folder, path, *arguments):
        file = opened(folder, path, *arguments)
        if path == name:
            with (Path(folder) / path).open("ab") as more:
                more.write(b"{}\n" * 3 + b"          {}\n" * 100)
        return file

    monkeypatch.setattr(files, "open_inside", grown)
    limits = SpecificationLimits(data_bytes=100, adapter_bytes=50)
    with pytest.raises(TaskError, match=f"{name} grew beyond"):
        copy_files(task, place / "mine", place / "store" / "t", limits)
    assert not list((place / "store").iterdir())


def test_a_copy_replaces_nothing(place):
    (place / "store").mkdir()
    with pytest.raises(FileExistsError, match="exists already"):
        copy_files(read(place), place / "mine", place / "store", LIMITS)


def test_a_file_in_two_roles_is_refused(place):
    write_adapter(place)
    task = read(place, data="start/adapter_config.json", resume_from="start", limits=FREE)
    with pytest.raises(TaskError, match="the task names 'start/adapter_config.json' twice"):
        copy_files(task, place / "mine", place / "store" / "t", FREE)


def test_a_task_of_another_folder_is_not_copied(place):
    with pytest.raises(TaskError, match="is not inside"):
        copy_files(read(place), place / "other", place / "store", LIMITS)


FREE = SpecificationLimits()


def test_random_trees_lead_only_to_files_of_the_tenant(tmp_path):
    """Files, folders and links in random places: what opens has the content of the tenant."""
    rng = random.Random(0)
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "a.json").write_text(SECRET)
    opened = 0
    for number in range(100):
        mine = tmp_path / str(number)
        mine.mkdir()
        places = [mine]
        for name in rng.choices("abcd", k=6):
            target = rng.choice(places) / rng.choice([name, f"{name}.json"])
            if os.path.lexists(target):
                continue
            kind = rng.choice(["file", "folder", "folder", "link"])
            if kind == "file":
                target.write_text(ROWS)
            elif kind == "folder":
                target.mkdir()
                places.append(target)
                (target / "a.json").write_text(ROWS)
            else:
                ends = [outside, outside / "a.json", "..", ".", "/", mine]
                target.symlink_to(rng.choice(ends))
        for _ in range(30):
            names = ["a", "b", "c", "a.json", "b.json", "c.json", "outside"]
            path = "/".join(rng.choices(names, k=rng.randrange(1, 4)))
            try:
                with open_inside(mine, path, 1000, "here") as file:
                    assert file.read() == ROWS.encode()
                opened += 1
            except TaskError:
                continue
    assert opened > 50


def test_a_copied_task_is_prepared_like_a_trusted_one(place, backbone, data):
    config, tokenizer = BackboneConfig.from_folder(backbone), load_tokenizer(backbone)
    mine, spec = place / "mine", LoRA(rank=4)
    shutil.copy(data["short"], mine / "train.jsonl")
    shutil.copy(data["short.eval"], mine / "eval.jsonl")
    first = initial_adapter(spec, resolve_targets("all-linear", config), config, 0)
    export_adapter(mine / "start", first, spec, config, "base")
    adapter = {"kind": "lora", "rank": 4}
    text = specification(
        data="train.jsonl", eval_data="eval.jsonl", resume_from="start", adapter=adapter
    )
    task = copy_files(task_from_json(text, mine), mine, place / "store")
    prepared = prepare_task(task, config, tokenizer)
    trusted = Task("t", data["short"], spec, steps=1, eval_data=data["short.eval"])
    assert prepared.fingerprints == prepare_task(trusted, config, tokenizer).fingerprints
    for module, (a, b) in prepared.make_adapter().items():
        assert (a == first[module].a).all() and (b == first[module].b).all()
