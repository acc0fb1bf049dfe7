"""Adapters that were trained with chat templates of their own keep and use them."""

import dataclasses
import io
import json
import re
import shutil
from datetime import datetime
from functools import partial
from pathlib import Path

import pytest
from tokenizers import Tokenizer, normalizers
from transformers import AutoTokenizer

from jaxmux import AdamW, DataError, LoRA, TaskError, import_adapter, load_backbone
from jaxmux.cli.main import run_command
from jaxmux.data import Source, load_tokenizer
from jaxmux.generation import Generator, Request, end_of_turn
from jaxmux.peft import adapter_tokenizer, trained_on

generate = partial(run_command, "generate", prog="jaxmux generate")
evaluate = partial(run_command, "eval", prog="jaxmux eval")
export = partial(run_command, "export", prog="jaxmux export")

# They end turns with different special tokens.
ASK = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }}? {{ m.content }} é<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}assistant? {% endif %}\n"
)
TELL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant: {% endif %}"
)
SHAREGPT = [
    [("human", "red apple"), ("gpt", "fig")],
    [("human", "plum"), ("gpt", "pear"), ("human", "and lemon"), ("gpt", "melon")],
]


@pytest.fixture(scope="module")
def conversations(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("conversations") / "chats.jsonl"
    turns = [[{"from": name, "value": text} for name, text in chat] for chat in SHAREGPT]
    path.write_text("".join(json.dumps({"conversations": each}) + "\n" for each in turns))
    return path


@pytest.fixture(scope="module")
def run_dir(train, make_task, conversations, data, tmp_path_factory) -> Path:
    """A run of three tasks, on a backbone whose tokenizer has no template. The file with the
    template of one is gone since."""
    folder = tmp_path_factory.mktemp("chats")
    template = folder / "ask.jinja"
    template.write_text(ASK)
    source = Source(str(conversations), chat_template=str(template))
    learns = {
        "adapter": LoRA(rank=16, alpha=32.0, target_modules=("q_proj", "down_proj")),
        "optimizer": AdamW(1e-2),
        "batch_size": 2,
        "steps": 60,
    }
    ask = make_task("ask", data=source, eval_data=source, **learns)
    tell = make_task("tell", data=Source(str(conversations), chat_template=TELL), **learns)
    texts = make_task("texts", data=data["short"], steps=1)
    assert train(folder / "run", ask, tell, texts).succeeded
    template.unlink()
    return folder / "run"


def question(chat) -> list[dict]:
    roles = {"human": "user", "gpt": "assistant"}
    return [{"role": roles[name], "content": text} for name, text in chat[:-1]]


@pytest.fixture(scope="module")
def answers(run_dir, backbone) -> dict[str, list[str]]:
    """The answers of adapters, each alone, to prompts that transformers has rendered."""
    model, tokenizer = load_backbone(backbone, "float32"), load_tokenizer(backbone)
    found = {}
    for name, template, end in (("ask", ASK, "<|im_end|>"), ("tell", TELL, "</s>")):
        given = {"chat_template": template, "add_generation_prompt": True, "tokenize": False}
        texts = [tokenizer.apply_chat_template(question(chat), **given) for chat in SHAREGPT]
        adapter = import_adapter(run_dir / "adapters" / name, model.config)
        stops = (tokenizer.convert_tokens_to_ids(end),)
        requests = [Request(text, *adapter, True, stops) for text in texts]
        found[name] = Generator(model, tokenizer).complete(requests, max_new_tokens=8)
    return found


def test_folders_have_the_templates_with_which_chats_were_rendered(run_dir):
    adapters = run_dir / "adapters"
    for name, template in (("ask", ASK), ("tell", TELL)):
        assert (adapters / name / "chat_template.jinja").read_text("utf-8") == template
        assert "`chat_template.jinja` renders" in (adapters / name / "README.md").read_text()
        assert trained_on(adapters / name) == "chats"
    assert not (adapters / "texts" / "chat_template.jinja").exists()
    assert trained_on(adapters / "texts") == "texts"


def test_exports_have_what_the_run_remembers(run_dir, tmp_path):
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path / 'a'}"]) == 0
    for folder in (run_dir / "adapters").iterdir():
        for path in folder.iterdir():
            assert (tmp_path / "a" / folder.name / path.name).read_bytes() == path.read_bytes()
    merged = ["--merge", "--task=tell"]
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path / 'b'}", *merged]) == 0
    assert AutoTokenizer.from_pretrained(tmp_path / "b" / "tell").chat_template == TELL


