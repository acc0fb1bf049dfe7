"""What is legal but suspicious gets one warning, with the task and the figure."""

import dataclasses
import math
import re

import pytest

from jaxmux import AdamW, LoRA, RunOptions, Schedule, TaskError, load_tokenizer, prepare_task
from jaxmux.data import Source
from jaxmux.models import BackboneConfig
from jaxmux.runs.task_warnings import after_training, before_training, of_options

GOOD = {"prompt": "red", "completion": " apple pear plum"}
TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
SPECIAL = {"prompt": "red", "completion": " apple</s> plum"}


@pytest.fixture(scope="module")
def prepare(backbone, make_task):
    config, tokenizer = BackboneConfig.from_folder(backbone), load_tokenizer(backbone)

    def make(**fields):
        return prepare_task(make_task(**fields), config, tokenizer), config

    return make


SETTINGS = {
    "learning rate 0": ({"optimizer": AdamW(0)}, "learning_rate is 0"),
    "alpha 0": ({"adapter": LoRA(2, alpha=0)}, "alpha is 0"),
    "weight decay": ({"optimizer": AdamW(weight_decay=1e9)}, r"weight_decay is 1e\+09"),
    "batch": ({"batch_size": 15}, "batch_size is 15, above the 14 samples of the data"),
    "warm-up": (
        {"optimizer": AdamW(schedule=Schedule(warmup_steps=3)), "steps": 3},
        "warmup_steps is 3, but the task trains 3 steps",
    ),
    "rank": ({"adapter": LoRA(24)}, "rank is 24, but the narrowest linear has width 16"),
}


@pytest.mark.parametrize(("fields", "warning"), SETTINGS.values(), ids=SETTINGS)
def test_a_suspicious_setting_gets_one_warning(fields, warning, prepare):
    (found,) = before_training(*prepare(**fields))
    assert re.search(warning, found)


@pytest.mark.parametrize(("row_len", "is_told"), [(None, False), (4096, False), (8192, True)])
def test_rows_beyond_the_context_get_a_warning(row_len, is_told, prepare):
    _, config = prepare()
    config = dataclasses.replace(config, max_position_embeddings=4096)
    told = of_options(RunOptions(row_len=row_len), config)
    assert len(told) == is_told
    assert not is_told or "row_len is 8192, beyond the backbone's context of 4096" in told[0]


def test_usual_settings_and_data_get_no_warning(prepare):
    assert before_training(*prepare()) == []


DATA = {
    "truncation": ([GOOD] * 3, {"max_length": 6}, "max_length=6 cuts off .*% of the completion"),
    "drops": (
        [GOOD] * 3 + [{"prompt": "red", "completion": " fig"}],
        {"max_length": 8, "overlong": "drop"},
        "max_length=8 drops 3 of 4 records",
    ),
    "fields": (
        [GOOD | {"context": "Fruit."}] * 2 + [GOOD | {"notes": "written by hand", "id": 7}],
        {},
        r"fields that are not read: 'context' \(2 records\), 'notes' \(1 record\); if they matter",
    ),
    "special tokens": ([GOOD, SPECIAL], {}, "the text of 1 record spells .* '</s>'"),
    "skipped": (
        [GOOD, {"prompt": "red"}],
        {"on_bad_record": "skip"},
        "1 of 2 records are skipped, the first because of .*:2: no field 'completion'",
    ),
}


@pytest.mark.parametrize(("records", "options", "warning"), DATA.values(), ids=DATA)
def test_suspicious_data_gets_one_warning(records, options, warning, prepare, write_lines):
    options = dict(options)
    length = options.pop("max_length", 64)
    source = Source(write_lines(*records), **options)
    (found,) = before_training(*prepare(data=source, max_length=length, batch_size=1))
    assert re.search(warning, found)


def test_chat_templates_that_hardly_mean_what_they_say_get_warnings(prepare, data):
    short, chat = Source(data["short"]), Source(data["chat"], chat_template=TEMPLATE)
    other = Source(data["chat"], chat_template="{{ bos_token }}" + TEMPLATE)
    assert before_training(*prepare(data=(short, chat), eval_data=chat)) == []
    (found,) = before_training(*prepare(data=(chat, other)))
    assert "2 different chat templates render its chats" in found
    endless = Source(data["chat"], chat_template=TEMPLATE.replace("{{ eos_token }}", ";"))
    (found,) = before_training(*prepare(data=endless))
    assert "in 6 chats no special token ends what the assistant says" in found
    (found,) = before_training(*prepare(data=chat, eval_data=other))
    assert "eval_data has another chat_template than data" in found


def test_a_rank_above_every_width_is_refused(prepare):
    with pytest.raises(TaskError, match="task 'tiny': rank is 33, but no linear .* than 32"):
        prepare(adapter=LoRA(33))


@pytest.mark.parametrize(
    ("first", "last", "updates", "warned"),
    [
        (-3, 0, 2, True),
        (-3, -1, 2, False),
        (3, 0, 2, False),
        # A task of one update has one loss, and one that never learns has nearly the same losses.
        (0, 0, 1, False),
        (0, 0.001, 2, False),
    ],
)
def test_a_loss_that_rose_to_that_of_uniform_predictions_gets_a_warning(
    first, last, updates, warned, prepare
):
    config = prepare()[1]
    uniform = math.log(config.vocab_size)
    losses = {"train_loss_first": uniform + first, "train_loss_last": uniform + last}
    results = losses | {"status": "succeeded", "steps": updates + 3, "skipped": 3}
    skipped, *rose = after_training(results, config)
    assert f"3 of its {updates + 3} updates were skipped" in skipped
    assert bool(rose) is warned
    # Other losses are not those of predictions.
    assert len(after_training({**results, "objective": "dpo"}, config)) == 1


def test_unknown_tokens_get_a_warning(prepare):
    prepared, config = prepare()
    counts = {"target_tokens": 1000, "unknown_target_tokens": 77}
    prepared = dataclasses.replace(prepared, samples=prepared.samples._replace(**counts))
    (found,) = before_training(prepared, config)
    assert "7.7% of the completion tokens are unknown" in found


def test_a_generation_prompt_that_is_joined_with_the_answer_gets_a_warning(prepare):
    prepared, config = prepare()
    samples = prepared.samples._replace(joined_prompt="Bot: ")
    (found,) = before_training(dataclasses.replace(prepared, samples=samples), config)
    assert "joins the end of the generation prompt 'Bot: ' with the answer" in found
