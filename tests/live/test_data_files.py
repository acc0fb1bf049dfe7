"""The files of a task's data are the same as when it was registered, or the task is told."""

import os
from pathlib import Path

import pytest

from jaxmux.data import Source
from jaxmux.server.data import file_identities, read_unchanged
from jaxmux.tasks import Task, TaskError


@pytest.fixture
def task(tmp_path):
    """A task with training and held-out data."""
    for name in ("data", "held_out"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n')
    held_out = tmp_path / "held_out.jsonl"
    return Task("mine", str(tmp_path / "data.jsonl"), eval_data=str(held_out), steps=1)


def replaced(path: Path) -> None:
    """Puts another file of the same size and the same time into the place of a file."""
    stat = path.stat()
    other = path.with_suffix(".new")
    other.write_text(path.read_text().replace("one", "two"))
    os.utime(other, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    other.replace(path)


def written(path: Path) -> None:
    """Changes a file in place, without another size."""
    before = path.stat().st_mtime_ns
    path.write_text(path.read_text().replace("one", "two"))
    os.utime(path, ns=(before, before + 1))


def pointed_elsewhere(path: Path) -> None:
    path.rename(path.with_suffix(".old"))
    other = path.with_suffix(".other")
    other.write_text('{"text": "two"}\n')
    path.symlink_to(other)


@pytest.mark.parametrize("change", [replaced, written, pointed_elsewhere])
@pytest.mark.parametrize("name", ["data", "held_out"])
def test_data_that_changed_after_the_registration_are_not_read(change, name, task, tmp_path):
    registered = file_identities(task)
    change(tmp_path / f"{name}.jsonl")
    read = []
    with pytest.raises(
        TaskError, match=f"{name}.jsonl: changed after the task was registered; reg"
    ):
        read_unchanged(read.append, task, registered)
    assert read == []


@pytest.mark.parametrize("change", [replaced, written, Path.unlink])
def test_data_that_change_while_they_are_read_are_not_used(change, task, tmp_path):
    def read(task):
        change(tmp_path / "data.jsonl")
        raise ValueError("malformed JSON line")

    # The change is what is wrong, not what was read meanwhile.
    with pytest.raises(
        TaskError, match="data.jsonl: changed after the .*, while the data were read"
    ):
        read_unchanged(read, task, file_identities(task))


def test_a_file_that_appears_while_it_is_read_has_changed(task, tmp_path):
    content = (tmp_path / "data.jsonl").read_text()
    (tmp_path / "data.jsonl").unlink()
    with pytest.raises(TaskError, match="data.jsonl: changed"):
        read_unchanged(lambda task: (tmp_path / "data.jsonl").write_text(content), task, {})


def test_data_that_stay_as_they_are_are_read(task, tmp_path):
    registered = file_identities(task)
    os.utime(tmp_path / "data.jsonl", ns=(5, (tmp_path / "data.jsonl").stat().st_mtime_ns))
    assert read_unchanged(lambda task: task.name, task, registered) == "mine"
    # What was not recorded may be anything.
    written(tmp_path / "data.jsonl")
    assert read_unchanged(lambda task: task.name, task, {}) == "mine"


def test_a_missing_file_is_the_business_of_its_reader(task, tmp_path):
    registered = file_identities(task)
    (tmp_path / "data.jsonl").unlink()

    def read(task):
        raise FileNotFoundError("data.jsonl: file not found")

    with pytest.raises(FileNotFoundError):
        read_unchanged(read, task, registered)


def test_the_files_of_a_saved_data_set_are_known_and_the_hub_has_none(tmp_path):
    for name in ("state.json", "data-00000-of-00001.arrow"):
        (tmp_path / name).write_text("x")
    saved = Task("mine", Source(f"hf:{tmp_path}"), steps=1)
    found = file_identities(saved)
    assert set(found) == {str(tmp_path / "state.json"), str(tmp_path / "data-00000-of-00001.arrow")}
    assert file_identities(Task("mine", "hf:tatsu-lab/alpaca", steps=1)) == {}
    shipped = file_identities(Task("mine", "jaxmux:demo/tasks/mood.train.jsonl", steps=1))
    (path,) = shipped
    assert Path(path).is_file()


def test_files_of_a_pattern_that_come_go_or_change_are_noticed(tmp_path):
    parts = [tmp_path / f"part-{k}.jsonl" for k in range(3)]
    for part in parts[:2]:
        part.write_text('{"text": "one"}\n')
    task = Task("mine", str(tmp_path / "part-*.jsonl"), steps=1)
    registered = file_identities(task)
    assert registered.keys() == {task.data.path, *map(str, parts[:2])}
    assert read_unchanged(lambda task: task.name, task, registered) == "mine"
    written(parts[1])
    with pytest.raises(TaskError, match="part-1.jsonl: changed after the task was registered; "):
        read_unchanged(print, task, registered)
    registered = file_identities(task)
    parts[2].write_text('{"text": "two"}\n')
    with pytest.raises(TaskError, match=r"part-\*.jsonl: changed after the task was registered; "):
        read_unchanged(print, task, registered)
    with pytest.raises(TaskError, match=r"part-.*: changed after .*, while the data were read"):
        read_unchanged(lambda task: parts[2].unlink(), task, {})


def test_a_chat_template_is_a_file_of_the_data(task, tmp_path):
    template = tmp_path / "chat.jinja"
    template.write_text("one")
    source = Source(task.data.path, chat_template=str(template))
    task = Task("mine", source, steps=1)
    registered = file_identities(task)
    replaced(template)
    with pytest.raises(TaskError, match="chat.jinja: changed after the task was registered; reg"):
        read_unchanged(lambda task: None, task, registered)
    text = Task("mine", Source(task.data.path, chat_template="{{ messages }}" * 1000), steps=1)
    assert [*file_identities(text)] == [task.data.path]