@pytest.mark.parametrize("form", ["a list", "files"])
def test_a_merged_checkpoint_keeps_the_further_templates_of_its_tokenizer(
    form, run_dir, backbone, tmp_path
):
    named = tmp_path / "backbone"
    shutil.copytree(backbone, named)
    tokenizer = AutoTokenizer.from_pretrained(named)
    templates = {"default": "{{ messages }}", "tool_use": "{{ tools }}", "rag": "{{ documents }}"}
    tokenizer.chat_template = templates
    tokenizer.save_pretrained(named, save_jinja_files=form == "files")
    shutil.copytree(run_dir, tmp_path / "run")
    record = json.loads((run_dir / "run.json").read_text())
    record["backbone"] = str(named)
    (tmp_path / "run" / "run.json").write_text(json.dumps(record))
    arguments = [f"--run_dir={tmp_path / 'run'}", f"--out={tmp_path / 'out'}", "--merge"]
    assert export(arguments) == 0
    for task, changed in (("tell", {"default": TELL}), ("texts", {})):
        merged = AutoTokenizer.from_pretrained(tmp_path / "out" / task)
        assert merged.chat_template == templates | changed


def test_an_export_that_replaces_an_adapter_replaces_its_template(run_dir, tmp_path):
    shutil.copytree(run_dir / "adapters" / "ask", tmp_path / "texts")
    assert export([f"--run_dir={run_dir}", f"--out={tmp_path}", "--task=texts", "--overwrite"]) == 0
    assert not (tmp_path / "texts" / "chat_template.jinja").exists()


def test_a_template_that_an_earlier_version_has_not_kept_is_missed(run_dir, tmp_path, capsys):
    shutil.copytree(run_dir, tmp_path / "run")
    path = tmp_path / "run" / "run.json"
    record = json.loads(path.read_text())
    del record["rendering"]
    path.write_text(json.dumps(record))
    assert export([f"--run_dir={path.parent}", f"--out={tmp_path / 'out'}"]) == 0
    warnings = capsys.readouterr().err
    assert "task ask: warning: an earlier version" in warnings and "task texts" not in warnings
    assert trained_on(tmp_path / "out" / "ask") == ""


def test_every_adapter_gets_its_own_template_in_one_batch(
    run_dir, backbone, conversations, answers, tmp_path, capsys
):
    out = tmp_path / "out.jsonl"
    arguments = [f"--adapter={run_dir / 'adapters' / name}" for name in ("ask", "tell")]
    arguments += [f"--backbone={backbone}", f"--prompts={conversations}", "--max_new_tokens=8"]
    assert generate([*arguments, f"--out={out}"]) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    for name in ("ask", "tell"):
        assert [r["completion"] for r in found if r["adapter"] == name] == answers[name]
    assert answers["ask"] != answers["tell"] and all(map(len, answers["ask"] + answers["tell"]))
    assert "hint" not in capsys.readouterr().err


def test_a_chat_that_is_piped_shows_its_questions(run_dir, backbone, answers, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("red apple\n\n/new\nred apple\n"))
    folders = [f"--adapter={run_dir / 'adapters' / name}" for name in ("ask", "tell")]
    assert generate([f"--backbone={backbone}", *folders, "--chat", "--max_new_tokens=8"]) == 0
    turn = "> red apple\n" + "".join(f"[{n}]\n{answers[n][0]}\n" for n in ("ask", "tell"))
    assert capsys.readouterr().out == f"{turn}> /new\n{turn}"


