"""`jaxmux data` shows what the tasks of a config train on, without any device."""

import json
import os
import subprocess
import sys
from functools import partial

import gin
import pytest

from jaxmux import PromptTuning
from jaxmux.cli.main import run_command
from jaxmux.data import load_tokenizer
from jaxmux.models import resolve_backbone

main = partial(run_command, "data", prog="jaxmux data")

CONFIG = """
fine_tune.backbone = "jaxmux:demo/base"
fine_tune.tasks = [@chat/Task(), @plain/Task()]
fine_tune.tokens_per_microbatch = 256
chat/Task.name = "chat"
chat/Task.data = [@a/Source(), @b/Source()]
chat/Task.steps = 6
chat/Task.batch_size = 4
chat/Task.max_length = 40
a/Source.path = "{folder}/a.jsonl"
a/Source.weight = 3
a/Source.on_bad_record = "skip"
b/Source.path = "{folder}/b.jsonl"
b/Source.weight = 1
plain/Task.name = "plain"
plain/Task.data = "{folder}/b.jsonl"
plain/Task.validation_fraction = 0.4
plain/Task.epochs = 2
plain/Task.batch_size = 2
"""
RUN_AND_ASK_FOR_DEVICES = """
import sys
from jaxmux.cli.main import run_command

assert run_command("data", sys.argv[1:], "jaxmux data") == 0
from jax._src import xla_bridge

print("devices:", xla_bridge.backends_are_initialized(), file=sys.stderr)
import torch
"""
TORCH = "import sys; print('torch is imported', file=sys.stderr)"


@pytest.fixture(autouse=True)
def clean_gin():
    """Clears gin's configuration, which is global."""
    yield
    gin.clear_config()


