"""Quantised checkpoints: what stays as it is stored, and what is refused. tests/parity compares the
weights with those that the libraries decode."""

import dataclasses
import json
import logging
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.flax import load_file, save_file

from jaxmux import PlanningError, RunOptions
from jaxmux.models import (
    Backbone,
    BackboneConfig,
    BackboneError,
    backbone_fingerprint,
    check_backbone,
    checkpoint_files,
    checkpoint_tensors,
    load_backbone,
    quantised_checkpoint,
    save_backbone,
)
from jaxmux.pallas_kernels import number_formats
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.peft import LoRA, initial_adapter, resolve_targets
from jaxmux.peft.merged_checkpoint import write_merged

CONFIG = BackboneConfig(
    "LlamaForCausalLM",
    vocab_size=40,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
)
UP = "model.layers.1.mlp.up_proj"
CHANNELS = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "strategy": "channel"}}},
}
INT8 = {"quant_method": "bitsandbytes", "load_in_8bit": True}


@pytest.fixture(scope="module")
def plain(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("plain")
    save_backbone(Backbone.random(CONFIG, seed=3), folder)
    return folder


def of_int8(weight: jax.Array) -> dict[str, jax.Array]:
    codes, absmax = number_formats.encode_int8(weight)
    return {"weight": codes.T, "SCB": absmax}


def of_float8(weight: jax.Array) -> dict[str, jax.Array]:
    codes, scales = number_formats.encode_float8(weight)
    return {"weight": codes, "weight_scale": scales[:, None], "input_scale": jnp.ones(1)}


def quantised(
    plain: Path, folder: Path, settings: dict, tensors_of, *but: str, linears=("_proj",)
) -> Path:
    """A checkpoint with the tensors that `tensors_of` makes of weights [k, n] of linears."""
    tensors = {}
    for name, tensor in load_file(plain / "model.safetensors").items():
        linear = name.removesuffix(".weight")
        if linear.endswith(linears) and linear not in but:
            own = tensors_of(tensor.T)
            tensors |= {f"{linear}.{part}": array for part, array in own.items()}
        else:
            tensors[name] = tensor
    config = json.loads((plain / "config.json").read_text()) | {"quantization_config": settings}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def linear(backbone: Backbone, block: str, name: str) -> FrozenWeight:
    return backbone.weights["layers"][block][name]["kernel"]


def assert_same(found: FrozenWeight, wanted: FrozenWeight) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_int8_stays_and_is_what_the_format_encodes(plain, tmp_path):
    folder = quantised(plain, tmp_path, INT8, of_int8)
    found, encoded = load_backbone(folder), load_backbone(plain, backbone_format="int8")
    jax.tree.map(np.testing.assert_array_equal, found.weights, encoded.weights)
    assert found.config.linear_format == "int8"
    assert found.fingerprint != backbone_fingerprint(plain)
    read = checkpoint_tensors(folder, np.dtype(np.float32))(f"{UP}.weight")
    np.testing.assert_array_equal(read, linear(found, "mlp", "up_proj").decoded()[1].T)


def test_codes_of_float8_are_multiplied_only_if_that_is_asked_for(plain, tmp_path):
    folder = quantised(plain, tmp_path, CHANNELS, of_float8)
    asked = load_backbone(folder, backbone_format="float8")
    jax.tree.map(
        np.testing.assert_array_equal,
        asked.weights,
        load_backbone(plain, backbone_format="float8").weights,
    )
    kept = linear(load_backbone(folder), "mlp", "up_proj")
    assert kept.format == "scaled" and kept.values.dtype == jnp.float8_e4m3fn
    np.testing.assert_array_equal(kept.decoded(), linear(asked, "mlp", "up_proj").decoded())


def test_another_format_is_encoded_from_the_decoded_weights(plain, tmp_path):
    folder = quantised(plain, tmp_path, CHANNELS, of_float8)
    found = linear(load_backbone(folder, backbone_format="nf4"), "self_attn", "q_proj")
    decoded = linear(load_backbone(folder), "self_attn", "q_proj").decoded()
    assert_same(found, FrozenWeight.encoded(decoded, "nf4"))
    saved = tmp_path / "saved"
    save_backbone(load_backbone(folder), saved)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    np.testing.assert_array_equal(
        linear(load_backbone(saved), "self_attn", "q_proj").values, decoded
    )


def test_linears_that_differ_between_layers_are_decoded_with_one_warning(plain, tmp_path, caplog):
    folder = quantised(plain, tmp_path, INT8, of_int8, UP)
    with caplog.at_level(logging.WARNING):
        found = load_backbone(folder)
        load_backbone(folder)
    (record,) = (r for r in caplog.records if "decoded" in r.message)
    assert "mlp.up_proj" in record.message and "down_proj" not in record.message
    weight = linear(found, "mlp", "up_proj")
    assert weight.format == "float32"
    exact = load_file(plain / "model.safetensors")[f"{UP}.weight"]
    np.testing.assert_array_equal(weight.values[1], exact.T)
    assert linear(found, "mlp", "down_proj").format == "int8"


def test_a_quantised_head_is_decoded(plain, tmp_path):
    head = load_file(plain / "model.safetensors")["lm_head.weight"]
    folder = quantised(plain, tmp_path, CHANNELS, of_float8, linears=("_proj", "lm_head"))
    wanted = number_formats.decode_float8(*number_formats.encode_float8(head.T))
    found = load_backbone(folder).weights["lm_head"]["kernel"]
    np.testing.assert_array_equal(found.values, wanted)
    read = checkpoint_tensors(folder, np.dtype(np.float32))("lm_head.weight")
    np.testing.assert_array_equal(read, wanted.T)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method='gptq' is not supported.*original"),
        ({"quant_method": "awq"}, "'awq'"),
        ({"quant_method": "mxfp4"}, "'mxfp4'"),
        (CHANNELS | {"format": "nvfp4-pack-quantized"}, "'nvfp4-pack-quantized' is not supported"),
        (CHANNELS | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "'sparse-24-bitmask'"),
        (CHANNELS | {"transform_config": {"config_groups": {}}}, "transform_config"),
    ],
)
def test_other_quantisations_are_refused_by_name(plain, tmp_path, settings, message):
    folder = quantised(plain, tmp_path, settings, of_int8)
    with pytest.raises(BackboneError, match=f"config.json: .*{message}"):
        load_backbone(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SCB": None}, f"tensor {UP}.weight has the dtype I8, which needs scales"),
        ({"SCB": jnp.ones(5)}, f"the tensors of {UP} do not fit together"),
        ({"weight": jnp.ones((4, 4), jnp.int8)}, f"the tensors of {UP} do not fit together"),
        ({"weight": jnp.ones((128, 64), jnp.int16)}, f"{UP}.weight: .* I16 are not supported"),
        ({"weight_g_idx": jnp.arange(4)}, f"{UP}.weight_g_idx: groups in another order"),
        ({"weight_packed": jnp.ones((4, 4), jnp.int32)}, f"{UP}.weight_scale: is missing"),
        ({"weight.absmax": jnp.ones(4)}, f"{UP}.weight.quant_state.bitsandbytes__nf4: is missing"),
    ],
)
def test_damaged_tensors_are_named(plain, tmp_path, change, message):
    folder = quantised(plain, tmp_path, INT8, of_int8)
    tensors = load_file(folder / "model.safetensors")
    for part, array in change.items():
        tensors[f"{UP}.{part}"] = array
    tensors = {name: array for name, array in tensors.items() if array is not None}
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(BackboneError, match=message):
        check_backbone(folder)


