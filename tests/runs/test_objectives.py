"""Preference tasks in training runs, sweeps and servers: breaks, warnings and what is written."""

import json
import signal
from functools import partial

import numpy as np
import pytest

from jaxmux import (
    DPO,
    KTO,
    SFT,
    AdamW,
    Interrupted,
    LoRA,
    Policy,
    SimPO,
    Sweep,
    TaskError,
    tuning_server,
)
from jaxmux.cli.main import run_command
from jaxmux.data import load_tokenizer
from jaxmux.engine.devices import programs
from jaxmux.engine.tasks.prepared_task import read_data
from jaxmux.models import BackboneConfig
from jaxmux.runs.sweep_results import sweep_table
from jaxmux.runs.task_warnings import of_labels
from jaxmux.server import ServerOptions
from jaxmux.server.task import ENDED

from .conftest import COLOURS, FRUITS, SERVER

evaluate = partial(run_command, "eval", prog="jaxmux eval")
DROPPED = LoRA(2, 4.0, target_modules=("q_proj", "down_proj"), dropout=0.1)


@pytest.fixture(scope="module")
def make_paired(make_task, pairs):
    def make(name="pairs", objective=None, **fields):
        fields = {"data": pairs["train"], "eval_data": pairs["eval"], "batch_size": 3} | fields
        return make_task(name, objective=objective or DPO(0.5), **fields)

    return make


