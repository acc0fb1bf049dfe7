"""What a run says of preference tasks: counts of pairs, and losses that are their objectives'."""

import io
import json
import math
from functools import partial

import numpy as np
import pytest
from rich.console import Console

from jaxmux import DPO, SimPO
from jaxmux.cli.main import run_command
from jaxmux.runs.console import RunConsole
from jaxmux.runs.metrics import json_line, read_metrics
from jaxmux.runs.summary import plot_losses
from jaxmux.runs.trackers.run_trackers import points_of

from .conftest import COLOURS, FRUITS

evaluate = partial(run_command, "eval", prog="jaxmux eval")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory) -> dict[str, str]:
    """Paths of seven pairs to train on and of three that are held out."""
    folder, rng = tmp_path_factory.mktemp("pairs"), np.random.default_rng(8)
    paths = {}
    for name, count in (("data", 7), ("eval_data", 3)):
        records = [
            {
                "prompt": rng.choice(FRUITS),
                "chosen": f" {rng.choice(COLOURS)}",
                "rejected": f" {rng.choice(FRUITS)} {rng.choice(FRUITS)}",
            }
            for _ in range(count)
        ]
        paths[name] = str(folder / f"{name}.jsonl")
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return paths


@pytest.fixture(scope="module")
def run(make_task, train, pairs, tmp_path_factory):
    """A run of a DPO task and an SFT task, one of another DPO task that continues the first one
    beside SimPO, and what the first run has printed."""
    folder, printed = tmp_path_factory.mktemp("runs"), io.StringIO()
    console = RunConsole(Console(file=printed, width=80))
    dpo = make_task("dpo", objective=DPO(0.5), batch_size=8, **pairs)
    assert train(folder / "first", dpo, make_task("sft"), console=console).succeeded
    begin = str(folder / "first" / "adapters" / "dpo")
    later = make_task("later", objective=DPO(0.5), resume_from=begin, **pairs)
    simpo = make_task("simpo", objective=SimPO(), **pairs)
    assert train(folder / "second", later, simpo).succeeded
    return folder, printed.getvalue()


def test_first_lines_and_warnings_count_pairs(run):
    _, printed = run
    assert "task dpo: 7 pairs, 3 steps" in printed and "3 held out" in printed
    assert "batch_size is 8, above the 7 pairs of the data" in printed
    assert "task sft: 14 samples" in printed


def test_records_and_cards_count_pairs_and_name_the_objective(run):
    folder, _ = run
    record = json.loads((folder / "first" / "run.json").read_text())
    assert record["samples"]["dpo"] == {"training": 7, "held_out": 3}
    summary = json.loads((folder / "first" / "summary.json").read_text())
    assert {name: task["objective"] for name, task in summary["tasks"].items()} == {
        "dpo": "dpo",
        "sft": "sft",
    }
    cards = [
        (folder / "first/adapters" / name / "README.md").read_text() for name in ("dpo", "sft")
    ]
    assert "| Training pairs | 7 |" in cards[0] and "| Held-out pairs | 3 |" in cards[0]
    assert "nats per target token" not in cards[0] and '"beta": 0.5' in cards[0]
    assert "| Training samples | 14 |" in cards[1] and "nats per target token" in cards[1]


def test_metrics_that_are_not_finite_are_null():
    line = json_line({"loss": math.nan, "metrics": {"rewards/chosen": -math.inf, "nll_loss": 1.0}})
    expected = {"loss": None, "metrics": {"rewards/chosen": None, "nll_loss": 1.0}}
    assert json.loads(line, parse_constant=pytest.fail) == expected


def test_trackers_get_the_metrics_of_objectives():
    line = {"step": 3, "task": "dpo", "time": 0.0, "loss": 0.5, "lr": None}
    line["metrics"] = {"rewards/margins": 2.0, "nll_loss": math.inf}
    (point,) = points_of([line], held_out=False)
    assert point.values == {"loss/dpo": 0.5, "rewards/margins/dpo": 2.0}
    (point,) = points_of([line], held_out=True)
    assert point.values == {"held_out_loss/dpo": 0.5, "held_out_rewards/margins/dpo": 2.0}


def test_losses_below_zero_are_drawn(run, tmp_path, drawn):
    lines = read_metrics(run[0] / "first" / "metrics.jsonl")
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({**line, "loss": -line["loss"]}) + "\n" for line in lines))
    plot_losses(path, tmp_path / "loss.png")
    assert (tmp_path / "loss.png").stat().st_size


@pytest.mark.parametrize("name", ["first", "second"])
def test_evaluation_gives_the_losses_and_metrics_of_training(name, run, tmp_path, capsys):
    folder, out = run[0] / name, tmp_path / "results.json"
    tasks = ["dpo"] if name == "first" else ["later", "simpo"]
    chosen = [f"--task={task}" for task in tasks]
    assert evaluate([f"--run_dir={folder}", *chosen, f"--out={out}"]) == 0
    printed = capsys.readouterr().out
    assert "right" in printed and max(map(len, printed.splitlines())) <= 80
    lines = [json.loads(line) for line in (folder / "held_out.jsonl").read_text().splitlines()]
    for result in json.loads(out.read_text())["results"]:
        first, last = (line for line in lines if line["task"] == result["task"])
        assert result["samples"] == result["compared"] == 3
        assert result["adapter"]["loss"] == pytest.approx(last["loss"], rel=1e-4)
        assert result["adapter"]["metrics"] == pytest.approx(last["metrics"], rel=1e-3, abs=1e-5)
        assert result["adapter"]["perplexity"] is None
        if result["task"] == "later":
            assert first["loss"] == pytest.approx(math.log(2), rel=1e-5)
        else:
            assert result["backbone"]["loss"] == pytest.approx(first["loss"], rel=1e-4)


def test_a_limit_of_an_evaluation_counts_pairs(run, tmp_path):
    out = tmp_path / "results.json"
    limit = ["--task=dpo", "--limit=2", "--max_new_tokens=0"]
    assert evaluate([f"--run_dir={run[0] / 'first'}", *limit, f"--out={out}"]) == 0
    assert json.loads(out.read_text())["results"][0]["samples"] == 2
