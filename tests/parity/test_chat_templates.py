"""Chat templates in adapter folders, against transformers, PEFT and TRL."""

import json
import re

import pytest
import torch
import transformers
from datasets import Dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

NEW = 12
# The tokenizer of the demo has another template.
TEMPLATES = {
    "ask": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'assistant' %}Answer:"
        "{% generation %} {{ m.content }}{{ eos_token }}{% endgeneration %}{% else %}"
        "Question: {{ m.content }}\n{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}Answer:{% endif %}\n"
    ),
    "tell": (
        "{{ bos_token }}{% for m in messages %}{{ m.role }} said: {{ m.content }}{{ eos_token }}"
        "{% endfor %}{% if add_generation_prompt %}assistant said:{% endif %}"
    ),
}
TURNS = [
    ("What does a baker need?", "A baker needs an oven."),
    ("What is a drum made of?", "A drum is made of wood."),
    ("Why is Nora angry?", "Max lost her red ball."),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory, jaxmux):
    """A folder with chats, and a run of a task with each template."""
    folder = tmp_path_factory.mktemp("templates")
    rows = [
        {"conversations": [{"from": "human", "value": q}, {"from": "gpt", "value": a}]}
        for q, a in TURNS
    ]
    (folder / "chats.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    lines = [
        'fine_tune.backbone = "jaxmux:demo/base"',
        f"fine_tune.tasks = [{', '.join(f'@{name}/Task()' for name in TEMPLATES)}]",
        "fine_tune.tokens_per_microbatch = 256",
        'fine_tune.dtype = "float32"',
    ]
    for name, template in TEMPLATES.items():
        (folder / f"{name}.jinja").write_text(template)
        lines += [
            f"{name}/Task.name = '{name}'",
            f"{name}/Task.data = @{name}/Source()",
            f"{name}/Source.path = '{folder}/chats.jsonl'",
            f"{name}/Source.chat_template = '{folder}/{name}.jinja'",
            f"{name}/Task.steps = 6",
            f"{name}/Task.batch_size = 3",
            f"{name}/Task.adapter = @{name}/LoRA()",
            f"{name}/LoRA.rank = 4",
            f"{name}/LoRA.target_modules = ('q_proj', 'down_proj')",
            f"{name}/Task.optimizer = @{name}/AdamW()",
            f"{name}/AdamW.learning_rate = 5e-3",
        ]
    (folder / "run.gin").write_text("\n".join(lines))
    arguments = ["train", f"--gin_file={folder / 'run.gin'}", f"--run_dir={folder / 'run'}"]
    jaxmux("command_line", folder, {"arguments": arguments})
    return folder


def answers(jaxmux, folder, *arguments: str) -> dict[str, list[str]]:
    """By adapter, what jaxmux answers to all chats."""
    out = folder / "answers.jsonl"
    options = ["--backbone=jaxmux:demo/base", "--dtype=float32", f"--max_new_tokens={NEW}"]
    options += [f"--prompts={folder / 'chats.jsonl'}", f"--out={out}"]
    jaxmux("command_line", folder, {"arguments": ["generate", *options, *arguments]})
    found: dict[str, list[str]] = {}
    for record in map(json.loads, out.read_text().splitlines()):
        found.setdefault(record["adapter"], []).append(record["completion"])
    return found


def transformers_answers(model, tokenizer) -> list[str]:
    """What transformers answers to the same chats."""
    found = []
    for question, _ in TURNS:
        given = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}],
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
        )
        ids = model.generate(
            **given,
            max_new_tokens=NEW,
            do_sample=False,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        new = ids[0, given["input_ids"].shape[1] :]
        found.append(tokenizer.decode(new, skip_special_tokens=True))
    return found


def test_the_code_on_the_cards_answers_as_jaxmux_does(folder, jaxmux, monkeypatch):
    adapters = [folder / "run" / "adapters" / name for name in TEMPLATES]
    found = answers(jaxmux, folder, *(f"--adapter={path}" for path in adapters))
    for path in adapters:
        code = re.search(r"```python\n(.*?)```", (path / "README.md").read_text(), re.S)[1]
        names: dict = {}
        monkeypatch.chdir(path)
        exec(code, names)
        model = names["model"].to(torch.float32).eval()
        assert names["tokenizer"].chat_template == TEMPLATES[path.name]
        assert found[path.name] == transformers_answers(model, names["tokenizer"])
    assert len(set(map(tuple, found.values()))) == len(TEMPLATES)


def test_a_tokenizer_that_trl_saves_with_an_adapter_is_used(folder, backbone, jaxmux):
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    tokenizer.chat_template = TEMPLATES["ask"]
    chats = [
        {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": a}]}
        for q, a in TURNS
    ]
    trainer = SFTTrainer(
        model=transformers.AutoModelForCausalLM.from_pretrained(backbone, dtype=torch.float32),
        args=SFTConfig(
            output_dir=str(folder / "trl"),
            max_steps=8,
            learning_rate=5e-3,
            assistant_only_loss=True,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(chats),
        processing_class=tokenizer,
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "down_proj"]),
    )
    trainer.train()
    trainer.save_model()
    (found,) = answers(jaxmux, folder, f"--adapter={folder / 'trl'}").values()
    assert found == transformers_answers(trainer.model.eval(), tokenizer)