@pytest.fixture(scope="module")
def make_labelled(make_task, tmp_path_factory):
    """Makes a task of labelled answers: nine desirable and seven undesirable ones to train on, two
    of each held out."""
    folder, rng = tmp_path_factory.mktemp("labels"), np.random.default_rng(6)
    paths = {}
    for field, labels in (("data", [True] * 9 + [False] * 7), ("eval_data", [True, False] * 2)):
        records = [
            {
                "prompt": rng.choice(FRUITS),
                "completion": f" {' '.join(rng.choice(COLOURS, rng.integers(1, 5)))}",
                "label": label,
            }
            for label in labels
        ]
        paths[field] = str(folder / f"{field}.jsonl")
        (folder / f"{field}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))

    def make(name="labels", objective=None, **fields):
        fields = paths | {"batch_size": 4} | fields
        return make_task(name, objective=objective or KTO(0.5), **fields)

    return make


def of_pairs(live):
    """The status of the task "pairs" after another round."""
    live.step()
    while not live.statuses():
        live.step()
    return live.status("pairs")


def train_to_the_end(live):
    while (status := of_pairs(live)).state not in ENDED:
        pass
    return status


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def stop_at_microbatch(number, monkeypatch):
    accumulate, left = programs.accumulate, [number]

    def accumulate_and_raise(*arguments):
        left[0] -= 1
        if not left[0]:
            signal.raise_signal(signal.SIGTERM)
        return accumulate(*arguments)

    accumulate_and_raise.lower = programs.accumulate.lower
    monkeypatch.setattr(programs, "accumulate", accumulate_and_raise)


@pytest.mark.parametrize(("microbatch", "name"), [(1, "pairs"), (5, "pairs"), (5, "labels")])
def test_a_stopped_run_goes_on_with_the_same_bits(
    microbatch,
    name,
    train,
    make_task,
    make_paired,
    make_labelled,
    tmp_path,
    monkeypatch,
    adapter_bytes,
):
    make = make_paired if name == "pairs" else make_labelled
    tasks = (make(adapter=DROPPED, steps=5), make_task("sft", steps=3))
    options = {"tokens_per_microbatch": 128, "checkpoint_every": 2}
    train(tmp_path / "whole", *tasks, **options)
    stop_at_microbatch(microbatch, monkeypatch)
    with pytest.raises(Interrupted):
        train(tmp_path / "stopped", *tasks, **options)
    monkeypatch.undo()
    summary = train(tmp_path / "stopped", *tasks, **options)
    for task in (name, "sft"):
        whole, stopped = (tmp_path / each / "adapters" / task for each in ("whole", "stopped"))
        assert adapter_bytes(stopped) == adapter_bytes(whole)
    assert summary.tasks[name]["status"] == "succeeded"
    for file in ("metrics.jsonl", "held_out.jsonl"):
        whole, stopped = (
            [{**line, "time": 0} for line in lines(tmp_path / each / file)]
            for each in ("whole", "stopped")
        )
        assert stopped == whole


def test_metrics_are_written_for_objectives_of_pairs_only(
    train, make_task, make_paired, tmp_path, capsys
):
    paired = make_paired(steps=2, eval_every=1, keep_best=True, best_metric="rewards/margins")
    summary = train(tmp_path, paired, make_task("sft", steps=2))
    of_task = {"pairs": [], "sft": []}
    for line in lines(tmp_path / "metrics.jsonl"):
        of_task[line["task"]].append(line)
    assert not any("metrics" in line for line in of_task["sft"])
    assert of_task["pairs"][0]["loss"] == pytest.approx(np.log(2), rel=1e-5)
    first, *measured = lines(tmp_path / "held_out.jsonl")
    assert first["metrics"]["rewards/margins"] == 0
    assert measured[-1]["metrics"]["rewards/accuracies"] in [n / 5 for n in range(6)]
    record = json.loads((tmp_path / "run.json").read_text())
    assert record["tasks"]["pairs"]["objective"]["kind"] == "dpo"
    best = max(measured, key=lambda line: line["metrics"]["rewards/margins"])
    margin = best["metrics"]["rewards/margins"]
    found = summary.tasks["pairs"]
    assert (found["best_metric"], found["best_step"]) == ("rewards/margins", best["task_step"])
    assert (found["eval_loss"], found["eval_metrics"]) == (best["loss"], best["metrics"])
    said = f"of pairs right, rewards/margins {margin:.4f}, the highest so far"
    assert said in " ".join(capsys.readouterr().out.split())
    card = (tmp_path / "adapters" / "pairs" / "README.md").read_text()
    assert "the highest rewards/margins" in card


def test_a_sweep_varies_beta_with_fewer_places_than_configurations(
    train, make_paired, tmp_path, adapter_bytes
):
    task = make_paired(steps=3, best_metric="rewards/margins")
    sweep = Sweep(task, {"objective.beta": [0.1, 0.5, 1.0]}, first_rung=1)
    together = train(tmp_path / "together", sweep, reserved_slots=3)
    in_turns = train(tmp_path / "in_turns", sweep, tasks_at_once=2, reserved_slots=3)
    assert len(together.tasks) == 3
    for name in together.tasks:
        found, expected = (
            adapter_bytes(tmp_path / each / "adapters" / name) for each in ("in_turns", "together")
        )
        assert found == expected
    assert in_turns.tasks == together.tasks
    margins = {
        line["task"]: line["metrics"]["rewards/margins"]
        for line in lines(tmp_path / "together" / "held_out.jsonl")
        if line["task_step"] == 1
    }
    best, *others = sorted(margins, key=margins.get, reverse=True)
    reasons = {name: task["stopped_early"] for name, task in together.tasks.items()}
    assert reasons.pop(best) is None
    assert [reasons[name] for name in others] == [
        f"at rung 1 (step 1), {place} of 3 by rewards/margins" for place in ("2nd", "3rd")
    ]
    found = json.loads((tmp_path / "together" / "sweep.json").read_text())["pairs"]
    assert found["best_metric"] == "rewards/margins"
    result = {
        name: task["eval_metrics"]["rewards/margins"] for name, task in together.tasks.items()
    }
    assert list(found["tasks"]) == sorted(result, key=result.get, reverse=True)
    columns = [column.header for column in sweep_table(sweep, together).columns]
    assert columns == ["beta", "steps", "train", "held-out", "rewards/margins", "result"]


def test_a_server_goes_on_with_the_reference_of_the_beginning(
    backbone, make_paired, make_task, tmp_path, adapter_bytes
):
    options = ServerOptions(**SERVER | {"round_tokens": 64})

    def register(live):
        live.register(make_paired(steps=5))
        live.register(make_task("sft", steps=4))

    with tuning_server(backbone, tmp_path / "whole", options) as live:
        register(live)
        expected = train_to_the_end(live)
    left = tmp_path / "left"
    with tuning_server(backbone, left, options) as live:
        register(live)
        while of_pairs(live).step < 2:
            pass
    with tuning_server(backbone, left, options) as live:
        found = train_to_the_end(live)
    assert found.state == expected.state == "succeeded"
    assert adapter_bytes(left / "adapters" / "pairs") == adapter_bytes(
        tmp_path / "whole" / "adapters" / "pairs"
    )
    assert found.meter.effective_tokens == expected.meter.effective_tokens


def test_a_task_without_pairs_is_refused_by_name(train, make_paired, data, tmp_path):
    with pytest.raises(TaskError, match="task 'pairs': .*no pair of answers"):
        train(tmp_path, make_paired(data=data["short"]))


def test_a_task_of_answers_is_told_of_objectives(train, make_task, pairs, tmp_path):
    with pytest.raises(TaskError, match="for an objective such as DPO"):
        train(tmp_path, make_task(data=pairs["train"], objective=SFT()))


def test_equal_answers_are_a_warning(train, make_paired, write_lines, tmp_path, capsys):
    path = write_lines(
        {"prompt": "eat", "chosen": " apple", "rejected": " apple"},
        {"prompt": "eat", "chosen": " apple", "rejected": " red"},
    )
    train(tmp_path, make_paired(objective=SimPO(), data=path, eval_data=None, steps=1))
    printed = " ".join(capsys.readouterr().out.split())
    assert "in 1 pair the chosen and the rejected answer are the same tokens" in printed


def test_labelled_answers_have_losses_of_both_kinds(
    train, make_labelled, make_task, tmp_path, capsys
):
    apo = make_labelled("apo", KTO(0.5, "apo_zero_unpaired"), steps=2)
    train(tmp_path, make_labelled(steps=4), apo, make_task("sft", steps=2))
    printed = " ".join(capsys.readouterr().out.split())
    assert "task labels: 16 answers, 4 steps" in printed and "4 held out" in printed
    assert "warning" not in printed
    (first, last), (first_apo, _) = (
        [line for line in lines(tmp_path / "held_out.jsonl") if line["task"] == name]
        for name in ("labels", "apo")
    )
    assert first["loss"] == first_apo["loss"] == 0.5
    assert first["metrics"]["kl"] == 0 and "kl" not in first_apo["metrics"]
    assert last["metrics"]["rewards/chosen"] != 0 and last["loss"] != 0.5
    results = tmp_path / "results.json"
    assert evaluate([f"--run_dir={tmp_path}", "--task=labels", f"--out={results}"]) == 0
    (result,) = json.loads(results.read_text())["results"]
    # The desirable answers are completed.
    assert (result["samples"], result["compared"]) == (4, 2)
    assert result["adapter"]["loss"] == pytest.approx(last["loss"], rel=1e-4)
    assert result["adapter"]["metrics"] == pytest.approx(last["metrics"], rel=1e-3, abs=1e-5)


@pytest.mark.parametrize(
    ("labels", "warning"),
    [
        ([1, 1, 1], "all 3 answers are desirable, and KTO compares both kinds"),
        ([0, 0], "all 2 answers are undesirable"),
        ([1, 1, 0], "is 2; it should be between 1 and 1.33, as with a desirable_weight of 0.5 to"),
        ([1, 0, 0], "times 1 desirable answers, divided by undesirable_weight times 2 undesirabl"),
    ],
)
def test_answers_out_of_balance_are_a_warning(
    labels, warning, make_labelled, backbone, write_lines
):
    path = write_lines(
        *({"prompt": "eat", "completion": " red", "label": bool(label)} for label in labels)
    )
    task = make_labelled(data=path, eval_data=None)
    config = BackboneConfig.from_folder(backbone)
    data = read_data(task, config, load_tokenizer(backbone))
    (found,) = of_labels(task, data.samples)
    assert warning in found


def test_a_metric_of_labels_that_no_held_out_answer_has_is_refused(
    make_labelled, backbone, write_lines
):
    path = write_lines(*({"prompt": "eat", "completion": f" {c}", "label": True} for c in COLOURS))
    config, tokenizer = BackboneConfig.from_folder(backbone), load_tokenizer(backbone)
    kept = {"eval_data": path, "eval_every": 1}
    for fields in ({"best_metric": "rewards/margins"}, {"stop_when": "logps/rejected < -9"}):
        task = make_labelled(**kept, **fields)
        with pytest.raises(TaskError, match=r"'labels': .* no held-out answer is undesirable"):
            read_data(task, config, tokenizer)
    read_data(make_labelled(**kept, best_metric="rewards/chosen"), config, tokenizer)


def test_a_run_continues_an_adapter_as_its_own_reference(train, make_task, make_paired, tmp_path):
    train(tmp_path / "first", make_task("sft", steps=3, optimizer=AdamW(5e-2)))
    folder = str(tmp_path / "first" / "adapters" / "sft")
    train(tmp_path / "second", make_paired(resume_from=folder, steps=2))
    first, last = lines(tmp_path / "second" / "held_out.jsonl")
    # The loaded adapter is the reference, so margins begin at 0 although it was trained before.
    assert first["metrics"]["rewards/margins"] == 0 and last["metrics"]["rewards/margins"] != 0


@pytest.fixture(scope="module")
def rollouts(tmp_path_factory):
    """The path of rollouts of tokens, four to a prompt. Answers with more fruits are better."""
    rng, rows = np.random.default_rng(5), []
    for prompt in range(6):
        for _ in range(4):
            answer = rng.integers(5, 20, rng.integers(2, 6)).tolist()
            rows.append(
                {
                    "prompt_ids": [3 + prompt, 4],
                    "completion_ids": answer,
                    "logprobs": rng.normal(-3, 0.5, len(answer)).tolist(),
                    "reward": sum(token < 12 for token in answer),
                }
            )
    path = tmp_path_factory.mktemp("rollouts") / "rollouts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_rollouts_train_beside_pairs_and_answers(
    train, make_task, make_paired, rollouts, tmp_path, adapter_bytes
):
    policy = Policy("grpo", kl_coef=0.1, clip_low=0.01, clip_high=100.0)

    def of_rollouts():
        return make_task("rollouts", data=rollouts, objective=policy, batch_size=8, steps=3)

    train(tmp_path / "alone", of_rollouts())
    train(tmp_path / "beside", make_paired(steps=2), of_rollouts(), make_task("sft", steps=2))
    alone, beside = (tmp_path / each / "adapters" / "rollouts" for each in ("alone", "beside"))
    assert adapter_bytes(alone) == adapter_bytes(beside)
    (first, *_) = lines(tmp_path / "alone" / "metrics.jsonl")
    assert {"reward", "kl", "ratio/mean", "clip_ratio/low_mean"} <= first["metrics"].keys()
    assert first["metrics"]["kl"] == pytest.approx(0, abs=1e-9)


