"""Objectives of preferences against TRL's own trainers: losses, adapters, and tokens.

The global batch of every task is its whole data set in one forward pass, because TRL's means over
tokens are means over a micro-batch. Adapters have no dropout: TRL's `disable_dropout`, which is on
by default, also sets the dropout of LoRA to 0.
"""

import json
import random

import pytest
import torch
import transformers
from backbones import load_model, small_llama
from datasets import Dataset
from peft import PeftModel, get_peft_model_state_dict
from safetensors.torch import load_file
from scenarios import WORDS, make_backbone
from torch.nn.functional import cross_entropy
from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer
from trl.experimental.cpo import CPOConfig, CPOTrainer
from trl.experimental.orpo import ORPOConfig, ORPOTrainer

PAIRS, ANSWERS = 4, 6


class ORPOTrainerOfAnswers(ORPOTrainer):
    """TRL's ORPO with the cross entropy of the paper, over the chosen answers. TRL's own one
    includes the tokens of the prompt, so it also trains the prompts."""

    def concatenated_forward(self, model, batch):
        outputs = list(super().concatenated_forward(model, batch))
        labels = batch["chosen_labels"][:, 1:]
        logits = outputs[2][:, : labels.shape[1]]
        outputs[4] = cross_entropy(logits.transpose(1, 2), labels, ignore_index=-100)
        return tuple(outputs)


def dpo(loss, trl=None, **fields):
    """The fields of jaxmux's DPO, and the settings of TRL's."""
    same = {name: fields[name] for name in ("label_smoothing", "ld_alpha") if name in fields}
    losses = loss if isinstance(loss, list) else [loss]
    return (
        {"kind": "dpo", "loss": loss, "beta": 0.3, **fields},
        {"beta": 0.3, "loss_type": losses, **same, **(trl or {})},
    )


