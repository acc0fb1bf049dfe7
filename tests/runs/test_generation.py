"""Completions of prompts with and without adapters."""

import argparse
import copy
import dataclasses
import io
import json
import re
import shutil
from functools import partial

import numpy as np
import pytest

from jaxmux import AdamW, LoRA, export_adapter, import_adapter, load_backbone
from jaxmux.cli import generate_chat, generate_prompts
from jaxmux.cli.main import run_command
from jaxmux.data import load_tokenizer
from jaxmux.generation import (
    Conversation,
    Generator,
    Request,
    Sampling,
    complete,
    end_of_turn,
)
from jaxmux.generation.programs import read_prompts, write_tokens
from jaxmux.peft import Factors, initial_adapter, resolve_targets

main = partial(run_command, "generate", prog="jaxmux generate")


PROMPTS = ("red apple", "fig", "the brown lemon and the plum")
NEW = 12


@pytest.fixture(scope="module")
def model(backbone):
    return load_backbone(backbone, "float32")


@pytest.fixture(scope="module")
def tokenizer(backbone):
    return load_tokenizer(backbone)


@pytest.fixture(scope="module")
def adapters(model):
    """Two specifications with random factors that change the completions."""
    own = ("q_proj", "o_proj", "down_proj")
    specs = (
        LoRA(rank=4, alpha=8.0, target_modules=own),
        LoRA(rank=2, alpha=2.0, target_modules=("v_proj", "up_proj")),
    )
    return [(spec, random_adapter(spec, model.config, seed)) for seed, spec in enumerate(specs)]


def random_adapter(spec: LoRA, config, seed: int):
    rng = np.random.default_rng(seed)
    fresh = initial_adapter(spec, resolve_targets(spec.target_modules, config), config, seed)
    return {
        module: Factors(a, 0.3 * rng.standard_normal(b.shape).astype(np.float32))
        for module, (a, b) in fresh.items()
    }


@pytest.fixture(scope="module")
def step_by_step(tokenizer, logits_of):
    """Ids of the greedy completion, with one full forward pass for each token."""

    def greedy(prompt: str, spec=None, adapter=None, count: int = NEW) -> list[int]:
        ids = list(tokenizer(prompt)["input_ids"])
        start = len(ids)
        while len(ids) < start + count and ids[-1] != tokenizer.eos_token_id:
            ids.append(int(logits_of(ids, spec, adapter)[-1].argmax()))
        return [i for i in ids[start:] if i != tokenizer.eos_token_id]

    return greedy


def test_foreign_files_are_not_replaced_by_completions(backbone, tmp_path, capsys):
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    assert main([f"--backbone={backbone}", "--prompt=fig", f"--out={path}"]) == 2
    assert f"{path}: exists and is no file of completions" in capsys.readouterr().err
    assert path.read_text() == "precious"


