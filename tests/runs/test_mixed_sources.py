"""The sources of a task are mixed: an epoch has each sample as often as its source says."""

import json
from collections import Counter
from pathlib import Path

import pytest

from jaxmux import Task, TaskError
from jaxmux.cli import gin_bindings
from jaxmux.data import Rendering, Source, load_tokenizer
from jaxmux.engine.tasks.prepared_task import read_data
from jaxmux.field_checks import to_object
from jaxmux.models import BackboneConfig
from jaxmux.specifications import task_from_json, task_to_json
from jaxmux.specifications.reading import from_json


@pytest.fixture
def reads(backbone, make_task):
    """Reads the data of a task with these fields."""

    def read(**fields):
        config = BackboneConfig.from_folder(backbone)
        return read_data(make_task(**fields), config, load_tokenizer(backbone))

    return read


def test_a_mixture_trains_like_a_file_with_its_records(
    make_task, train, data, tmp_path, adapter_bytes
):
    short, long = (Path(data[name]).read_text() for name in ("short", "long"))
    (tmp_path / "all.jsonl").write_text(short + short + long)
    mixture = [Source(data["short"], repeat=2), data["long"]]
    tasks = [
        make_task("file", data=str(tmp_path / "all.jsonl"), epochs=1, batch_size=12),
        make_task("mixture", data=mixture, epochs=1, batch_size=12),
    ]
    assert train(tmp_path / "run", *tasks).succeeded
    folders = [tmp_path / "run" / "adapters" / task.name for task in tasks]
    weights = [adapter_bytes(folder)["adapter_model.safetensors"] for folder in folders]
    assert weights[0] == weights[1]
    # The run directory knows the mixture again.
    assert train(tmp_path / "run", *tasks).succeeded


def test_an_epoch_has_each_sample_as_often_as_its_source_says(reads, data):
    sources = [
        Source(data["short"], repeat=1.5),
        Source(data["long"], repeat=0.25),
        data["short.eval"],
    ]
    found = reads(data=sources, epochs=2, batch_size=7)
    assert found.samples.read == 14 + 20 + 5
    assert found.samples.rendering == Rendering(texts=True)
    epochs = [
        Counter(s.sample_id for k in range(5) for s in found.batches[5 * epoch + k])
        for epoch in range(2)
    ]
    assert found.steps == 10 and epochs[0] == epochs[1]
    # No two sources share a number, and so a dropout mask.
    assert sorted(epochs[0].values()) == [1] * (7 + 5 + 5) + [2] * 7
    again = reads(data=sources, epochs=2, batch_size=7)
    ids = [[s.sample_id for s in own.batches[7]] for own in (found, again)]
    assert ids[0] == ids[1]


def test_an_epoch_has_the_shares_that_weights_say(reads, data):
    """The 20 samples of one source stand there once, and 14 others until they are 80%."""
    sources = [Source(data["short"], weight=80), Source(data["long"], weight=20)]
    found = reads(data=sources, epochs=1, batch_size=100)
    kept = Counter(sample.sample_id for sample in found.batches[0])
    shares = [[kept[n + shift] for n in range(20)] for shift in (0, 0x9E3779B1)]
    assert sum(shares[0]) == 80 and shares[1] == [1] * 20
    assert {*shares[0][:14]} == {5, 6}


def test_a_fraction_of_every_source_is_held_out_once(reads, data):
    sources = [Source(data["short"], repeat=3), Source(data["long"])]
    found = reads(data=sources, validation_fraction=0.3)
    held_out = [sample.sample_id for sample in found.eval_samples]
    kept = Counter(sample.sample_id for sample in found.samples.samples)
    assert len(set(held_out)) == len(held_out) and not kept.keys() & {*held_out}
    assert len(kept) + len(held_out) == 14 + 20
    assert {*kept.values()} == {1, 3}
    # The records of both sources are chosen independently.
    short, long = ({n for n in range(14) if n + shift in held_out} for shift in (0, 0x9E3779B1))
    assert short != long


def test_a_mixture_is_written_and_read_again(tmp_path):
    sources = [Source(str(tmp_path / "a.jsonl"), repeat=0.5), str(tmp_path / "b.csv")]
    task = Task("a", sources, steps=1)
    fields = json.loads(json.dumps(to_object(task)))
    assert from_json(fields) == task and hash(task)
    assert [own["path"] for own in task_to_json(task, tmp_path)["data"]] == ["a.jsonl", "b.csv"]


def test_a_config_may_list_sources(tmp_path):
    config = tmp_path / "a.gin"
    config.write_text("""
        fine_tune.backbone = "jaxmux:demo/base"
        fine_tune.tasks = [@Task()]
        Task.name = "a"
        Task.steps = 1
        Task.data = [@one/Source(), "b.jsonl"]
        one/Source.path = "a.jsonl"
        one/Source.repeat = 2
        """)
    gin_bindings.parse([str(config)], [])
    (task,) = gin_bindings.run_config().tasks
    assert task.data == (Source("a.jsonl", repeat=2), Source("b.jsonl"))


@pytest.mark.parametrize(
    ("data", "problem"),
    [
        (["a.jsonl", "a.jsonl"], "data should be a string or an object"),
        ({"path": "a.jsonl", "repeat": 1000}, "data.repeat should be null, .*, found 1000"),
        ({"path": "a.jsonl", "weight": 1}, "a weight is a share beside other sources"),
        ({"path": "a.jsonl", "chat_template": "x"}, "data.chat_template should be null, "),
    ],
)
def test_tenants_cannot_repeat_or_render_data_beyond_their_limits(data, problem, tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n')
    with pytest.raises(TaskError, match=problem):
        task_from_json(json.dumps({"name": "a", "data": data, "steps": 1}), tmp_path)
