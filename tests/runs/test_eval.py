"""`jaxmux eval`: adapters beside the bare backbone, by losses and exact matches."""

import json
import math
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from jaxmux import AdamW, LoRA, import_adapter
from jaxmux.cli.main import run_command
from jaxmux.data import Source, load_tokenizer
from jaxmux.engine import Engine
from jaxmux.generation import Generator
from jaxmux.models import BackboneConfig

evaluate = partial(run_command, "eval", prog="jaxmux eval")


@pytest.fixture(scope="module")
def run_dir(make_task, train, data, chat_backbone, tmp_path_factory) -> Path:
    """A run with a task that has learnt its chats by heart, and one with a part held out."""
    folder = tmp_path_factory.mktemp("runs") / "run"
    chat = make_task(
        "chat",
        data=data["chat"],
        eval_data=data["chat"],
        adapter=LoRA(rank=4, alpha=32.0, target_modules=("q_proj", "down_proj")),
        optimizer=AdamW(3e-2),
        batch_size=6,
        steps=40,
    )
    part = make_task("part", data=data["long"], validation_fraction=0.3)
    assert train(folder, chat, part, backbone=chat_backbone).succeeded
    return folder


@pytest.fixture(scope="module")
def results(run_dir) -> list[dict]:
    out = run_dir.parent / "results.json"
    assert evaluate([f"--run_dir={run_dir}", f"--out={out}"]) == 0
    return json.loads(out.read_text())["results"]


def test_foreign_files_are_not_replaced_by_an_evaluation(run_dir, tmp_path, capsys):
    path = tmp_path / "config.json"
    path.write_text("{}")
    assert evaluate([f"--run_dir={run_dir}", f"--out={path}"]) == 2
    assert f"{path}: exists and is no evaluation" in capsys.readouterr().err
    assert path.read_text() == "{}"


def recorded(run_dir) -> dict[str, list[float]]:
    lines = [json.loads(line) for line in (run_dir / "held_out.jsonl").read_text().splitlines()]
    return {name: [x["loss"] for x in lines if x["task"] == name] for name in ("chat", "part")}


def test_losses_are_those_that_training_has_recorded(run_dir, results):
    losses = recorded(run_dir)
    assert [result["task"] for result in results] == list(losses)
    for result in results:
        first, last = losses[result["task"]]
        # A fresh LoRA changes nothing.
        assert result["backbone"]["loss"] == pytest.approx(first, rel=1e-6)
        assert result["adapter"]["loss"] == pytest.approx(last, rel=1e-6)
        assert result["adapter"]["perplexity"] == pytest.approx(math.exp(last), rel=1e-5)
    assert results[1]["data"] == "0.3 of its data"


def test_completions_match_where_greedy_decoding_gives_the_reference(
    run_dir, results, data, chat_backbone, logits_of
):
    tokenizer = load_tokenizer(chat_backbone)
    config = BackboneConfig.from_folder(chat_backbone)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    adapters = {"backbone": (), "adapter": import_adapter(run_dir / "adapters" / "chat", config)}
    chats = [json.loads(line)["messages"] for line in Path(data["chat"]).read_text().splitlines()]
    for which, adapter in adapters.items():
        equal = 0
        for messages in chats:
            given = {"tokenize": False, "add_generation_prompt": True}
            text = tokenizer.apply_chat_template(messages[:-1], **given)
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            start, reference = len(ids), messages[-1]["content"]
            # As many tokens as the reference has, and one that ends the turn.
            for _ in range(1 + len(tokenizer(reference, add_special_tokens=False)["input_ids"])):
                ids.append(int(logits_of(ids, *adapter)[-1].argmax()))
            new = ids[start : ids.index(end, start)] if end in ids[start:] else ids[start:]
            equal += tokenizer.decode(new).strip() == reference
        assert results[0][which]["exact_match"] == equal / len(chats)
    assert results[0]["backbone"]["exact_match"] == 0 < results[0]["adapter"]["exact_match"]


def test_an_adapter_folder_is_evaluated_on_a_file(
    run_dir, results, data, chat_backbone, tmp_path, capsys
):
    out, adapter = tmp_path / "results.json", run_dir / "adapters" / "chat"
    arguments = [f"--backbone={chat_backbone}", f"--adapter={adapter}", f"--data={data['chat']}"]
    arguments += [f"--data={data['long']}", "--max_new_tokens=0", f"--out={out}"]
    assert evaluate(arguments) == 0
    printed = capsys.readouterr().out
    assert all(len(line) <= 80 for line in printed.splitlines())
    assert "chat.jsonl" in printed and "long.jsonl" in printed and "→" in printed
    chats, others = json.loads(out.read_text())["results"]
    for which in ("adapter", "backbone"):
        assert chats[which]["loss"] == pytest.approx(results[0][which]["loss"], rel=1e-6)
        assert chats[which]["exact_match"] is None
    assert chats["target_tokens"] == results[0]["target_tokens"]
    assert (chats["samples"], others["samples"]) == (6, 20)