@pytest.fixture
def config(tmp_path):
    """Two tasks; one has a mixture with a record that is cut, one that is bad, and a terminal's
    control character."""
    a = [{"prompt": f"Max is {n}.", "completion": " Why?\x1b[31m"} for n in range(3)]
    a[1]["completion"] = " Max said no." * 20
    a[2]["completion"] = 7
    b = [{"prompt": f"{n} and", "completion": " then some."} for n in range(10)]
    for name, rows in (("a", a), ("b", b)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = tmp_path / "run.gin"
    path.write_text(CONFIG.format(folder=tmp_path))
    return f"--gin_file={path}"


def test_the_output_shows_samples_shares_lengths_and_rows(config, capsys):
    assert main([config, "--samples=2"]) == 0
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    words = " ".join(shown.split())
    # Ten samples of b are a quarter of an epoch, and two of a are the rest.
    assert "task chat: 40 samples in an epoch, 0 held out, 6 steps of 4 are 0.60 epochs" in words
    assert "longest 40 of at most 40 tokens" in words
    assert "75.0%" in words and "25.0%" in words
    # Lines break anywhere in a long path.
    joined = "".join(shown.split())
    assert "1badrecordleftout,thefirstbecauseof" in joined and "a.jsonl:3:" in joined
    assert "of the tokens that carry loss are cut off" in words
    assert "Max is 0.⟦ Why?\\x1b[31m</s>⟧" in shown and "40 tokens, 3" in words
    assert "at max_length" in words
    assert "places in 1 microbatch, in chunks of 64" in words
    assert "a sample of n tokens takes n - 1 places" in words and "demo" not in shown
    assert "a chat: " in words and "b plain: " in words


def test_json_has_the_tokens_and_the_mask_that_training_gets(config, capsys):
    assert main([config, "--json", "--samples=1"]) == 0
    found = json.loads(capsys.readouterr().out)
    chat, plain = found["tasks"]["chat"], found["tasks"]["plain"]
    assert [source["epoch_samples"] for source in chat["sources"]] == [30, 10]
    assert [source["share"] for source in chat["sources"]] == [0.75, 0.25]
    a = chat["sources"][0]
    assert (a["records"], a["truncated"], a["bad_records"]) == (3, 1, 1)
    assert plain["samples"] + plain["held_out"] == 10 and plain["held_out"] > 0
    assert plain["epochs"] == 2
    assert sum(count for *_, count in chat["histogram"]) == 40
    tokenizer = load_tokenizer(resolve_backbone("jaxmux:demo/base"))
    sample = chat["shown"][1]
    assert sample["tokens"] == [*tokenizer("0 and then some.")["input_ids"], tokenizer.eos_token_id]
    assert "".join(text for text, _ in sample["parts"]) == tokenizer.decode(sample["tokens"])
    assert sample["parts"][-1] == [" then some.</s>", True]
    rows = found["packing"]["first_microbatch"]
    assert len(rows) == found["packing"]["rows_used"] < found["packing"]["rows"]
    of_chat = [own for row in rows for own in row if own["task"] == "chat"]
    assert len(of_chat) == 4
    used = sum(own["places"] for row in rows for own in row)
    assert found["packing"]["padding"] == pytest.approx(1 - used / (64 * len(rows)))


def test_virtual_tokens_take_places_but_are_no_tokens_of_samples(config, capsys):
    found = []
    for adapter in ("LoRA", "PromptTuning"):
        setting = f"--gin.plain/Task.adapter=@plain/{adapter}()"
        assert main([config, "--json", "--samples=1", setting]) == 0
        found.append(json.loads(capsys.readouterr().out))
    lora, prompt = found
    assert prompt["tasks"] == lora["tasks"]
    places = [
        sum(p["places"] for row in own["packing"]["first_microbatch"] for p in row) for own in found
    ]
    # The first global batch has two samples of the task.
    assert places[1] - places[0] == 2 * PromptTuning().virtual_tokens


@pytest.mark.long
def test_the_demo_is_named_and_its_lengths_are_those_of_its_plan(tmp_path, capsys):
    said = "no --gin_file: this is the bundled demo"
    assert main(["--samples=0"]) == 0
    assert capsys.readouterr().out.startswith(said)
    assert main(["--json", "--samples=0"]) == 0
    shown = capsys.readouterr()
    assert shown.err.startswith(said)
    data = json.loads(shown.out)["tasks"]
    assert run_command("plan", ["--rounds=1", f"--out={tmp_path}"], prog="jaxmux plan") == 0
    plan = {
        task["name"]: task for task in json.loads((tmp_path / "plan.json").read_text())["tasks"]
    }
    assert list(plan) == list(data)
    for name, own in data.items():
        tokens = sum(source["epoch_tokens"] for source in own["sources"])
        assert (own["longest"], tokens) == (plan[name]["longest"], plan[name]["tokens"])


def test_what_training_would_warn_of_is_told(tmp_path, capsys):
    """Samples beyond the context of the backbone, and special tokens that records spell."""
    data = tmp_path / "long.jsonl"
    eos = load_tokenizer(resolve_backbone("jaxmux:demo/base")).eos_token
    data.write_text(json.dumps({"text": f"{eos}Max said no. " * 300}) + "\n")
    path = tmp_path / "run.gin"
    path.write_text(
        "fine_tune.backbone = 'jaxmux:demo/base'\nfine_tune.tasks = [@Task()]\nTask.name = 'a'\n"
        f"Task.data = '{data}'\nTask.steps = 1\nTask.max_length = 1024\n"
    )
    assert main([f"--gin_file={path}"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert "the backbone was made for 512 tokens" in said
    assert f"the text of 1 record spells special tokens such as {eos!r}" in said


def one_task(folder, name, records, objective, batch_size):
    """Writes the records of a task, and a config that trains two epochs of them."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    config = folder / f"{name}.gin"
    config.write_text(
        f"""
        fine_tune.backbone = "jaxmux:demo/base"
        fine_tune.tasks = [@Task()]
        Task.name = "{name}"
        Task.data = "{folder}/{name}.jsonl"
        Task.objective = @{objective}()
        Task.epochs = 2
        Task.batch_size = {batch_size}
        """
    )
    return config


def words_shown(capsys):
    """The words of what has been printed, of which no line is too long for a terminal."""
    shown = capsys.readouterr().out
    assert max(map(len, shown.splitlines())) <= 80
    return " ".join(shown.split())


def test_records_of_preferences_are_shown_and_counted_as_pairs(tmp_path, capsys):
    pairs = [
        {"prompt": f"Max is {n}.", "chosen": " Why?" * (1 + n), "rejected": " No."}
        for n in range(5)
    ]
    pairs.append({"prompt": "Max", "chosen": " sings.", "rejected": " sings."})
    config = one_task(tmp_path, "pairs", pairs, "DPO", batch_size=4)
    assert main([f"--gin_file={config}", "--samples=1"]) == 0
    words = words_shown(capsys)
    assert (
        "task pairs: 6 pairs in an epoch, 0 held out, 4 steps of 4 pairs are 2.00 epochs" in words
    )
    assert "1 pair of equal answers" in words
    assert "the chosen answer is the longer one in 67% of the pairs" in words
    assert "pair 1, chosen" in words and "pair 1, rejected" in words and "pair 2" not in words
    assert "<s>Max is 0.⟦ Why?</s>⟧" in words and "<s>Max is 0.⟦ No.</s>⟧" in words
    assert main([f"--gin_file={config}", "--samples=1", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["tasks"]["pairs"]
    assert (report["unit"], report["samples"], report["objective"]) == ("pair", 6, "dpo")
    assert [source["epoch_samples"] for source in report["sources"]] == [6]
    assert sum(count for *_, count in report["histogram"]) == 12
    assert report["answers"]["chosen"]["longest"] > report["answers"]["rejected"]["longest"]


def test_labelled_answers_are_shown_with_their_labels(tmp_path, capsys):
    records = [
        {"prompt": f"Max is {n}.", "completion": " Why?" * (1 + n % 2), "label": n > 0}
        for n in range(4)
    ]
    config = one_task(tmp_path, "labels", records, "KTO", batch_size=2)
    assert main([f"--gin_file={config}", "--samples=2"]) == 0
    words = words_shown(capsys)
    assert "task labels: 4 answers in an epoch, 0 held out, 4 steps of 2 answers" in words
    assert "divided by undesirable_weight times 1 undesirable ones, is 3;" in words
    assert "answer 1, undesirable" in words and "answer 2, desirable" in words
    assert "<s>Max is 0.⟦ Why?</s>⟧" in words and "answer 3," not in words
    assert main([f"--gin_file={config}", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    of_task = report["tasks"]["labels"]
    # Mismatched answers are neither counted nor trained.
    assert sum(count for *_, count in of_task["histogram"]) == 4
    assert [of_task["answers"][name]["count"] for name in ("undesirable", "desirable")] == [1, 3]
    assert sum(map(len, report["packing"]["first_microbatch"])) == 2


def test_a_task_can_be_chosen(config, capsys):
    assert main([config, "--task=plain", "--samples=0"]) == 0
    shown = capsys.readouterr().out
    assert "task plain" in shown and "chat" not in shown and "first samples" not in shown
    gin.clear_config()
    assert main([config, "--task=plane"]) == 2
    error = "error: --task: no task 'plane'; did you mean plain?"
    assert capsys.readouterr().err.strip() == error


def test_a_sweep_stands_for_its_configurations(config, tmp_path, capsys):
    path = tmp_path / "sweep.gin"
    path.write_text(
        CONFIG.format(folder=tmp_path)
        + "fine_tune.tasks = [@chat/Task(), @plain/Sweep()]\n"
        + "plain/Sweep.task = @plain/Task()\n"
        + "plain/Sweep.space = {'max_length': [4, 40]}\n"
    )
    assert main([f"--gin_file={path}", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["tasks"]
    assert list(found) == ["chat", "plain-max_length_4", "plain-max_length_40"]
    assert found["plain-max_length_4"]["longest"] == 4 < found["plain-max_length_40"]["longest"]


def test_data_that_cannot_be_trained_on_are_refused_with_their_place(config, tmp_path, capsys):
    assert main([config, "--gin.a/Source.on_bad_record='error'"]) == 2
    assert f"error: task 'chat': {tmp_path}/a.jsonl:3: " in capsys.readouterr().err


@pytest.mark.long
def test_colours_take_the_place_of_marks_and_neither_a_device_nor_torch_is_used(config, tmp_path):
    """Afterwards torch can be imported."""
    for file, text in (
        ("torch/__init__.py", TORCH),
        ("torch-9.9.dist-info/METADATA", "Metadata-Version: 2.1\nName: torch\nVersion: 9.9\n"),
    ):
        path = tmp_path / "packages" / file
        path.parent.mkdir(parents=True)
        path.write_text(text)
    environment = {
        "FORCE_COLOR": "1",
        "TERM": "xterm-256color",
        "PYTHONPATH": tmp_path / "packages",
    }
    command = [sys.executable, "-c", RUN_AND_ASK_FOR_DEVICES, config, "--task=plain"]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, **environment},
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.endswith("devices: False\ntorch is imported\n")
    assert done.stderr.count("torch is imported") == 1
    assert "⟦" not in done.stdout and "\x1b[1;32m then some.</s>\x1b[0m" in done.stdout


def test_a_byte_order_mark_before_a_config_is_no_part_of_it(config, tmp_path, capsys):
    path = tmp_path / "run.gin"
    text = path.read_text(encoding="utf-8")
    (tmp_path / "included.gin").write_text(text, encoding="utf-8-sig")
    path.write_text(f"include '{tmp_path}/included.gin'\n", encoding="utf-8-sig")
    assert main([config, "--task=plain", "--json"]) == 0
    marked = capsys.readouterr().out
    gin.clear_config()
    path.write_text(text, encoding="utf-8")
    assert main([config, "--task=plain", "--json"]) == 0
    assert capsys.readouterr().out == marked