SMOOTHED = ("exo_pair", "robust", "aot", "aot_unpaired")
LOSSES = (
    *("sigmoid", "sigmoid_norm", "hinge", "ipo", "exo_pair", "robust", "discopop", "nca_pair"),
    *("bco_pair", "sppo_hard", "apo_zero", "apo_down", "aot", "aot_unpaired", "sft"),
)
# By task: the objective in jaxmux, and the settings of the trainer in TRL.
CASES = {
    **{
        name: dpo(name, **({"label_smoothing": 0.1} if name in SMOOTHED else {})) for name in LOSSES
    },
    "mixture": dpo(
        ["sigmoid", "bco_pair", "sft"],
        {"loss_weights": [0.8, 0.2, 1.0]},
        weights=[0.8, 0.2, 1.0],
    ),
    "ld": dpo("sigmoid", ld_alpha=0.4),
    "wpo": dpo("sigmoid", {"use_weighting": True}, use_weighting=True),
    **{
        name: dpo("sigmoid", {"f_divergence_type": name}, f_divergence=name)
        for name in ("forward_kl", "js_divergence", "alpha_divergence")
    },
    **{
        f"cpo-{loss}": (
            {"kind": "cpo", "loss": loss, "beta": 0.2, "cpo_alpha": 0.5},
            {"loss_type": loss, "beta": 0.2, "cpo_alpha": 0.5},
        )
        for loss in ("sigmoid", "hinge", "ipo")
    },
    "simpo": (
        {"kind": "simpo", "beta": 2.0, "gamma": 1.0},
        {"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
    ),
    "alphapo": (
        {"kind": "simpo", "beta": 2.0, "gamma": 1.0, "alpha": 0.25},
        {
            **{"loss_type": "simpo", "beta": 2.0, "simpo_gamma": 1.0, "cpo_alpha": 0.0},
            "alpha": 0.25,
        },
    ),
    "orpo": ({"kind": "orpo", "beta": 0.5}, {"beta": 0.5}),
    **{
        name: (
            {"kind": "kto", "loss": name, "beta": 0.3, "desirable_weight": 0.7},
            {"loss_type": name, "beta": 0.3, "desirable_weight": 0.7},
        )
        for name in ("kto", "apo_zero_unpaired")
    },
}
LONG = ("sigmoid", "simpo", "orpo", "kto")


def is_labelled(name):
    return CASES[name][0]["kind"] == "kto"


def task(name):
    sgd = name not in LONG
    rate = 1e-3 if sgd else 2e-3
    optimizer = {
        "kind": "sgd" if sgd else "adamw",
        "learning_rate": rate,
        "weight_decay": 0.0,
        "clip_norm": None,
        "schedule": {"kind": "constant"},
    }
    return {
        "name": name,
        "data": "labels.jsonl" if is_labelled(name) else "pairs.jsonl",
        "objective": CASES[name][0],
        "adapter": {"rank": 4, "alpha": 8.0, "target_modules": ["q_proj", "down_proj"]},
        "optimizer": optimizer,
        "batch_size": ANSWERS if is_labelled(name) else PAIRS,
        "max_length": 32,
        "steps": 3 if sgd else 10,
    }


def some_words(rng, least, most):
    return " ".join(rng.choices(WORDS, k=rng.randint(least, most)))


@pytest.fixture(scope="module")
def records():
    rng = random.Random(0)
    return [
        {
            "prompt": some_words(rng, 1, 5),
            "chosen": " " + some_words(rng, 1, 8),
            "rejected": " " + some_words(rng, 1, 8),
        }
        for _ in range(PAIRS)
    ]


@pytest.fixture(scope="module")
def labelled():
    rng = random.Random(2)
    return [labelled_texts(rng) | {"label": i % 3 > 0} for i in range(ANSWERS)]


@pytest.fixture(scope="module")
def trained(records, labelled, jaxmux, tmp_path_factory):
    """The folder of all tasks, which jaxmux trains together, and the losses of each."""
    folder = tmp_path_factory.mktemp("objectives")
    make_backbone("llama", folder / "backbone", None)
    write(folder / "pairs.jsonl", records)
    write(folder / "labels.jsonl", labelled)
    tasks = [task(name) for name in CASES]
    updates = jaxmux("train_objectives", folder, {"backbone": "backbone", "tasks": tasks})
    return folder, {name: [u["loss"] for u in updates if u["task"] == name] for name in CASES}


def write(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def make_trainer(name, model, records, tokenizer, folder, optimizer, steps):
    kind, settings = CASES[name][0]["kind"], CASES[name][1]
    config, trainer = {
        "dpo": (DPOConfig, DPOTrainer),
        "cpo": (CPOConfig, CPOTrainer),
        "simpo": (CPOConfig, CPOTrainer),
        "orpo": (ORPOConfig, ORPOTrainerOfAnswers),
        "kto": (KTOConfig, KTOTrainer),
    }[kind]
    arguments = config(
        output_dir=str(folder),
        max_length=32,
        max_steps=steps,
        per_device_train_batch_size=len(records),
        max_grad_norm=0.0,
        gradient_checkpointing=False,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
        logging_steps=1,
        **settings,
    )
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda _: 1.0)
    return trainer(
        model=model,
        args=arguments,
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
        optimizers=(optimizer, scheduler),
    )


@pytest.mark.parametrize("name", CASES)
def test_losses_and_adapters_are_those_of_trl(name, trained, records, labelled, tmp_path, at_most):
    folder, losses = trained
    steps = task(name)["steps"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "backbone")
    tokenizer.pad_token = tokenizer.eos_token
    base = load_model(folder / "backbone")
    model = PeftModel.from_pretrained(base, folder / "initial" / name, is_trainable=True)
    parameters = [p for p in model.parameters() if p.requires_grad]
    rate = task(name)["optimizer"]["learning_rate"]
    if name in LONG:
        optimizer = torch.optim.AdamW(parameters, rate, weight_decay=0.0)
    else:
        optimizer = torch.optim.SGD(parameters, rate, momentum=0.9)
    data = labelled if is_labelled(name) else records
    trainer = make_trainer(name, model, data, tokenizer, tmp_path, optimizer, steps)
    found, compute_loss = [], trainer.compute_loss

    def recorded(*arguments, **named):
        loss = compute_loss(*arguments, **named)
        found.append(loss.item())
        return loss

    trainer.compute_loss = recorded
    trainer.train()
    if name == "kto":
        divergences = [line["kl"] for line in trainer.state.log_history if "kl" in line]
        assert max(divergences) > 0
    assert len(found) == len(losses[name]) == steps
    # TRL adds up log-probabilities in float32; this loss is a square of two such sums of about -90.
    kind, limit = ("sppo_hard", 2e-5) if name == "sppo_hard" else ("objectives", 1e-5)
    for one, other in zip(losses[name], found, strict=True):
        at_most(f"losses of {kind}, relative", abs(one - other) / abs(other), limit)
    initial, final = (
        load_file(folder / when / name / "adapter_model.safetensors")
        for when in ("initial", "final")
    )
    expected = get_peft_model_state_dict(model)
    assert final.keys() == expected.keys()
    change = norm(expected[key] - initial[key] for key in final)
    assert change > 0
    error = norm(expected[key] - final[key] for key in final) / change
    at_most("adapters of objectives, relative to their change", error, 5e-4)


def norm(tensors):
    return sum(tensor.square().sum().item() for tensor in tensors) ** 0.5


def labelled_texts(rng):
    return {
        "prompt": some_words(rng, 1, 5),
        "completion": " " + some_words(rng, 1, 8),
        "label": rng.random() < 0.5,
    }


def chat(rng):
    return [{"role": "user", "content": some_words(rng, 1, 6)}]


def answer(rng):
    return [{"role": "assistant", "content": some_words(rng, 1, 12)}]


def explicit_texts(rng):
    answers = {name: " " + some_words(rng, 1, 12) for name in ("chosen", "rejected")}
    return {"prompt": some_words(rng, 1, 8), **answers}


def implicit_texts(rng):
    record = explicit_texts(rng)
    # Without a common beginning of the answers, which would belong to the prompt on both sides.
    return {name: record["prompt"] + record[name] for name in ("chosen", "rejected")}


def within_a_token(rng):
    beginning = some_words(rng, 1, 5) + " happ"
    return {"prompt": beginning, "chosen": "y dog", "rejected": "en " + some_words(rng, 1, 4)}


def explicit_chats(rng):
    return {"prompt": chat(rng), "chosen": answer(rng), "rejected": answer(rng)}


def implicit_chats(rng):
    prompt = chat(rng)
    return {name: prompt + answer(rng) for name in ("chosen", "rejected")}


def read(jaxmux, folder, backbone, records, options):
    """The samples that jaxmux reads from records."""
    write(folder / "records.jsonl", records)
    files = {"records.jsonl": options}
    return jaxmux("preferences", folder, {"tokenizer": backbone, "files": files})["records.jsonl"]


def samples_of(batch, prefix=""):
    """The samples of a batch that a collator of TRL has padded."""
    names = "input_ids", "attention_mask", "completion_mask"
    found = []
    for ids, attended, target in zip(*(batch[prefix + name] for name in names), strict=True):
        kept = attended.bool()
        found.append({"ids": ids[kept].tolist(), "target": target[kept].bool().tolist()})
    return found


# By form: what makes a record, and the most tokens of a sample.
FORMS = {
    "explicit": (explicit_texts, 200),
    "implicit": (implicit_texts, 200),
    "cut": (explicit_texts, 14),
    "within-a-token": (within_a_token, 200),
    "chats": (explicit_chats, 200),
    "implicit-chats": (implicit_chats, 200),
}


@pytest.mark.parametrize("form", FORMS)
def test_tokens_and_targets_of_pairs_are_those_of_trl(form, jaxmux, backbone, tmp_path):
    make, most = FORMS[form]
    rng = random.Random(1)
    records = [make(rng) for _ in range(10)]
    options = {"max_length": most, "records": "pairs"}
    found = read(jaxmux, tmp_path, backbone, records, options)
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    trainer = DPOTrainer(
        model=small_llama(len(tokenizer)),
        ref_model=small_llama(len(tokenizer)),
        args=DPOConfig(
            output_dir=str(tmp_path), max_length=most, report_to=[], use_cpu=True, bf16=False
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    wanted = []
    for pair in trainer.train_dataset:
        wanted += samples_of(trainer.data_collator([pair]))
    assert found == wanted and found
    # Some sample is cut.
    assert form != "cut" or any(len(sample["ids"]) == most for sample in found)


def labelled_chats(rng):
    return {"prompt": chat(rng), "completion": answer(rng), "label": rng.random() < 0.5}


# By form: what makes a record, and the most tokens of a sample. TRL divides the answers of pairs:
# all chosen ones come first.
LABELLED_FORMS = {
    "labelled": (labelled_texts, 200),
    "cut": (labelled_texts, 12),
    "chats": (labelled_chats, 200),
    "pairs": (within_a_token, 200),
}


@pytest.mark.parametrize("form", LABELLED_FORMS)
def test_tokens_and_targets_of_labelled_answers_are_those_of_trl(form, jaxmux, backbone, tmp_path):
    make, most = LABELLED_FORMS[form]
    rng = random.Random(3)
    # The last one of three batches is smaller.
    records = [make(rng) for _ in range(8 if form == "pairs" else 11)]
    options = {"max_length": most, "records": "labels", "mismatched_in": 4}
    found = read(jaxmux, tmp_path, backbone, records, options)
    if form == "pairs":
        found = [found[4 * i + n] for first in (0, 2) for i in range(8) for n in (first, first + 1)]
    tokenizer = transformers.AutoTokenizer.from_pretrained(backbone)
    trainer = KTOTrainer(
        model=small_llama(len(tokenizer)),
        ref_model=small_llama(len(tokenizer)),
        args=KTOConfig(
            output_dir=str(tmp_path),
            max_length=most,
            per_device_train_batch_size=4,
            report_to=[],
            use_cpu=True,
            bf16=False,
        ),
        train_dataset=Dataset.from_list(records),
        processing_class=tokenizer,
    )
    wanted = []
    for record in trainer.train_dataset:
        batch = trainer.data_collator([record])
        for prefix in ("", "KL_"):
            (sample,) = samples_of(batch, prefix)
            wanted.append(sample)
    assert found == wanted and found
    assert form != "cut" or any(len(sample["ids"]) == most for sample in found[::2])
