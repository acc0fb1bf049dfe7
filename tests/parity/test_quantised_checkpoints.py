"""Quantised checkpoints have the weights that their own libraries decode, bit for bit, and the
logits of transformers' model of these weights."""

import json

import numpy as np
import pytest
from backbones import VOCABULARY, logits, random_prompts

pytest.importorskip("bitsandbytes")
pytest.importorskip("compressed_tensors")
from quantised_checkpoints import CASES, decoded_model  # noqa: E402

PROMPTS = random_prompts(VOCABULARY)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory, jaxmux):
    """By case, the folder and the decoded weights; jaxmux has read all folders."""
    folder = tmp_path_factory.mktemp("quantised")
    made = {}
    for number, (case, (make, _)) in enumerate(CASES.items()):
        made[case] = folder / str(number), make(folder / str(number))
    names = {case: path.name for case, (path, _) in made.items()}
    requests = {name: {"backbone": name, "prompts": PROMPTS} for name in names.values()}
    jaxmux("forward", folder, {"cases": requests})
    jaxmux("decode", folder, {"backbones": list(names.values())})
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


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_the_decoded_weights(case, checkpoints, at_most):
    path, decoded = checkpoints[case]
    model = decoded_model(path, decoded)
    found = np.load(path.parent / "logits" / f"{path.name}.npz")
    for slot, prompts in enumerate(PROMPTS):
        for i, prompt in enumerate(prompts):
            wanted = logits(model, prompt).numpy()
            error = np.abs(found[f"{slot}-{i}"] - wanted).max() / np.abs(wanted).max()
            at_most("logits of quantised backbones, relative", error, 1e-5)
