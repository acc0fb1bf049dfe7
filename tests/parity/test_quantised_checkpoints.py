"""Quantised checkpoints have the weights that their own libraries decode, bit for bit, and the
logits of transformers' model of these weights."""

import json
from functools import cache

import numpy as np
import pytest
import torch
from backbones import VOCABULARY, logits, random_prompts
from transformers import AutoModelForCausalLM

pytest.importorskip("bitsandbytes")
pytest.importorskip("compressed_tensors")
from quantised_checkpoints import (  # noqa: E402
    CASES,
    decoded_linears,
    decoded_model,
    make_model,
)

PROMPTS = random_prompts(VOCABULARY)
# By format, the dtype of the other weights in checkpoints that jaxmux writes.
WRITTEN = {"nf4": "float32", "int8": "float16", "float8": "float32"}
# The same for models whose widths are no multiples of 64, and for one that bitsandbytes has made.
WIDTHS = {"nf4-352": "widths", "nf4-again": "nf4, blocks across rows, scales in float32"}


# Cases of the same format that differ less.
SLOW = {
    "nf4",
    "nf4, blocks across rows",
    "float8 by channel",
    "float8 by tensor",
    "int8 by channel",
    "int4 by group",
    "packed int8 by channel",
    "fp8",
}
# By format in which linears stay, a case whose logits CI computes.
COMPUTED = {
    "nf4, blocks across rows, scales in float32",
    "int8",
    "float8 by uneven blocks",
    "int4 by group, asymmetric",
}


def of_cases(names):
    """Parameters for all cases, of which those that are not among `names` are slow."""
    slow = pytest.mark.slow
    return pytest.mark.parametrize(
        "case", [case if case in names else pytest.param(case, marks=slow) for case in CASES]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("quantised")


@pytest.fixture(scope="module")
def checkpoint(folder, jaxmux):
    """A function that returns the folder and the decoded weights of a case; jaxmux has read it."""

    @cache
    def made(case: str):
        name = str(list(CASES).index(case))
        decoded = CASES[case][0](folder / name)
        jaxmux("decode", folder, {"backbones": [name], "written": {}})
        return folder / name, decoded

    return made


@pytest.fixture(scope="module")
def written(folder, checkpoint, jaxmux):
    """The folder of the checkpoints that jaxmux has written."""
    sizes = {"hidden_size": 100, "intermediate_size": 352, "head_dim": 24}
    make_model(folder / "model", torch.float32)
    make_model(folder / "widths", torch.float32, **sizes)
    forms = {form: ("model", form, dtype) for form, dtype in WRITTEN.items()}
    for form, source in WIDTHS.items():
        source = checkpoint(source)[0].name if source in CASES else source
        forms[form] = source, "nf4", "float32"
    jaxmux("decode", folder, {"backbones": list(forms), "written": forms})
    return folder


@of_cases(CASES.keys() - SLOW)
def test_weights_have_the_bits_that_the_library_decodes(case, checkpoint):
    path, decoded = checkpoint(case)
    found = np.load(path.parent / "decoded" / f"{path.name}.npz")
    assert len(decoded) >= 13
    for name, weight in decoded.items():
        for source in ("loaded", "read"):
            own = found[f"{source}/{name}"]
            np.testing.assert_array_equal(own, weight.numpy(), err_msg=f"{source} {name}")


@of_cases(CASES.keys() - SLOW)
def test_linears_stay_as_they_are_stored(case, checkpoint):
    path, _ = checkpoint(case)
    formats = json.loads((path.parent / "decoded" / f"{path.name}.json").read_text())
    assert (formats["self_attn.q_proj"], formats["mlp.down_proj"]) == CASES[case][1]


@of_cases(COMPUTED)
def test_logits_are_those_of_the_decoded_weights(case, checkpoint, jaxmux, at_most):
    path, decoded = checkpoint(case)
    request = {"backbone": path.name, "prompts": PROMPTS}
    jaxmux("forward", path.parent, {"cases": {path.name: request}})
    model = decoded_model(path, decoded)
    found = np.load(path.parent / "logits" / f"{path.name}.npz")
    for slot, prompts in enumerate(PROMPTS):
        for i, prompt in enumerate(prompts):
            wanted = logits(model, prompt).numpy()
            error = np.abs(found[f"{slot}-{i}"] - wanted).max() / np.abs(wanted).max()
            at_most("logits of quantised backbones, relative", error, 1e-5)


@pytest.mark.parametrize("form", [*WRITTEN, *WIDTHS])
def test_a_checkpoint_that_jaxmux_writes_has_the_same_weights_in_the_library(form, written):
    model = AutoModelForCausalLM.from_pretrained(written / form, device_map="cpu")
    found = np.load(written / "decoded" / f"{form}.npz")
    decoded = decoded_linears(model)
    assert len(decoded) == 14
    for name, weight in decoded.items():
        np.testing.assert_array_equal(found[f"read/{name}"], weight.numpy(), err_msg=name)
