"""The page of error messages has every message of the source."""

import ast
import re
from importlib import import_module
from pathlib import Path

import pytest

import jaxmux
from docs.extension.error_messages import AREAS, FOLDERS, collect, pattern, words
from jaxmux.errors import InputError
from jaxmux.peft import LoRA

ROOT = Path(__file__).parents[2]
# Exceptions that other code makes, and exits of a process with a code.
NO_MESSAGES = {"SystemExit", "one.exception", "end.exception", "_cause", "Interrupted"}


@pytest.fixture(scope="module")
def messages():
    return collect(ROOT)


def subclasses(cls):
    return {cls.__name__}.union(*(subclasses(each) for each in cls.__subclasses__()))


def passes_on(call: ast.Call) -> bool:
    """True if all words of the message come from elsewhere, such as another error."""
    constants = [n.value for a in call.args for n in ast.walk(a) if isinstance(n, ast.Constant)]
    renamed = any(isinstance(n, ast.Attribute) and n.attr == "replace" for n in ast.walk(call))
    return renamed or not words(" ".join(value for value in constants if isinstance(value, str)))


@pytest.mark.long
def test_every_raised_error_is_found(messages):
    """Of all exceptions with a message, so of every subclass of InputError."""
    found = {(m.path, m.line) for m in messages}
    missing, raised = [], 0
    for path in (p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call):
                continue
            raised += 1
            known = (name, node.exc.lineno) in found or passes_on(node.exc)
            if not known and ast.unparse(node.exc.func) not in NO_MESSAGES:
                missing.append(f"{name}:{node.lineno}: {ast.unparse(node.exc)}")
    assert not missing
    assert raised > 500


def test_every_class_of_input_errors_has_messages(messages):
    for name in ("cli.gin_bindings", "server.inbox.accepted", "server.inbox.directory"):
        import_module(f"jaxmux.{name}")
    for name in jaxmux.__all__:
        getattr(jaxmux, name)
    assert subclasses(InputError) <= {m.exception for m in messages}


def test_every_folder_has_a_title(messages):
    assert {m.area for m in messages} == AREAS.keys()


@pytest.mark.parametrize(
    "provoke",
    [
        lambda folder: jaxmux.Task("a b", "a.jsonl", epochs=1),
        lambda folder: jaxmux.Task("a", "a.jsonl", epochs=1, eval_every=3),
        lambda folder: jaxmux.Source("a.jsonl", columns={"promt": "question"}),
        lambda folder: LoRA(rank=0),
        lambda folder: LoRA(trained_tokens=(3, 3)),
        lambda folder: jaxmux.load_backbone(folder),
        lambda folder: jaxmux.import_adapter(folder / "nowhere", None),
        lambda folder: jaxmux.RunOptions(mesh="pp0"),
    ],
)
def test_a_message_is_found_by_its_text(provoke, messages, tmp_path):
    with pytest.raises(ValueError) as raised:
        provoke(tmp_path)
    text = " ".join(str(raised.value).split())
    fitting = [m for m in messages if pattern(m.text).fullmatch(text)]
    # Something that says more than "…: not found" does.
    assert any(len(words(m.text)) >= 2 for m in fitting), text


def test_remedies_quote_messages_that_exist(messages):
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.*)`$", page, flags=re.MULTILINE)
    assert len(quoted) == len(set(quoted)) >= 25
    texts = [m.text for m in messages]
    assert [q for q in quoted if not any(q.strip("… ") in text for text in texts)] == []