@pytest.mark.long
def test_greedy_completion_is_the_argmax_step_by_step(model, tokenizer, adapters, step_by_step):
    requests = [Request(PROMPTS[0])]
    requests += [Request(prompt, *a) for prompt, a in zip(PROMPTS[1:], adapters, strict=True)]
    found = complete(model, tokenizer, requests, max_new_tokens=NEW)
    ids = [step_by_step(*request[:3]) for request in requests]
    assert found == [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
    assert len({tuple(i) for i in ids}) == 3


@pytest.mark.long
def test_prompts_with_different_adapters_do_not_mix(model, tokenizer, adapters):
    own = [(None, None), *adapters]
    requests = [Request(PROMPTS[i % 3], *own[(i + i // 3) % 3]) for i in range(4)]
    together = complete(model, tokenizer, requests, max_new_tokens=NEW)
    # One prompt without an adapter and with one.
    alone = [complete(model, tokenizer, [r], max_new_tokens=NEW)[0] for r in requests[::3]]
    assert together[::3] == alone
    assert len(set(together)) == len(requests)


@pytest.mark.long
def test_draws_follow_the_seed_of_a_sequence_alone(model, tokenizer, adapters):
    """Not its neighbours, nor the number of sequences that are computed together."""
    requests = [Request(PROMPTS[i % 3], *adapters[i % 2]) for i in range(4)]
    sampling = Sampling(temperature=1.5, top_p=0.9, top_k=40, seed=3)
    generator = Generator(model, tokenizer)
    together = generator.complete(requests, max_new_tokens=NEW, sampling=sampling)
    pairs = Generator(model, tokenizer, max_batch=2)
    assert pairs.complete(requests, max_new_tokens=NEW, sampling=sampling) == together
    own = dataclasses.replace(sampling, seed=sampling.seed + 2)
    assert generator.complete(requests[2:3], max_new_tokens=NEW, sampling=own) == together[2:3]
    assert generator.complete(requests[2:3], max_new_tokens=NEW, sampling=sampling) != together[2:3]


@pytest.mark.long
def test_rows_that_become_free_are_filled_whatever_the_order(model, tokenizer, adapters):
    """Prompts and completions of very different lengths, in a batch of few rows."""
    own = [(None, None), *adapters]
    prompts = [" ".join(PROMPTS[: 1 + i % 3] * (1 + i // 9 * 60)) for i in range(11)]
    requests = [Request(p, *own[i % 3], stops=range(6, 60)) for i, p in enumerate(prompts)]
    given = {"max_new_tokens": 40}
    generator = Generator(model, tokenizer, max_batch=4)
    programs = read_prompts._cache_size(), write_tokens._cache_size()
    found = generator.complete(requests, **given)
    lengths = [*map(len, found)]
    assert 4 * min(lengths) < max(lengths)
    # One for each power of two among the lengths of prompts; and one for each size of the cache.
    assert read_prompts._cache_size() - programs[0] <= 4
    assert write_tokens._cache_size() - programs[1] == 2
    order = np.random.default_rng(0).permutation(len(requests))
    again = generator.complete([requests[i] for i in order], **given)
    assert again == [found[i] for i in order]
    assert generator.complete(requests[9:], **given) == found[9:]


@pytest.mark.long
def test_a_row_is_not_harmed_by_the_sequence_before(model, tokenizer, adapters):
    spec, adapter = adapters[0]
    broken = {module: Factors(a, np.full_like(b, np.nan)) for module, (a, b) in adapter.items()}
    generator = Generator(model, tokenizer, max_batch=1)
    given = {"max_new_tokens": 5}
    long, short = " ".join(PROMPTS * 2), PROMPTS[0]
    _, found = generator.complete([Request(long, spec, broken), Request(short)], **given)
    assert found == generator.complete([Request(short)], **given)[0]


@pytest.mark.long
def test_pieces_join_to_the_completion(model, tokenizer, adapters):
    requests = [Request(PROMPTS[i % 3], *adapters[i % 2]) for i in range(4)]
    generator, given = Generator(model, tokenizer), {"max_new_tokens": 30}
    pieces = list(generator.stream(requests, **given))
    texts = ["".join(p.text for p in pieces if p.request == i) for i in range(4)]
    assert texts == generator.complete(requests, **given)
    assert [sum(p.is_last for p in pieces if p.request == i) for i in range(4)] == [1] * 4
    assert len(pieces) > 4


@pytest.mark.long
def test_completion_ends_before_the_eos_token(model, tokenizer, step_by_step):
    ids = step_by_step(PROMPTS[0])
    stop = next(i for i in ids[1:] if i != ids[0])
    stopping = copy.deepcopy(tokenizer)
    stopping.eos_token = tokenizer.convert_ids_to_tokens(stop)
    (found,) = complete(model, stopping, [Request(PROMPTS[0])], max_new_tokens=NEW)
    assert found == tokenizer.decode(ids[: ids.index(stop)], skip_special_tokens=True)


@pytest.mark.long
def test_each_request_has_its_own_stops(model, tokenizer, step_by_step):
    ids = step_by_step(PROMPTS[0])
    ends = [ids[0], next(i for i in ids[1:] if i != ids[0])]
    requests = [Request(PROMPTS[0], stops=stops) for stops in ((), ends[1:], ends)]
    found = complete(model, tokenizer, requests, max_new_tokens=NEW)
    wanted = [ids, ids[: ids.index(ends[1])], []]
    assert found == [tokenizer.decode(own, skip_special_tokens=True) for own in wanted]


@pytest.mark.long
def test_completion_has_at_most_the_tokens_asked_for(model, tokenizer, step_by_step):
    long = " ".join(PROMPTS * 3)
    # The prompt leaves room in its row only for the new tokens.
    for count in (1, 5):
        (found,) = complete(model, tokenizer, [Request(long)], max_new_tokens=count)
        expected = step_by_step(long, count=count)
        assert found == tokenizer.decode(expected, skip_special_tokens=True)


@pytest.mark.long
def test_exported_adapter_completes_alike(model, tokenizer, adapters, backbone, tmp_path, capsys):
    spec, adapter = adapters[0]
    export_adapter(tmp_path, adapter, spec, model.config, str(backbone))
    prompt = f"--prompt={PROMPTS[1]}"
    status = main(
        [f"--backbone={backbone}", f"--adapter={tmp_path}", prompt, f"--max_new_tokens={NEW}"]
    )
    expected = complete(model, tokenizer, [Request(PROMPTS[1], *adapters[0])], max_new_tokens=NEW)
    assert status == 0
    assert expected[0].strip() in capsys.readouterr().out


@pytest.mark.parametrize("argument", ["--backbone", "--adapter"])
def test_missing_folder_is_named(argument, backbone, tmp_path, capsys):
    nowhere = tmp_path / "nowhere"
    arguments = [f"--backbone={backbone}", "--prompt=fig", f"{argument}={nowhere}"]
    assert main(arguments) == 2
    assert str(nowhere) in capsys.readouterr().err


@pytest.fixture(scope="module")
def run_dir(train, make_task, tmp_path_factory):
    """A training run of two tasks."""
    folder = tmp_path_factory.mktemp("generation") / "run"
    train(folder, make_task("one", steps=1), make_task("two", steps=1))
    return folder


def test_all_adapters_of_a_run_answer_with_the_base(run_dir, write_lines, tmp_path, capsys):
    prompts = write_lines({"prompt": "red apple"}, {"prompt": "fig"})
    out = tmp_path / "answers" / "out.jsonl"
    arguments = [f"--run_dir={run_dir}", f"--prompts={prompts}", "--with_base"]
    arguments += ["--max_new_tokens=6", "--temperature=0.7"]
    assert main([*arguments, f"--out={out}"]) == 0
    assert f"6 completions -> {out}" in capsys.readouterr().out
    found = [json.loads(line) for line in out.read_text().splitlines()]
    labels = ["base", "one", "two"]
    assert [(r["prompt"], r["adapter"]) for r in found] == [
        (prompt, label) for prompt in ("red apple", "fig") for label in labels
    ]
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    first = "".join(f"[{r['adapter']}]\n{r['completion']}\n" for r in found[:3])
    assert printed.startswith("red apple\n" + first)


def test_a_run_keeps_the_completions_of_its_prompts(train, make_task, tmp_path, capsys):
    """Those that `jaxmux generate` gives; another call with more steps adds its own."""
    run_dir, prompt = tmp_path / "run", "red\napple"
    expected = []
    for steps in (2, 3):
        others = make_task("other", steps=1, optimizer=AdamW(0.3))
        task = make_task("one", steps=steps, sample_prompt=prompt, optimizer=AdamW(0.3))
        train(run_dir, task, others, sample_tokens=6)
        out = tmp_path / f"{steps}.jsonl"
        arguments = [f"--run_dir={run_dir}", f"--prompt={prompt}", "--with_base", f"--out={out}"]
        assert main([*arguments, "--max_new_tokens=6"]) == 0
        answers = {
            own["adapter"]: own["completion"]
            for own in map(json.loads, out.read_text().split("\n")[:-1])
        }
        expected += [(0, answers["base"]), (steps, answers["one"])]
    assert len({text for _, text in expected}) > 1
    lines = [json.loads(line) for line in (run_dir / "samples.jsonl").read_text().splitlines()]
    assert {(line["task"], line["prompt"]) for line in lines} == {("one", prompt)}
    assert [(line["task_step"], line["completion"]) for line in lines] == expected


def test_a_chat_keeps_its_history_and_begins_anew(
    model, chat_backbone, run_dir, monkeypatch, capsys
):
    tokenizer = load_tokenizer(chat_backbone)
    adapters = [f"--adapter={run_dir / 'adapters' / name}" for name in ("one", "two")]
    monkeypatch.setattr("sys.stdin", io.StringIO("fig\n\nplum\n/new\nfig\n"))
    arguments = [f"--backbone={chat_backbone}", "--chat", "--max_new_tokens=5", *adapters]
    assert main(arguments) == 0
    turns = re.split(r"^> (.*)\n", capsys.readouterr().out, flags=re.M)
    assert turns[1::2] == ["fig", "plum", "/new", "fig"]
    first, second, _ = (turn.split("[two]\n")[0] for turn in turns[2::2] if turn)
    assert turns[2] == turns[8]
    own = import_adapter(run_dir / "adapters" / "one", model.config)
    messages = [{"role": "user", "content": "fig"}]
    for answer in (first, second):
        prompt = Conversation(tokenizer, messages).prompt()
        request = Request(prompt, *own, is_rendered=True, stops=end_of_turn(tokenizer))
        wanted = Generator(model, tokenizer).complete([request], max_new_tokens=5)
        assert answer == f"[one]\n{wanted[0]}\n"
        messages += [
            {"role": "assistant", "content": wanted[0].strip()},
            {"role": "user", "content": "plum"},
        ]


def test_a_turn_ends_with_the_token_of_the_template(chat_backbone, tokenizer):
    of_chats = load_tokenizer(chat_backbone)
    assert end_of_turn(of_chats) == [of_chats.convert_tokens_to_ids("<|im_end|>")]
    assert end_of_turn(tokenizer) == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt=fig"], "--backbone is required, or --run_dir"),
        (["--backbone=B"], "give --prompt, --prompts or --chat"),
        (["--backbone=B", "--chat", "--prompt=fig"], "--chat reads messages from the terminal"),
        (["--backbone=B", "--prompt=fig", "--top_p=0.5"], "give a --temperature above 0"),
        (["--backbone=B", "--prompt=fig", "--top_p=1.5"], "a number in (0, 1]"),
    ],
)
def test_options_that_do_not_belong_together_are_refused(arguments, message, capsys):
    with pytest.raises(SystemExit) as exit:
        main(arguments)
    assert exit.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())


def test_unusable_input_is_named(backbone, run_dir, write_lines, tmp_path, capsys):
    one = run_dir / "adapters" / "one"
    empty = tmp_path / "empty.txt"
    empty.write_text("\n")
    text = write_lines({"text": "fig"}, name="text.jsonl")
    messages = write_lines({"messages": [{"role": "user", "content": "fig"}]})
    for given, message in (
        ([f"--adapter={run_dir}"], f"--run_dir={run_dir} takes all of its adapters"),
        ([f"--adapter={one}", f"--run_dir={run_dir}"], "has the label 'one', and so has"),
        ([f"--adapter=base={one}"], "give it another one: --adapter=NAME="),
        ([f"--run_dir={tmp_path}"], str(tmp_path)),
        ([f"--prompts={empty}"], f"{empty}: no prompts"),
        ([f"--prompts={text}"], "the field 'prompt', 'messages' or"),
        ([f"--prompts={messages}", "--template"], "a chat needs a chat template"),
    ):
        assert main([f"--backbone={backbone}", "--prompt=fig", *given]) == 2
        assert message in capsys.readouterr().err


def test_prompts_end_at_line_feeds_only_and_begin_behind_a_byte_order_mark(tmp_path):
    path = tmp_path / "prompts.txt"
    lines = ["fig", "red\u2028apple", "form\x0cfeed\x0b", "next\x85line", "return\rhere", "", " \r"]
    path.write_bytes(("\ufeff" + "\r\n".join(lines) + "\nlast").encode())
    options = argparse.Namespace(prompt=[], prompts=[str(path)], template=False)
    found = [prompt.fields["prompt"] for prompt in generate_prompts.read_prompts(options, [None])]
    assert found == [*lines[:5], "last"]


def test_a_piped_chat_ends_lines_as_files_of_prompts_do(tmp_path, monkeypatch):
    path = tmp_path / "chat.txt"
    path.write_bytes("\ufeffred\u2028apple\r\n\r\nreturn\rhere\nlast".encode())
    with path.open() as file:
        monkeypatch.setattr("sys.stdin", file)
        assert list(generate_chat._lines()) == ["red\u2028apple", "return\rhere", "last"]


def test_context_of_prompts_that_is_not_read_gets_one_warning(tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    rows = [{"prompt": "fig", "answer": "It is a fruit.", "system": s} for s in ("a", "", "b")]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    options = argparse.Namespace(prompt=[], prompts=[str(path)], template=False)
    assert len(generate_prompts.read_prompts(options, [None])) == 3
    assert capsys.readouterr().err == f"warning: {path}: 'system' of 2 records is not read\n"


@pytest.mark.long
def test_of_several_templates_one_is_named_or_refused(backbone, tokenizer, tmp_path, capsys):
    folder = tmp_path / "several"
    shutil.copytree(backbone, folder)
    turns = "{% for m in messages %}{{ m.content }}<|im_end|>{% endfor %}"
    several = copy.copy(tokenizer)
    several.chat_template = {"rag": turns, "tool_use": "{{ tools }}" + turns}
    several.save_pretrained(folder)
    given = [f"--backbone={folder}", "--prompt=fig", "--template", "--max_new_tokens=1"]
    assert main(given) == 2
    error = capsys.readouterr().err
    assert "several chat templates ('rag', 'tool_use')" in error and "--chat_template" in error
    assert main([*given, "--chat_template=rag"]) == 0
    # Answers to chats with tools end as their template ends them.
    assert end_of_turn(several) == tokenizer.convert_tokens_to_ids(["<|im_end|>"])