@pytest.mark.parametrize(
    ("arguments", "hint"),
    [
        (["--prompt=fig", "--prompt=plum"], "ask, tell were trained on chats; use --template"),
        (["--prompt=fig", "--template"], "texts was trained on texts, not on chats; use --prompt"),
    ],
)
def test_another_kind_of_prompts_gets_one_hint(run_dir, chat_backbone, arguments, hint, capsys):
    given = [f"--run_dir={run_dir}", f"--backbone={chat_backbone}", "--max_new_tokens=1"]
    assert generate([*given, *arguments]) == 0
    found = re.findall("^hint: .*", capsys.readouterr().err, re.M)
    assert len(found) == 1 and hint in found[0]


def test_the_tokenizers_template_can_be_replaced(run_dir, backbone, tmp_path, capsys):
    given = [f"--run_dir={run_dir}", "--chat", "--max_new_tokens=1"]
    assert generate(given) == 2
    assert "texts: a chat needs a chat template" in capsys.readouterr().err
    template = tmp_path / "other.jinja"
    template.write_text("{% for m in messages %}{{ m.content }}")
    assert generate([*given, f"--chat_template={template}"]) == 2
    assert f"{template}: Unexpected end of template" in capsys.readouterr().err


def test_losses_are_those_of_training_though_the_template_is_gone(run_dir, conversations, tmp_path):
    lines = [json.loads(line) for line in (run_dir / "held_out.jsonl").read_text().splitlines()]
    for arguments in (["--task=ask"], ["--task=ask", "--task=tell", f"--data={conversations}"]):
        out = tmp_path / "out.json"
        assert evaluate([f"--run_dir={run_dir}", f"--out={out}", *arguments]) == 0
        ask, *others = json.loads(out.read_text())["results"]
        assert ask["adapter"]["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-6)
        assert ask["adapter"]["exact_match"] == 1 > ask["backbone"]["exact_match"]
        assert all(own["adapter"]["exact_match"] == 1 for own in others)


def test_tokenizers_beside_adapters_of_other_programs_are_used(backbone, tmp_path):
    tokenizer = load_tokenizer(backbone)
    assert adapter_tokenizer(tmp_path, tokenizer) is tokenizer
    other = load_tokenizer(backbone)
    other.chat_template = TELL
    for is_file in (True, False):
        other.save_pretrained(tmp_path / str(is_file), save_jinja_files=is_file)
        found = adapter_tokenizer(tmp_path / str(is_file), tokenizer)
        assert found.chat_template == TELL and tokenizer.chat_template is None
        assert end_of_turn(found) == [tokenizer.eos_token_id] and end_of_turn(tokenizer) == []


@pytest.mark.parametrize("is_file", [True, False])
@pytest.mark.parametrize("names", [("default", "rag"), ("rag", "tool_use")])
def test_all_templates_beside_an_adapter_are_those_that_transformers_reads(
    names, is_file, backbone, tmp_path
):
    """Also without the vocabulary with which transformers reads them."""
    tokenizer, other = load_tokenizer(backbone), load_tokenizer(backbone)
    other.chat_template = {name: name + TELL for name in names}
    other.save_pretrained(tmp_path, save_jinja_files=is_file)
    expected = AutoTokenizer.from_pretrained(tmp_path).chat_template
    (tmp_path / "tokenizer.json").unlink()
    assert adapter_tokenizer(tmp_path, tokenizer).chat_template == expected


OTHER = TELL.replace("<|im_start|>", "<|im_start|><|tool|>")


def with_other_tokens(folder: Path, backbone: Path) -> Tokenizer:
    """Writes a tokenizer into a folder, whose ordinary tokens are the backbone's in reverse order,
    and which has "<|tool|>" in place of "<pad>"."""
    shutil.copy(backbone / "tokenizer_config.json", folder)
    content = json.loads((backbone / "tokenizer.json").read_text())
    vocab = content["model"]["vocab"]
    ordinary = [token for token in vocab if not re.fullmatch("<.+>", token)]
    ids = sorted((vocab[token] for token in ordinary), reverse=True)
    vocab |= dict(zip(ordinary, ids, strict=True))
    for token in content["added_tokens"]:
        if token["content"] == "<pad>":
            token["content"] = "<|tool|>"
            vocab["<|tool|>"] = vocab.pop("<pad>")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    settings |= {"pad_token": "<|tool|>", "chat_template": OTHER}
    settings.pop("added_tokens_decoder", None)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.fixture
def adapter_with_tokens(run_dir, backbone, tmp_path) -> tuple[Path, Tokenizer]:
    folder = tmp_path / "tell"
    shutil.copytree(run_dir / "adapters" / "tell", folder)
    (folder / "chat_template.jinja").unlink()
    return folder, with_other_tokens(folder, backbone)


def test_an_adapter_with_other_tokens_is_read_by_its_own_tokenizer(
    adapter_with_tokens, backbone, run_dir, answers, tmp_path
):
    folder, core = adapter_with_tokens
    model, tokenizer = load_backbone(backbone, "float32"), load_tokenizer(backbone)
    prompt = "a red apple, <|tool|> and"
    ids = core.encode(prompt).ids
    assert core.token_to_id("<|tool|>") in ids and ids != tokenizer(prompt)["input_ids"]
    # What the adapter writes behind these tokens, as the backbone's tokenizer spells it, and as its
    # own does.
    adapter = import_adapter(folder, model.config)
    (spelt,) = Generator(model, tokenizer).complete([Request(ids, *adapter)], max_new_tokens=8)
    (expected,) = Generator(model, load_tokenizer(folder)).complete(
        [Request(ids, *adapter)], max_new_tokens=8
    )
    assert expected != spelt

    out = tmp_path / "out.jsonl"
    ask = run_dir / "adapters" / "ask"
    given = [f"--backbone={backbone}", f"--out={out}", "--max_new_tokens=8"]
    both = [f"--adapter=ask={ask}", f"--adapter={folder}"]
    assert generate([*given, *both, f"--prompt={prompt}"]) == 0
    found = {own["adapter"]: own["completion"] for own in map(json.loads, out.open())}
    assert found["tell"] == expected

    assert generate([*given, *both, "--prompt=red apple", "--template"]) == 0
    found = {own["adapter"]: own["completion"] for own in map(json.loads, out.open())}
    assert found["ask"] == answers["ask"][0]
    text = "<|im_start|><|tool|>user: red apple</s><|im_start|><|tool|>assistant: "
    ids = core.encode(text, add_special_tokens=False).ids
    (expected,) = Generator(model, load_tokenizer(folder)).complete(
        [Request(ids, *adapter)], max_new_tokens=8
    )
    assert found["tell"] == expected


def test_losses_are_measured_with_the_adapters_own_tokens(
    adapter_with_tokens, backbone, conversations, tmp_path
):
    """They are those of a backbone whose folder has the adapter's tokenizer."""
    folder, _ = adapter_with_tokens
    other = tmp_path / "backbone"
    shutil.copytree(backbone, other)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / name, other)
    alone = tmp_path / "alone"
    shutil.copytree(folder, alone, ignore=shutil.ignore_patterns("tokenizer*"))
    losses = []
    for base, adapter in ((backbone, folder), (other, alone)):
        out = tmp_path / "out.json"
        given = [f"--backbone={base}", f"--adapter={adapter}", f"--data={conversations}"]
        assert evaluate([*given, f"--out={out}", "--max_new_tokens=2"]) == 0
        (result,) = json.loads(out.read_text())["results"]
        losses.append({key: result[key] for key in ("adapter", "backbone", "target_tokens")})
    assert losses[0] == losses[1]


