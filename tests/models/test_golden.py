"""A trained model gives the logits, losses and continuations that are recorded in its folder."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmux.data import Microbatch
from jaxmux.models import ForwardOptions, SlotTable, head_kernel, hidden_states, load_backbone

ROW = 512


@pytest.fixture(scope="module")
def model_dir(shared_dir):
    return shared_dir / "models" / "stories260k"


@pytest.fixture(scope="module")
def golden(model_dir):
    return json.loads((model_dir / "golden.json").read_text())


@pytest.fixture(scope="module")
def logits_of(model_dir):
    """A function from token ids to the logits at each of them."""
    backbone = load_backbone(model_dir, "float32")

    @jax.jit
    def forward(weights, microbatch):
        slots = SlotTable(jnp.zeros(1), jnp.zeros(1), jnp.zeros(1, jnp.uint32))
        options = ForwardOptions("xla", max_sequences=1)
        hidden, _, finite = hidden_states(
            backbone.config, weights, {"lora": {}}, None, microbatch, slots, options
        )
        return head_kernel(weights).matmul(hidden), finite

    def logits(ids: list[int]) -> np.ndarray:
        tokens = np.zeros((1, ROW), np.int32)
        tokens[0, : len(ids)] = ids
        segments = np.where(np.arange(ROW) < len(ids), 0, -1)[None].astype(np.int32)
        unused = np.zeros((1, ROW), np.int32)
        microbatch = Microbatch(
            tokens=tokens,
            targets=unused,
            loss_weight=unused.astype(np.float32),
            positions=np.arange(ROW, dtype=np.int32)[None],
            segment_ids=segments,
            sample_id=unused.astype(np.uint32),
            chunk_slot=np.full(ROW // 64, -1, np.int32),
        )
        found, finite = forward(backbone.weights, microbatch)
        assert finite.all()
        return np.asarray(found, np.float64)[: len(ids)]

    return logits


def test_last_logits_agree(golden, logits_of):
    for case in golden:
        found = logits_of(case["input_ids"])[-1]
        np.testing.assert_allclose(found, case["last_logits"], atol=1e-4, err_msg=case["prompt"])


def test_mean_losses_agree(golden, logits_of):
    cases = [case for case in golden if case["mean_nll"] is not None]
    assert cases
    for case in cases:
        ids = case["input_ids"]
        logits = logits_of(ids)[:-1]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        mean = -log_p[np.arange(len(ids) - 1), ids[1:]].mean()
        assert mean == pytest.approx(case["mean_nll"], abs=1e-5), case["prompt"]


def test_greedy_continuations_agree(golden, logits_of):
    """The argmax after every prefix is the next token: by induction, greedy decoding agrees."""
    for case in golden:
        prompt, ids = case["input_ids"], case["greedy_ids"]
        assert ids[: len(prompt)] == prompt and len(ids) > len(prompt) + 100
        chosen = logits_of(ids[:-1]).argmax(axis=1)[len(prompt) - 1 :]
        assert chosen.tolist() == ids[len(prompt) :], case["prompt"]
