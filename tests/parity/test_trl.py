"""The tokens of samples and those that count in the loss, against TRL's `SFTTrainer`."""

import json
import random

import pytest
import transformers
from backbones import small_llama
from datasets import Dataset
from trl import SFTConfig, SFTTrainer

MAX_LENGTH = 24
ROWS = 30
WORDS = "Max felt angry Nora red ball baker oven needs a the".split()


def words(rng, most: int) -> str:
    return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))


def prompts(rng):
    return {"prompt": words(rng, 6) + " ?", "completion": " " + words(rng, 20)}


def texts(rng):
    return {"text": words(rng, 40)}


def chats(rng):
    turns = [("user", "assistant") for _ in range(rng.randint(1, 4))]
    said = [{"role": role, "content": words(rng, 6)} for turn in turns for role in turn]
    return {"messages": said}


# By task: what makes a record, the source's settings in jaxmux, and those of TRL.
CASES = {
    "prompts": (prompts, "", {}),
    "prompts_all": (prompts, 'Source.loss_on = "all"', {"completion_only_loss": False}),
    "texts": (texts, "", {}),
    "chats": (chats, "", {"assistant_only_loss": True}),
    "chats_all": (chats, 'Source.loss_on = "all"', {}),
}


@pytest.fixture(scope="module")
def records():
    rng = random.Random(0)
    return {name: [make(rng) for _ in range(ROWS)] for name, (make, *_) in CASES.items()}


@pytest.fixture(scope="module")
def shown(records, jaxmux, tmp_path_factory):
    """By task, what `jaxmux data` shows of all samples."""
    folder = tmp_path_factory.mktemp("data")
    lines = [
        'fine_tune.backbone = "jaxmux:demo/base"',
        f"fine_tune.tasks = [{', '.join(f'@{name}/Task()' for name in CASES)}]",
    ]
    for name, rows in records.items():
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        setting = CASES[name][1]
        lines += [
            f"{name}/Task.name = '{name}'",
            f"{name}/Task.data = @{name}/Source()",
            f"{name}/Task.steps = 1",
            f"{name}/Task.max_length = {MAX_LENGTH}",
            f"{name}/Source.path = '{path}'",
            f"{name}/{setting}" if setting else "",
        ]
    config = folder / "run.gin"
    config.write_text("\n".join(lines))
    arguments = ["data", f"--gin_file={config}", f"--samples={ROWS}", "--json"]
    return json.loads(jaxmux("command_line", folder, {"arguments": arguments}))["tasks"]


@pytest.mark.parametrize("name", CASES)
def test_samples_and_masks_are_those_of_trl(name, records, shown, backbone, tmp_path):
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    trainer = SFTTrainer(
        model=small_llama(len(tokenizer)),
        args=SFTConfig(
            output_dir=str(tmp_path),
            max_length=MAX_LENGTH,
            report_to=[],
            use_cpu=True,
            **CASES[name][2],
        ),
        train_dataset=Dataset.from_list(records[name]),
        processing_class=tokenizer,
    )
    wanted = []
    for sample in trainer.train_dataset:
        batch = trainer.data_collator([sample])
        ids, labels = batch["input_ids"][0].tolist(), batch["labels"][0].tolist()
        # No token precedes the first one, so it is no target.
        wanted.append((ids, [False, *(label != -100 for label in labels[1:])]))
    found = [(sample["tokens"], sample["targets"]) for sample in shown[name]["shown"]]
    assert len(wanted) == len(found) == ROWS
    assert any(len(ids) == MAX_LENGTH for ids, _ in wanted)
    assert found == wanted