def test_an_adapter_with_other_tokens_is_no_start_of_training(
    adapter_with_tokens, train, make_task, data, tmp_path
):
    folder, _ = adapter_with_tokens
    task = make_task("on", data=data["short"], steps=1, resume_from=str(folder))
    with pytest.raises(TaskError, match=r"'<\|tool\|>' at 3, which the backbone's lacks"):
        train(tmp_path / "run", task)


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("added_tokens.json", {"<|tool|>": 500}, "the token '<|tool|>' at 500"),
        (
            "tokenizer_config.json",
            {"added_tokens_decoder": {"3": {"content": "<|tool|>"}}, "chat_template": TELL},
            "the token '<|tool|>' at 3",
        ),
        ("tokenizer_config.json", {"eos_token": "<|im_end|>"}, "eos_token '<|im_end|>'"),
        ("special_tokens_map.json", {"bos_token": {"content": "<|b|>"}}, "bos_token '<|b|>'"),
        ("tokenizer.json", {}, "no tokenizer can be loaded"),
        ("tokenizer_config.json", {"added_tokens_decoder": ["<t>"]}, "added_tokens_decoder should"),
        ("tokenizer_config.json", {"added_tokens_decoder": {"3": {}}}, "added_tokens_decoder shou"),
        ("tokenizer_config.json", {"chat_template": [TELL]}, "chat_template should be a text, or"),
    ],
)
def test_settings_of_other_tokens_without_a_vocabulary_are_refused(
    name, content, said, backbone, tmp_path
):
    (tmp_path / name).write_text(json.dumps(content))
    with pytest.raises(DataError, match=re.escape(said)) as refusal:
        adapter_tokenizer(tmp_path, load_tokenizer(backbone))
    assert str(tmp_path) in str(refusal.value)


