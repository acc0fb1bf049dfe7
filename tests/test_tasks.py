"""A task that cannot be run says so at once, with its name and the field at fault."""

import pytest

import jaxmux
from jaxmux.data import Source
from jaxmux.optimizers import AdamW
from jaxmux.peft import LoRA
from jaxmux.tasks import Task, TaskError


def test_a_path_stands_for_its_source():
    task = Task("translate", "train.jsonl", eval_data="eval.jsonl", steps=1)
    assert (task.data, task.eval_data) == (Source("train.jsonl"), Source("eval.jsonl"))
    source = Source("train.jsonl", loss_on="all")
    assert Task("translate", source, epochs=1).data is source


def test_paths_of_a_list_stand_for_their_sources():
    task = Task("translate", ["a.jsonl", Source("b.jsonl", repeat=2)], steps=1)
    assert task.data == task.sources == (Source("a.jsonl"), Source("b.jsonl", repeat=2))
    assert Task("translate", "a.jsonl", steps=1).sources == (Source("a.jsonl"),)


def test_equal_tasks_are_equal_and_hashable():
    one, other = (Task("t", "d.jsonl", steps=1, adapter=LoRA(4)) for _ in range(2))
    assert one == other and hash(one) == hash(other)


@pytest.mark.parametrize("name", ["a", "Task-1", "en.de_v2", "7"])
def test_names_of_letters_digits_and_marks_are_taken(name):
    assert Task(name, "d.jsonl", steps=1).name == name


@pytest.mark.parametrize("name", ["", "a b", "../up", ".hidden", "a/b", "ü", "a\n", None, 3])
def test_other_names_are_refused(name):
    with pytest.raises(TaskError, match="name should be a name of at most 100 letters"):
        Task(name, "d.jsonl", steps=1)


@pytest.mark.parametrize(
    ("fields", "problem"),
    [
        (
            {"adapter": {"rank": 4}},
            r"should be a specification \(Bottleneck, .*\), found {'rank': 4}",
        ),
        ({"adapter": LoRA}, "adapter should be a specification .*with parentheses"),
        ({"adapter": "oft"}, "found 'oft'; OFT is left out: its rotations give"),
        ({"validation_seed": 1}, "validation_seed needs validation_fraction"),
        ({"best_metric": "kl"}, "best_metric needs eval_data or validation_fraction"),
        (
            {"best_metric": "kl", "eval_data": "b.jsonl", "objective": jaxmux.Policy()},
            "best_metric should be one of loss, by which adapters of this Policy can be compared, "
            "found 'kl'",
        ),
        ({"stop_when": "loss < 1", "eval_data": "b.jsonl"}, "stop_when needs eval_every"),
        (
            {"stop_when": "loss<1", "eval_data": "b.jsonl", "eval_every": 2},
            "stop_when should be a bound of a metric, such as 'kl > 0.1' or None, found 'loss<1'",
        ),
        (
            {"stop_when": "kl > 0.1", "eval_data": "b.jsonl", "eval_every": 2},
            "the metric of stop_when should be one of loss, by which adapters of this SFT",
        ),
        (
            {
                "best_metric": "rewards/accuracy",
                "eval_data": "b.jsonl",
                "objective": jaxmux.SimPO(),
            },
            "one of loss, rewards/chosen, .*; did you mean rewards/accuracies",
        ),
        (
            {"optimizer": "adamw"},
            r"optimizer should be a specification \(AdamW, Lion, SGD\), found 'adamw'",
        ),
        ({"optimizer": AdamW}, "optimizer should be a specification .*with parentheses"),
        ({"steps": None}, "epochs or steps, one of the two; found neither"),
        ({"epochs": 2}, "one of the two; found both"),
        ({"steps": 0}, "steps should be an integer of at least 1 or None, found 0"),
        (
            {"steps": None, "epochs": 0},
            "epochs should be an integer of at least 1 or None, found 0",
        ),
        ({"steps": None, "epochs": 1.5}, "epochs should be an integer of .* or None, found 1.5"),
        ({"batch_size": 0}, "batch_size should be an integer of at least 1, found 0"),
        ({"batch_size": "8"}, "batch_size should be an integer of at least 1, found '8'"),
        ({"max_length": 1}, "max_length should be an integer of at least 2, found 1"),
        ({"seed": -1}, "seed should be an integer of at least 0, found -1"),
        ({"batch_size": None}, "batch_size should be an integer of at least 1, found None"),
        ({"data": None}, "data should be a path or a Source, or a list of them, found None"),
        ({"data": []}, "data should be a path or a Source, or a list of them, found "),
        ({"data": ["a.jsonl", 3]}, "data should be a path or a Source, or a list of them"),
        ({"eval_data": ["a.jsonl"]}, "eval_data should be a path or a Source, found"),
        ({"eval_data": Source("a.jsonl", repeat=2)}, "eval_data: repeat is for training data"),
        ({"eval_data": Source("a.jsonl", weight=2)}, "eval_data: weight is for training data"),
        ({"data": Source("a.jsonl", weight=2)}, "a weight is a share beside other sources"),
        (
            {"data": [Source("a.jsonl", weight=2), "b.jsonl"]},
            "data: a.jsonl has a weight and b.jsonl has none",
        ),
        ({"eval_data": "a.jsonl", "validation_fraction": 0.1}, "eval_data or validation_fraction"),
        ({"validation_fraction": 1}, r"should be a number in \(0, 1\) or None, found 1"),
    ],
    ids=str,
)
def test_a_bad_field_is_refused_with_the_name_of_the_task(fields, problem):
    with pytest.raises(TaskError, match=f"^task 'bad': .*{problem}"):
        Task(**{"name": "bad", "data": "d.jsonl", "steps": 5} | fields)


def test_a_name_that_jaxmux_leaves_out_is_explained():
    with pytest.raises(AttributeError, match="no attribute 'OFT'; OFT is left out: its rotations"):
        jaxmux.OFT  # noqa: B018
    with pytest.raises(AttributeError, match="no attribute 'LoRa'$"):
        jaxmux.LoRa  # noqa: B018
