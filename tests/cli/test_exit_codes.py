"""An exception of a command becomes one line and the exit code that the documentation promises."""

import errno
import re
import signal
from pathlib import Path

import pytest

from jaxmux import DataError, TaskError
from jaxmux.cli import exit_codes
from jaxmux.cli.exit_codes import exit_code_of
from jaxmux.errors import InputError, Interrupted, first_line


def test_only_a_line_feed_ends_the_first_line_of_a_message():
    for end in ("\n", "\r\n"):
        assert first_line(ValueError(f" a\u2028b\x85\x0cc\rd{end}e")) == "a\u2028b\x85\x0cc\rd"
    assert first_line(ValueError("\n")) == "ValueError"


CASES = {
    "bad data": (DataError("a.jsonl:3: no field"), 2, "error: a.jsonl:3: no field\n"),
    "bad task": (TaskError("task 'a': rank"), 2, "error: task 'a': rank\n"),
    "full disk": (
        OSError(errno.ENOSPC, "No space left on device", "runs/a/metrics.jsonl"),
        3,
        "error: runs/a/metrics.jsonl: No space left on device\n",
    ),
    "missing package": (
        ModuleNotFoundError("No module named 'orbax'", name="orbax"),
        2,
        "error: the package orbax is missing; install jaxmux with all that it needs: "
        "pip install . (on a GPU: pip install '.[cuda13]')\n",
    ),
    "words of others": (
        InputError("a.jinja refuses the messages:\n\x1b[2J"),
        2,
        "error: a.jinja refuses the messages:\n\\x1b[2J\n",
    ),
    "host memory": (MemoryError(), 3, "error: the host has no memory left\n"),
    "stopped while starting": (
        Interrupted(signal.SIGTERM, saved=False),
        143,
        "stopped by SIGTERM; nothing was trained since the start\n",
    ),
    "stopped while training": (
        Interrupted(signal.SIGINT, saved=True),
        130,
        "stopped by SIGINT; state saved, the same command continues from here\n",
    ),
    "Ctrl-C while importing": (KeyboardInterrupt(), 130, "stopped by SIGINT\n"),
}


@pytest.mark.parametrize(("error", "code", "message"), CASES.values(), ids=CASES)
def test_an_exception_becomes_a_line_and_a_code(error, code, message, capsys):
    def run() -> int:
        raise error

    assert exit_code_of(run) == code
    assert capsys.readouterr().err == message


@pytest.mark.parametrize(
    "fault",
    [KeyError("a fault"), ModuleNotFoundError("No module", name="jaxmux.lost")],
    ids=["error", "module of its own"],
)
def test_a_fault_of_jaxmux_keeps_its_traceback(fault, capsys):
    def run() -> int:
        raise fault

    assert exit_code_of(run) == 3
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("code", [0, 1])
def test_the_code_of_the_command_is_kept(code):
    assert exit_code_of(lambda: code) == code


def test_the_documentation_lists_the_codes():
    """And no other ones."""
    page = (Path(__file__).parents[2] / "docs" / "training.md").read_text()
    listed = set(re.findall(r"^\| (\d+)(?:, (\d+))? \|", page, re.MULTILINE))
    codes = {int(code) for row in listed for code in row if code}
    own = {exit_codes.TASK_FAILED, exit_codes.REFUSED, exit_codes.BROKE}
    assert codes == own | {0, 128 + signal.SIGINT, 128 + signal.SIGTERM}
