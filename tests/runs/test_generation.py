"""Completions of prompts with and without adapters."""

import copy
from functools import partial

import numpy as np
import pytest

from jaxmux import LoRA, export_adapter, load_backbone
from jaxmux.cli.main import run_command
from jaxmux.completion import Request, complete
from jaxmux.data import load_tokenizer
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
    specs = LoRA(rank=4, alpha=8.0), LoRA(rank=2, alpha=2.0, target_modules=("v_proj", "up_proj"))
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


def test_greedy_completion_is_the_argmax_step_by_step(model, tokenizer, adapters, step_by_step):
    requests = [Request(PROMPTS[0])]
    requests += [Request(prompt, *a) for prompt, a in zip(PROMPTS[1:], adapters, strict=True)]
    found = complete(model, tokenizer, requests, max_new_tokens=NEW)
    ids = [step_by_step(*request) for request in requests]
    assert found == [tokenizer.decode(i, skip_special_tokens=True) for i in ids]
    assert len({tuple(i) for i in ids}) == 3


def test_prompts_with_different_adapters_do_not_mix(model, tokenizer, adapters):
    requests = [Request(p, *a) for p in PROMPTS for a in [(None, None), *adapters]]
    together = complete(model, tokenizer, requests, max_new_tokens=NEW)
    alone = [complete(model, tokenizer, [r], max_new_tokens=NEW)[0] for r in requests]
    assert together == alone
    assert len(set(together)) > len(PROMPTS)


def test_sampling_follows_the_seed(model, tokenizer):
    def sample(seed, temperature=1.5):
        requests = [Request(p) for p in PROMPTS]
        options = {"max_new_tokens": NEW, "temperature": temperature, "seed": seed}
        return complete(model, tokenizer, requests, **options)

    assert sample(1) == sample(1)
    assert sample(1) != sample(2)
    assert sample(1, temperature=1e-4) == sample(2, temperature=0.0)


def test_completion_ends_before_the_eos_token(model, tokenizer, step_by_step):
    ids = step_by_step(PROMPTS[0])
    stop = next(i for i in ids[1:] if i != ids[0])
    stopping = copy.deepcopy(tokenizer)
    stopping.eos_token = tokenizer.convert_ids_to_tokens(stop)
    (found,) = complete(model, stopping, [Request(PROMPTS[0])], max_new_tokens=NEW)
    assert found == tokenizer.decode(ids[: ids.index(stop)], skip_special_tokens=True)


def test_completion_has_at_most_the_tokens_asked_for(model, tokenizer, step_by_step):
    long = " ".join(PROMPTS * 3)
    # The prompt leaves room in its row only for the new tokens.
    for count in (1, 5):
        (found,) = complete(model, tokenizer, [Request(long)], max_new_tokens=count)
        expected = step_by_step(long, count=count)
        assert found == tokenizer.decode(expected, skip_special_tokens=True)


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
