"""`jaxmux score`: log-probabilities of data under the bare backbone and adapters."""

import json
import os
import signal
import sys
from collections import defaultdict
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from jaxmux import AdamW, import_adapter
from jaxmux.cli.main import run_command
from jaxmux.cli.score_command import _line
from jaxmux.data import Sample, Source, load_samples, load_tokenizer
from jaxmux.engine import Engine
from jaxmux.evaluation import HeldOutData, Score, scores_of
from jaxmux.models import BackboneConfig

score = partial(run_command, "score", prog="jaxmux score")

PAIRS = [
    {"prompt": "apple pear", "chosen": " red", "rejected": " black white"},
    {"prompt": "fig", "chosen": " brown green", "rejected": " plum"},
]


@pytest.fixture(scope="module")
def run_dir(make_task, train, data, chat_backbone, tmp_path_factory) -> Path:
    """A run with a task of chats, and one with parts held out of two sources."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    fast = {"optimizer": AdamW(1e-2), "steps": 3}
    chat = make_task("chat", data=data["chat"], eval_data=data["chat"], **fast)
    part = make_task("part", data=[data["long"], data["short"]], validation_fraction=0.3, **fast)
    assert train(folder, chat, part, backbone=chat_backbone).succeeded
    return folder


@pytest.fixture
def lines_of(capfd):
    """Scores, and returns the lines of standard output, which holds nothing else."""

    def run(*arguments: str) -> list[dict]:
        capfd.readouterr()
        assert score(arguments) == 0
        return [json.loads(line) for line in capfd.readouterr().out.splitlines()]

    return run


def direct(logits: np.ndarray, ids: list[int]) -> np.ndarray:
    """The log-probabilities of all tokens but the first."""
    with jax.enable_x64(True):
        log_probs = np.asarray(jax.nn.log_softmax(logits[:-1]))
    return log_probs[np.arange(len(ids) - 1), ids[1:]]


def require_direct(line: dict, logits: np.ndarray) -> None:
    expected = direct(logits, line["tokens"])
    assert line["log_probs"][0] is None and line["targets"][0] is False
    np.testing.assert_allclose(line["log_probs"][1:], expected, rtol=1e-4, atol=1e-4)
    total = expected[line["targets"][1:]].sum()
    assert line["log_prob"] == pytest.approx(total, rel=1e-4)
    assert line["target_tokens"] == sum(line["targets"])
    assert line["mean"] == line["log_prob"] / line["target_tokens"]


def test_both_answers_of_preference_records_are_scored(backbone, write_lines, lines_of, logits_of):
    file = write_lines(*PAIRS)
    found = lines_of(f"--backbone={backbone}", f"--data={file}", "--tokens", "--dtype=float32")
    names = [(n, answer) for n in range(2) for answer in ("chosen", "rejected")]
    assert [(line["record"], line["answer"]) for line in found] == names
    assert {(line["adapter"], line["data"]) for line in found} == {(None, "records.jsonl")}
    samples = load_samples(Source(file), load_tokenizer(backbone), max_length=64, records="pairs")
    for line, sample in zip(found, samples.samples, strict=True):
        assert line["tokens"] == sample.input_ids.tolist()
        assert line["targets"] == sample.target_mask.tolist()
        require_direct(line, logits_of(line["tokens"]))
    arguments = [f"--backbone={backbone}", f"--data={file}", "--dtype=float32", "--limit=1"]
    short = {k: v for k, v in found[0].items() if k not in ("tokens", "targets", "log_probs")}
    assert lines_of(*arguments)[0] == short
    assert len(lines_of(*arguments)) == 2


def test_labelled_answers_are_scored_with_their_labels(backbone, write_lines, lines_of):
    file = write_lines(
        {"prompt": "eat", "completion": " red", "label": True},
        {"prompt": "eat", "completion": " apple", "label": False},
    )
    found = lines_of(f"--backbone={backbone}", f"--data={file}")
    assert [(line["record"], line["label"]) for line in found] == [(0, True), (1, False)]
    assert "answer" not in found[0]


def test_what_is_cut_is_said_on_standard_error(backbone, write_lines, capsys):
    file = write_lines(*PAIRS)
    assert score([f"--backbone={backbone}", f"--data={file}", "--max_length=4"]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == [
        f"{file}: 2 samples are cut to 4 tokens (max_length)",
        f"{file}: 1 record is left out, longer than 4 tokens (max_length)",
    ]
    assert [json.loads(line)["record"] for line in printed.out.splitlines()] == [1, 1]


def test_numbers_that_are_not_finite_are_null():
    sample = Sample(np.arange(3, dtype=np.int32), np.array([False, False, True]), 5)
    log_probs = np.array([-1.0, np.nan], np.float32)
    line = _line(Score("a", HeldOutData("a.jsonl", []), sample, log_probs), "a.jsonl", True)
    assert (line["record"], line["log_prob"], line["mean"]) == (5, None, None)
    assert line["log_probs"] == [None, -1.0, None]


def test_tasks_of_a_run_are_scored_on_their_held_out_data(run_dir, data, chat_backbone, lines_of):
    """The mean is the held-out loss that training has recorded, and the records are those of the
    files."""
    found = defaultdict(list)
    for line in lines_of(f"--run_dir={run_dir}", "--tokens"):
        found[line["adapter"], line["data"]].append(line)
    files = {"chat": ["chat.jsonl"], "part": ["long.jsonl", "short.jsonl"]}
    assert found.keys() == {(a, f) for name, of in files.items() for a in (None, name) for f in of}
    recorded = [json.loads(line) for line in (run_dir / "held_out.jsonl").read_text().splitlines()]
    for name, of_task in files.items():
        first, last = (line["loss"] for line in recorded if line["task"] == name)
        # A fresh LoRA changes nothing.
        for adapter, loss in ((None, first), (name, last)):
            scored = [line for file in of_task for line in found[adapter, file]]
            total, targets = (sum(x[key] for x in scored) for key in ("log_prob", "target_tokens"))
            assert -total / targets == pytest.approx(loss, rel=1e-6)
    tokenizer = load_tokenizer(chat_backbone)
    for file in files["part"]:
        rows = [json.loads(row) for row in Path(data[Path(file).stem]).read_text().splitlines()]
        for line in found["part", file]:
            row = rows[line["record"]]
            text = tokenizer.decode(line["tokens"], skip_special_tokens=True)
            assert text == row["prompt"] + row["completion"]


def test_adapters_in_company_have_the_scores_that_they_have_alone(
    run_dir, data, chat_backbone, lines_of, logits_of, monkeypatch
):
    """And those of a plain forward pass. The bare backbone scores each file once."""
    calls = []
    log_probs = Engine.log_probs
    monkeypatch.setattr(
        Engine,
        "log_probs",
        lambda engine, name, samples: calls.append(name) or log_probs(engine, name, samples),
    )
    files = [f"--data={data['chat']}", f"--data={data['long']}", "--limit=4"]
    names, folder = ["chat", "part"], run_dir / "adapters"
    adapters = {name: f"--adapter={folder / name}" for name in names}
    own = [f"--backbone={chat_backbone}", "--dtype=float32", "--tokens", *files]
    together = lines_of(*own, *adapters.values())
    assert [line["adapter"] for line in together] == [None, *names] * 8
    assert [calls.count(name) for name in set(calls)] == [2, 2, 2]
    config = BackboneConfig.from_folder(chat_backbone)
    trained = {name: import_adapter(folder / name, config) for name in names} | {None: ()}
    for line in together[:6]:
        require_direct(line, logits_of(line["tokens"], *trained[line["adapter"]]))
    alone = lines_of(*own, f"--adapter=b={folder / 'part'}")
    expected = [line | {"adapter": line["adapter"] and "b"} for line in together]
    expected = [line for line, of in zip(expected, [None, *names] * 8, strict=True) if of != "chat"]
    for line, other in zip(alone, expected, strict=True):
        close = {key: pytest.approx(other[key], rel=1e-5) for key in ("log_prob", "mean")}
        close["log_probs"] = [None, *(pytest.approx(x, rel=1e-5) for x in other["log_probs"][1:])]
        assert line == other | close


def test_samples_are_read_and_scored_in_groups(backbone, data, lines_of, monkeypatch):
    groups = []
    log_probs = Engine.log_probs

    def counted(engine, name, samples):
        groups.append(len(samples))
        return log_probs(engine, name, samples)

    monkeypatch.setattr(Engine, "log_probs", counted)
    arguments = [f"--backbone={backbone}", f"--data={data['long']}", "--dtype=float32"]
    whole = lines_of(*arguments)
    assert groups == [20]
    in_groups = partial(scores_of, tokens_per_group=256)
    monkeypatch.setattr("jaxmux.cli.score_command.scores_of", in_groups)
    divided = lines_of(*arguments)
    assert sum(groups[1:]) == 20 and len(groups) == 4
    for line, other in zip(divided, whole, strict=True):
        assert line["record"] == other["record"]
        assert line["log_prob"] == pytest.approx(other["log_prob"], rel=1e-5)


def test_a_file_appears_when_it_is_complete(backbone, data, tmp_path, capsys, monkeypatch):
    out = tmp_path / "scores.jsonl"
    arguments = [f"--backbone={backbone}", f"--data={data['short']}", f"--out={out}"]
    assert score([*arguments, "--limit=2"]) == 0
    printed = capsys.readouterr()
    assert not printed.out and f"2 lines -> {out}" in printed.err
    before = out.read_text()
    assert len(before.splitlines()) == 2

    def broken(engine, name, samples):
        raise OSError(5, "broken", "device")

    monkeypatch.setattr(Engine, "log_probs", broken)
    assert score(arguments) == 3
    assert f"{out}: an earlier file of scores is replaced" in capsys.readouterr().err
    assert out.read_text() == before and [*tmp_path.iterdir()] == [out]
    out.write_text("notes")
    assert score(arguments) == 2
    assert f"{out}: exists and is no file of scores" in capsys.readouterr().err


def test_a_reader_that_has_gone_ends_the_command(backbone, data, monkeypatch, capsys):
    read, write = os.pipe()
    os.close(read)
    monkeypatch.setattr(sys, "stdout", os.fdopen(write, "w"))
    code = score([f"--backbone={backbone}", f"--data={data['short']}"])
    assert code == 128 + signal.SIGPIPE
    assert "Traceback" not in capsys.readouterr().err


def test_files_of_the_same_name_are_told_apart_by_their_paths(
    backbone, data, write_lines, lines_of
):
    other = write_lines({"prompt": "fig", "completion": " red"}, name="short.jsonl")
    files = [f"--data={data['short']}", f"--data={other}", f"--data={data['long']}"]
    found = lines_of(f"--backbone={backbone}", *files, "--limit=1")
    assert [line["data"] for line in found] == [data["short"], other, "long.jsonl"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data=none.jsonl"], "none.jsonl: file not found"),
        (["--data=bad.jsonl"], "error: bad.jsonl:2: malformed JSON line"),
        (["--data=half.jsonl"], "half.jsonl:2: no pair of answers"),
        (["--data=short.jsonl", "--adapter=nowhere"], "nowhere/adapter_config.json: not found"),
        (["--data=short.jsonl", "--adapter=a", "--adapter=b/a"], "a and b/a have the name 'a'"),
        ([], "give --run_dir, or --backbone and --data"),
        (["--data=short.jsonl", "--task=a"], "--task is for --run_dir"),
        (["--data=short.jsonl", "--run_dir=a"], "--backbone: the run directory tells it"),
    ],
)
def test_what_cannot_be_scored_is_named(
    arguments, message, backbone, write_lines, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    good = {"prompt": "fig", "completion": " red"}
    write_lines(good, name="short.jsonl")
    write_lines(good, "no JSON", name="bad.jsonl")
    write_lines(PAIRS[0], good, name="half.jsonl")
    is_usage = any(word in message for word in ("give --run_dir", "--task", "the run directory"))
    with pytest.raises(SystemExit) if is_usage else nullcontext():
        assert score([f"--backbone={backbone}", *arguments]) == 2
    printed = capsys.readouterr()
    assert message in printed.err and not printed.out