def test_flat_groups_and_lone_answers_are_warnings(train, make_task, write_lines, tmp_path, capsys):
    rollout = {"completion_ids": [7, 8], "reward": 1.0}
    path = write_lines(
        *({**rollout, "prompt_ids": [5]} for _ in range(2)),
        {**rollout, "prompt_ids": [6]},
        {**rollout, "prompt_ids": [7]},
        {**rollout, "prompt_ids": [7], "reward": 2.0},
    )
    train(tmp_path, make_task(data=path, objective=Policy("grpo"), steps=1))
    printed = " ".join(capsys.readouterr().out.split())
    assert "1 of 3 groups has one answer" in printed
    assert "in 1 of 3 groups all rewards are equal" in printed
    assert "rollouts have no logprobs" in printed


def test_a_task_with_less_than_an_epoch_gets_no_more_steps(train, make_paired, backbone, tmp_path):
    train(tmp_path / "run", make_paired(steps=2))
    with pytest.raises(TaskError, match="task 'pairs': has more steps than before"):
        train(tmp_path / "run", make_paired(steps=4))
    # An epoch has five steps.
    train(tmp_path / "epoch", make_paired(steps=5))
    assert train(tmp_path / "epoch", make_paired(steps=7)).tasks["pairs"]["steps"] == 7
    with tuning_server(backbone, tmp_path / "server", ServerOptions(**SERVER)) as live:
        live.register(make_paired(steps=3))
        while of_pairs(live).step < 1:
            pass
        refused = live.extend("pairs", 4)
        live.step()
        with pytest.raises(TaskError, match="cannot get more than its 3 steps"):
            refused.result()
        assert train_to_the_end(live).state == "succeeded"
