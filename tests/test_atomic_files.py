"""What a command may replace where its output goes."""

import json
import os
from functools import partial

import pytest

from jaxmux.atomic_files import holds_object, require_output
from jaxmux.errors import InputError

is_ours = partial(holds_object, keys=("backbone", "results"))
OURS = json.dumps({"backbone": "b", "results": []})


@pytest.mark.parametrize("text", [OURS, OURS + "\n", OURS + "\n{}\nmore\n", ""])
def test_an_earlier_output_is_replaced_and_named(text, tmp_path, capsys):
    path = tmp_path / "out.json"
    path.write_text(text)
    require_output(path, "evaluation", is_ours)
    assert capsys.readouterr().err == f"{path}: an earlier evaluation is replaced\n"
    assert path.read_text() == text


@pytest.mark.parametrize(
    "content",
    [b"notes", b'{"backbone": 1}', b"[]", b"\xff\xfe", b'"text"', b"{" * 100_000],
)
def test_a_foreign_file_stays_and_is_named(content, tmp_path):
    path = tmp_path / "out.json"
    path.write_bytes(content)
    with pytest.raises(InputError, match=f"{path}: exists and is no evaluation of jaxmux"):
        require_output(path, "evaluation", is_ours)
    assert path.read_bytes() == content


@pytest.mark.parametrize("target", [OURS, "notes", None])
def test_a_link_is_not_written_through(target, tmp_path):
    path, linked = tmp_path / "link", tmp_path / "file"
    if target is not None:
        linked.write_text(target)
    path.symlink_to(linked)
    with pytest.raises(InputError, match=f"{path}: is a symbolic link"):
        require_output(path, "evaluation", is_ours)
    assert path.is_symlink() and linked.exists() == (target is not None)


def test_a_device_and_a_folder_are_refused(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(InputError, match="pipe: is no regular file"):
        require_output(tmp_path / "pipe", "evaluation", is_ours)
    with pytest.raises(InputError, match="is a folder; name a file"):
        require_output(tmp_path, "evaluation", is_ours)


def test_the_folder_of_a_new_output_is_made(tmp_path, capsys):
    require_output(tmp_path / "a" / "b" / "out.json", "evaluation", is_ours)
    assert (tmp_path / "a" / "b").is_dir() and not any((tmp_path / "a" / "b").iterdir())
    assert not capsys.readouterr().err
