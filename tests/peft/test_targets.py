"""Target modules follow PEFT's rules: names by suffix, a string as a regular expression."""

import re

import numpy as np
import pytest

from jaxmux.models import MODULES
from jaxmux.peft import full_name, resolve_targets


def layers_of(targets, config) -> dict[str, list[int]]:
    masks = resolve_targets(targets, config)
    return {module.split(".")[-1]: np.flatnonzero(mask).tolist() for module, mask in masks.items()}


EVERY = [0, 1, 2]


def test_all_linear_is_every_linear_of_every_layer(config):
    assert list(resolve_targets("all-linear", config)) == list(MODULES)
    assert set(map(tuple, layers_of("all-linear", config).values())) == {(0, 1, 2)}


@pytest.mark.parametrize(
    ("targets", "expected"),
    [
        (("q_proj",), {"q_proj": EVERY}),
        (("v_proj", "q_proj"), {"q_proj": EVERY, "v_proj": EVERY}),
        (("mlp.up_proj",), {"up_proj": EVERY}),
        (("layers.1.self_attn.k_proj",), {"k_proj": [1]}),
        (("model.layers.2.mlp.down_proj", "o_proj"), {"o_proj": EVERY, "down_proj": [2]}),
        (r".*\.(q|v)_proj", {"q_proj": EVERY, "v_proj": EVERY}),
        (r"model\.layers\.[02]\.mlp\.gate_proj", {"gate_proj": [0, 2]}),
        (r".*layers\.1\..*", dict.fromkeys((m.split(".")[-1] for m in MODULES), [1])),
    ],
)
def test_targets_are_found(targets, expected, config):
    assert layers_of(targets, config) == expected


def test_a_regular_expression_is_what_pythons_fullmatch_finds(config):
    expression = r"model\.layers\.\d\.(self_attn\.[kv]|mlp\.up)_proj"
    found = {
        full_name(module, layer)
        for module, mask in resolve_targets(expression, config).items()
        for layer in np.flatnonzero(mask)
    }
    every = {full_name(module, layer) for module in MODULES for layer in range(3)}
    assert found == {name for name in every if re.fullmatch(expression, name)}


@pytest.mark.parametrize(
    ("targets", "culprit"),
    [
        (("q_proj", "query"), "'query'"),
        (("proj",), "'proj'"),
        (("lm_head",), "'lm_head'"),
        (("layers.3.self_attn.q_proj",), "'layers.3.self_attn.q_proj'"),
        ("query", "'query'"),
        (r".*z_proj", r"'\.\*z_proj'"),
    ],
)
def test_a_target_that_matches_nothing_is_named_with_what_there_is(targets, culprit, config):
    with pytest.raises(ValueError, match=f"{culprit} matches no linear.*model.layers.0.*q_proj, "):
        resolve_targets(targets, config)


def test_an_invalid_expression_is_named(config):
    with pytest.raises(ValueError, match=r"'\(q_proj' is no valid regular expression"):
        resolve_targets("(q_proj", config)


@pytest.mark.parametrize("targets", [(), ""])
def test_no_targets_are_refused(targets, config):
    with pytest.raises(ValueError, match="target_modules"):
        resolve_targets(targets, config)