def test_a_tokenizer_that_transformers_class_has_changed_has_other_tokens(backbone, tmp_path):
    """Trainers save what `AutoTokenizer` has made of the backbone's folder."""
    tokenizer = load_tokenizer(backbone)
    core = Tokenizer.from_file(str(backbone / "tokenizer.json"))
    core.normalizer = normalizers.Lowercase()
    core.save(str(tmp_path / "tokenizer.json"))
    own = adapter_tokenizer(tmp_path, tokenizer)
    assert own("RED")["input_ids"] == tokenizer("red")["input_ids"] != tokenizer("RED")["input_ids"]
    assert own.eos_token == tokenizer.eos_token


def test_a_run_keeps_the_date_that_its_template_writes(
    train, make_task, conversations, tmp_path, monkeypatch, capsys
):
    class Earlier(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2024, 7, 6, 5, 4, 3)

    template = TELL.replace("{% for", "{{ strftime_now('%H:%M:%S') }}{% for", 1)
    source = Source(str(conversations), chat_template=template)
    task = make_task("dated", data=source, eval_data=source, batch_size=2, steps=1)
    with monkeypatch.context() as patched:
        patched.setattr("jaxmux.runs.run_directory.datetime", Earlier)
        assert train(tmp_path / "run", task).succeeded
    assert train(tmp_path / "run", dataclasses.replace(task, steps=2)).succeeded
    record = json.loads((tmp_path / "run" / "run.json").read_text())
    assert record["begun"] == "2024-07-06T05:04:03"
    assert record["rendering"]["dated"]["date"] == "2024-07-06 05:04:03"
    assert capsys.readouterr().out.count("the date, which stays 2024-07-06 05:04:03 in this") == 2
    # The held-out loss is that of training, so the date is the same.
    lines = [json.loads(line) for line in (tmp_path / "run" / "held_out.jsonl").open()]
    assert evaluate([f"--run_dir={tmp_path / 'run'}", f"--out={tmp_path / 'e.json'}"]) == 0
    (found,) = json.loads((tmp_path / "e.json").read_text())["results"]
    assert found["adapter"]["loss"] == pytest.approx(lines[-1]["loss"], rel=1e-6)
