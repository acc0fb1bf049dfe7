"""Quantised checkpoints have the weights that their own libraries decode, bit for bit, and the
logits of transformers' model of these weights."""

import json

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


# By format in which linears stay, a case whose logits CI computes.
COMPUTED = (
    "nf4, blocks across rows, scales in float32",
    "int8",
    "float8 by uneven blocks",
    "int4 by group, asymmetric",
)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, jaxmux):
    """By case, the folder and the decoded weights; jaxmux has read all folders."""
    folder = tmp_path_factory.mktemp("quantised")
    made = {}
    for number, (case, (make, _)) in enumerate(CASES.items()):
        made[case] = folder / str(number), make(folder / str(number))
    names = {case: path.name for case, (path, _) in made.items()}
    make_model(folder / "model", torch.float32)
    make_model(
        folder / "widths", torch.float32, hidden_size=100, intermediate_size=352, head_dim=24
    )
    written = {form: ("model", form, dtype) for form, dtype in WRITTEN.items()}
    sources = {name: names.get(source, source) for name, source in WIDTHS.items()}
    written |= {name: (source, "nf4", "float32") for name, source in sources.items()}
    backbones = [*names.values(), *written]
    jaxmux("decode", folder, {"backbones": backbones, "written": written})
    return made


@pytest.mark.parametrize("case", CASES)
def test_weights_have_the_bits_that_the_library_decodes(case, checkpoints):
    path, decoded = checkpoints[case]
    found = np.load(path.parent / "decoded" / f"{path.name}.npz")
    assert len(decoded) >= 13
    for name, weight in decoded.items():
        for source in ("loaded", "read"):
            own = found[f"{source}/{name}"]
            np.testing.assert_array_equal(own, weight.numpy(), err_msg=f"{source} {name}")


@pytest.mark.parametrize("case", CASES)
def test_linears_stay_as_they_are_stored(case, checkpoints):
    path, _ = checkpoints[case]
    formats = json.loads((path.parent / "decoded" / f"{path.name}.json").read_text())
    assert (formats["self_attn.q_proj"], formats["mlp.down_proj"]) == CASES[case][1]


@pytest.mark.parametrize(
    "case",
    [case if case in COMPUTED else pytest.param(case, marks=pytest.mark.slow) for case in CASES],
)
def test_logits_are_those_of_the_decoded_weights(case, checkpoints, jaxmux, at_most):
    path, decoded = checkpoints[case]
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
def test_a_checkpoint_that_jaxmux_writes_has_the_same_weights_in_the_library(form, checkpoints):
    folder = checkpoints["nf4"][0].parent
    model = AutoModelForCausalLM.from_pretrained(folder / form, device_map="cpu")
    found = np.load(folder / "decoded" / f"{form}.npz")
    decoded = decoded_linears(model)
    assert len(decoded) == 14
    for name, weight in decoded.items():
        np.testing.assert_array_equal(found[f"read/{name}"], weight.numpy(), err_msg=name)