@pytest.mark.parametrize("form", ["float8", "int8", "nf4"])
def test_a_cache_is_written_once_and_gives_the_same_numbers(plain, tmp_path, form, monkeypatch):
    wanted = load_backbone(plain, backbone_format=form)
    first = load_backbone(plain, "auto", form, tmp_path)
    monkeypatch.setattr(quantised_checkpoint, "write_quantised", None)
    second = load_backbone(plain, "auto", form, tmp_path)
    (entry,) = tmp_path.iterdir()
    assert entry.name == f"{wanted.fingerprint}-{form}-float32"
    for found in (first, second):
        assert (found.name_or_path, found.fingerprint) == (str(plain), wanted.fingerprint)
        for one, other in zip(*map(jax.tree.leaves, (found.weights, wanted.weights)), strict=True):
            np.testing.assert_array_equal(one, other)
    # It is a checkpoint of its own, which needs no format to be named.
    own = load_backbone(entry)
    assert own.config.linear_format == {"float8": "scaled"}.get(form, form)
    decoded = linear(wanted, "mlp", "down_proj").decoded()
    np.testing.assert_array_equal(linear(own, "mlp", "down_proj").decoded(), decoded)


def test_a_cache_of_large_weights_has_several_files(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_SHARD_BYTES", 50_000)
    found = load_backbone(plain, "auto", "int8", tmp_path)
    (entry,) = tmp_path.iterdir()
    assert len(list(entry.glob("model-*-of-*.safetensors"))) > 2
    wanted = load_backbone(plain, backbone_format="int8")
    jax.tree.map(np.testing.assert_array_equal, found.weights, wanted.weights)


def test_a_cache_needs_a_format_and_leaves_nothing_when_it_fails(plain, tmp_path):
    with pytest.raises(ValueError, match="needs a backbone_format"):
        load_backbone(plain, cache=tmp_path)
    with pytest.raises(PlanningError, match="backbone_cache needs a backbone_format"):
        RunOptions(backbone_cache="cache")
    narrow = tmp_path / "narrow"
    config = dataclasses.replace(CONFIG, hidden_size=48)
    save_backbone(Backbone.random(config), narrow)
    with pytest.raises(BackboneError, match="q_proj: .* multiple of 64"):
        load_backbone(narrow, "auto", "nf4", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*"))


def test_an_adapter_is_merged_into_the_decoded_weights(plain, tmp_path):
    folder = quantised(plain, tmp_path / "int8", INT8, of_int8)
    backbone, decoded = load_backbone(folder), tmp_path / "decoded"
    save_backbone(backbone, decoded)
    spec = LoRA(rank=2, target_modules=("up_proj",))
    targets = resolve_targets(spec.target_modules, CONFIG)
    adapter = initial_adapter(spec, targets, CONFIG, seed=1)
    adapter = jax.tree.map(lambda leaf: np.asarray(leaf) + 0.1, adapter)
    merged = []
    for base in (folder, decoded):
        out = tmp_path / f"merged-{base.name}"
        write_merged(out, base, adapter, spec, BackboneConfig.from_folder(base))
        merged.append(load_backbone(out))
    assert merged[0].config.quantisation is None
    jax.tree.map(np.testing.assert_array_equal, *(each.weights for each in merged))
    moved = (
        linear(merged[0], "mlp", "up_proj").values - linear(backbone, "mlp", "up_proj").decoded()
    )
    assert 0.01 < np.abs(moved).max()