def test_the_backbone_is_measured_once_for_all_adapters_on_a_file(
    run_dir, results, data, chat_backbone, tmp_path, monkeypatch
):
    """Two adapters on the same two files."""
    registered, completed = [], []
    register, complete = Engine.register_tasks, Generator.complete

    def counted(engine, tasks):
        registered.extend(own.task.name for own in tasks)
        return register(engine, tasks)

    def with_count(generator, requests, **given):
        completed.extend(requests)
        return complete(generator, requests, **given)

    monkeypatch.setattr(Engine, "register_tasks", counted)
    monkeypatch.setattr(Generator, "complete", with_count)
    out, adapter = tmp_path / "results.json", run_dir / "adapters" / "chat"
    arguments = [f"--backbone={chat_backbone}", f"--adapter={adapter}", f"--data={data['chat']}"]
    arguments += [f"--adapter={run_dir / 'adapters' / 'part'}", f"--data={data['long']}"]
    assert evaluate([*arguments, "--limit=6", "--max_new_tokens=2", f"--out={out}"]) == 0
    found = json.loads(out.read_text())["results"]
    names = [name.split(".")[0] for name in registered]
    assert (names.count("adapter"), names.count("backbone")) == (4, 2)
    assert [sum(r.spec is None for r in completed), len(completed)] == [12, 36]
    for first, second in (found[::2], found[1::2]):
        assert first["backbone"] == second["backbone"]
        assert first["adapter"]["loss"] != second["adapter"]["loss"]
    assert found[0]["backbone"]["loss"] == pytest.approx(results[0]["backbone"]["loss"], rel=1e-6)


def test_a_limit_takes_the_first_samples(run_dir, data, chat_backbone, write_lines, tmp_path):
    few = write_lines(*Path(data["chat"]).read_text().splitlines()[:2])
    found = []
    for arguments in (["--limit=2"], [f"--data={few}"]):
        out = tmp_path / "results.json"
        arguments = [f"--run_dir={run_dir}", "--task=chat", f"--out={out}", *arguments]
        assert evaluate([*arguments, "--max_new_tokens=0"]) == 0
        (result,) = json.loads(out.read_text())["results"]
        found.append(result | {"data": ""})
    assert found[0] == found[1] and found[0]["samples"] == 2


def test_a_task_with_weighted_sources_is_evaluated_on_a_file(make_task, train, data, tmp_path):
    sources = [Source(data[name], weight=weight) for name, weight in (("short", 2), ("long", 1))]
    train(tmp_path, make_task("mixed", data=sources))
    out = tmp_path / "results.json"
    arguments = [f"--run_dir={tmp_path}", f"--data={data['long']}", "--max_new_tokens=0"]
    assert evaluate([*arguments, f"--out={out}"]) == 0
    (result,) = json.loads(out.read_text())["results"]
    assert result["samples"] == 20


def test_tasks_without_an_adapter_are_left_out_unless_they_are_named(
    make_task, train, data, tmp_path, capsys
):
    failing = make_task("failing", eval_data=data["long"], optimizer=AdamW(1e30))
    train(tmp_path, failing, make_task("part", eval_data=data["long"]), max_bad_steps=1)
    arguments = [f"--run_dir={tmp_path}", "--max_new_tokens=0"]
    assert evaluate([*arguments, f"--out={tmp_path / 'out.json'}"]) == 0
    (result,) = json.loads((tmp_path / "out.json").read_text())["results"]
    assert result["task"] == "part"
    assert evaluate([*arguments, "--task=failing"]) == 2
    assert "failing: no adapter, so the task has not succeeded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task=chit"], "no task 'chit'; its tasks are chat, part"),
        (["--data=none.jsonl"], "task 'chat': none.jsonl: file not found"),
        (["--dtype=float32"], "--dtype: the run directory tells it"),
    ],
)
def test_what_cannot_be_evaluated_is_named(arguments, message, run_dir, capsys):
    with pytest.raises(SystemExit) if "dtype" in message else nullcontext():
        assert evaluate([f"--run_dir={run_dir}", *arguments]) == 2
    assert message in capsys.readouterr().err


def test_without_held_out_data_files_have_to_be_named(make_task, train, tmp_path, capsys):
    train(tmp_path, make_task())
    assert evaluate([f"--run_dir={tmp_path}"]) == 2
    assert "task 'tiny': has neither eval_data nor validation_fraction" in capsys.readouterr().err
