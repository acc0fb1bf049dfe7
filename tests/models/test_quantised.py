"""Quantised checkpoints: what stays as it is stored, and what is refused. tests/parity compares the
weights with those that the libraries decode."""

import dataclasses
import json
import logging
import os
import shutil
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
    save_backbone,
    write_quantised,
)
from jaxmux.models.quantised import scaled, writing
from jaxmux.models.quantised.settings import Quantisation, quantisation_of
from jaxmux.models.quantised.stored_linear import StoredLinear
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
    num_kv_heads=4,
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


@jax.jit
def of_int8(weight: jax.Array) -> dict[str, jax.Array]:
    codes, absmax = number_formats.encode_int8(weight)
    return {"weight": codes.T, "SCB": absmax}


@jax.jit
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


@pytest.mark.long
def test_a_damaged_checkpoint_in_the_cache_is_made_again(plain, tmp_path, caplog):
    expected = load_backbone(plain, jnp.float32, "int8", tmp_path)
    (kept,) = (path for path in tmp_path.iterdir() if not path.name.startswith("."))
    weights = kept / "model.safetensors"
    os.truncate(weights, weights.stat().st_size // 2)
    with caplog.at_level(logging.WARNING, "jaxmux"):
        found = load_backbone(plain, jnp.float32, "int8", tmp_path)
    assert f"{kept}: damaged, so it is made again" in caplog.text
    for one, other in zip(*map(jax.tree.leaves, (found.weights, expected.weights)), strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


@pytest.mark.long
def test_int8_stays_and_is_what_the_format_encodes(plain, tmp_path):
    folder = quantised(plain, tmp_path, INT8, of_int8)
    found, encoded = load_backbone(folder), load_backbone(plain, backbone_format="int8")
    jax.tree.map(np.testing.assert_array_equal, found.weights, encoded.weights)
    assert found.config.linear_format == "int8"
    assert found.fingerprint != backbone_fingerprint(plain)
    read = checkpoint_tensors(folder, np.dtype(np.float32))(f"{UP}.weight")
    np.testing.assert_array_equal(read, linear(found, "mlp", "up_proj").decoded()[1].T)


@pytest.mark.long
@pytest.mark.parametrize(
    "settings", [INT8, CHANNELS, {"quant_method": "fp8"}, {"quant_method": "fbgemm_fp8"}]
)
def test_plain_weights_that_are_said_to_be_quantised_are_read_with_a_warning(
    settings, plain, tmp_path, caplog
):
    folder = quantised(plain, tmp_path / "a", settings, lambda weight: {"weight": weight.T})
    wanted = load_backbone(plain)
    for _ in range(2):
        found = load_backbone(folder)
        jax.tree.map(np.testing.assert_array_equal, found.weights, wanted.weights)
    (message,) = [record.getMessage() for record in caplog.records]
    method = settings["quant_method"]
    assert f"says that the weights are quantised ({method}), but no tensor of them is" in message


@pytest.mark.long
@pytest.mark.parametrize("tensors_of", [of_int8, of_float8])
def test_quantised_weights_that_are_not_said_to_be_quantised_are_refused(
    tensors_of, plain, tmp_path
):
    folder = quantised(plain, tmp_path, {}, tensors_of)
    part = min(tensors_of(jnp.ones((2, 2))).keys() - {"weight", "input_scale"})
    message = rf"proj\.{part} shows that weights are quantised, but config.json has no quantization"
    with pytest.raises(BackboneError, match=message):
        load_backbone(folder)


@pytest.mark.long
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


@pytest.mark.long
def test_another_format_is_encoded_from_the_decoded_weights(plain, tmp_path):
    folder = quantised(plain, tmp_path, CHANNELS, of_float8)
    found = linear(load_backbone(folder, backbone_format="nf4"), "self_attn", "q_proj")
    decoded = linear(load_backbone(folder), "self_attn", "q_proj").decoded()
    encoded = jax.jit(FrozenWeight.encoded, static_argnums=1)
    assert_same(found, encoded(decoded, "nf4"))
    saved = tmp_path / "saved"
    save_backbone(load_backbone(folder), saved)
    assert "quantization_config" not in json.loads((saved / "config.json").read_text())
    np.testing.assert_array_equal(
        linear(load_backbone(saved), "self_attn", "q_proj").values, decoded
    )


@pytest.mark.long
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


@pytest.mark.long
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
    ("settings", "message"),
    [
        ("int8", "quantization_config should be an object, found 'int8'"),
        (CHANNELS | {"config_groups": [1]}, r"config_groups should be an object, found \[1\]"),
        (CHANNELS | {"config_groups": {"g": {"weights": "x"}}}, "weights should be an object"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, r"rows and columns.*found \[128\]"),
        ({"quant_method": "fp8", "weight_block_size": [0, 128]}, "rows and columns"),
    ],
)
def test_damaged_settings_are_named(plain, tmp_path, settings, message):
    folder = quantised(plain, tmp_path, settings, of_int8)
    with pytest.raises(BackboneError, match=f"config.json: .*{message}"):
        BackboneConfig.from_folder(folder)


def test_settings_of_old_files_are_understood():
    def read(**settings) -> Quantisation:
        return quantisation_of({"compression_config": settings}, "config.json")

    assert read(load_in_8bit=True).method == "bitsandbytes"
    assert read(quant_method="fp8").block == (128, 128)
    group = {"weights": {"block_structure": "64x32"}}
    assert read(**CHANNELS | {"config_groups": {"g": group}}).block == (64, 32)


def edited(folder: Path, change: dict) -> Path:
    """Replaces or removes tensors of the linear `UP`."""
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"{UP}.{part}": array for part, array in change.items()}
    tensors = {name: array for name, array in tensors.items() if array is not None}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"SCB": None}, "weight: the dtype I8 needs scales"),
        ({"SCB": jnp.ones(5)}, "SCB: has the shape .5.; its linear needs .128."),
        ({"SCB": jnp.ones(128, jnp.int8)}, "SCB: the dtype I8 is not supported"),
        ({"weight": jnp.ones((4, 4), jnp.int8)}, "weight: has the shape"),
        ({"weight": jnp.ones((128, 64), jnp.int16)}, "weight: the dtype I16 is not supported"),
        ({"weight_format": jnp.ones((), jnp.uint8)}, "weight_format: not in the order of rows"),
        ({"weight_packed": jnp.ones((4, 4), jnp.int32)}, "weight_packed: has the shape"),
        ({"weight_packed": jnp.ones((128, 8), jnp.int32)}, "weight_scale: is missing"),
        ({"weight.absmax": jnp.ones(4)}, "weight.quant_state.bitsandbytes__nf4: is missing"),
    ],
)
def test_damaged_tensors_are_named(plain, tmp_path, change, message):
    folder = edited(quantised(plain, tmp_path, INT8, of_int8), change)
    with pytest.raises(BackboneError, match=f"tensor {UP}.{message}"):
        check_backbone(folder)


@pytest.fixture(scope="module")
def nf4(plain, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("nf4") / "nf4"
    write_quantised(plain, folder, np.dtype("float32"), "nf4")
    return folder


STATE = "weight.quant_state.bitsandbytes__nf4"


def state(**changes) -> dict[str, jax.Array]:
    facts = {
        "quant_type": "nf4",
        "blocksize": 64,
        "dtype": "float32",
        "nested_offset": 0.1,
    } | changes
    facts = {key: value for key, value in facts.items() if value is not None}
    return {STATE: jnp.asarray(np.frombuffer(json.dumps(facts).encode(), np.uint8))}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight.nested_absmax": None}, "weight.nested_absmax: is missing"),
        ({"weight.nested_absmax": jnp.ones(7)}, "weight.nested_absmax: has the shape"),
        ({"weight.absmax": jnp.ones(128)}, "weight.absmax: the dtype F32 is not supported"),
        ({"weight.absmax": jnp.ones(0, jnp.uint8)}, "weight.absmax: has the shape"),
        ({"weight": jnp.ones((5, 1), jnp.uint8)}, "weight: has 5 bytes"),
        ({STATE: jnp.ones(9, jnp.uint8)}, f"{STATE}: not what bitsandbytes writes"),
        ({"weight.quant_state.bitsandbytes__fp4": jnp.ones(9)}, f"{STATE}: is there 2 times"),
        (state(nested_offset=None), f"{STATE}: not what .*nested_offset"),
        (state(nested_offset=float("nan")), f"{STATE}: not what .*nested_offset nan"),
        (state(dtype="int8"), f"{STATE}: not what .*dtype 'int8'"),
        (state(blocksize=0), f"{STATE}: not what .*sizes of blocks"),
    ],
)
def test_damaged_tensors_of_4_bits_are_named(nf4, tmp_path, change, message):
    folder = edited(shutil.copytree(nf4, tmp_path / "damaged"), change)
    with pytest.raises(BackboneError, match=f"tensor {UP}.{message}"):
        check_backbone(folder)


def test_scales_by_another_map_are_decoded_by_it(nf4, tmp_path):
    """torch makes maps with other last bits on other machines."""
    part, name = "weight.nested_quant_map", f"{UP}.weight"
    tensors = load_file(nf4 / "model.safetensors")
    other = shutil.copytree(nf4, tmp_path / "other")
    edited(other, {part: 2 * tensors[f"{UP}.{part}"]})
    offset = json.loads(np.asarray(tensors[f"{UP}.{STATE}"]).tobytes())["nested_offset"]
    # A scale is map · nested + offset, and the largest weight of its block.
    before, after = (
        np.abs(checkpoint_tensors(own, np.dtype("float32"))(name)).reshape(-1, 64).max(1) - offset
        for own in (nf4, other)
    )
    np.testing.assert_allclose(after, 2 * before, atol=1e-6)
    assert np.abs(before).max() > 1e-3


@pytest.mark.long
def test_codes_of_nf4_are_kept_where_layers_differ(plain, nf4, tmp_path):
    """The other linears are encoded."""
    tensors = load_file(plain / "model.safetensors")
    change = {part: None for part in ("weight.absmax", "weight.nested_absmax", STATE)}
    change |= {part: None for part in ("weight.quant_map", "weight.nested_quant_map")}
    change["weight"] = tensors[f"{UP}.weight"]
    folder = edited(shutil.copytree(nf4, tmp_path / "mixed"), change)
    found, wanted = (load_backbone(own, backbone_format="nf4").weights for own in (folder, nf4))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(("size", "wide"), [(576, 128), (200, 128), (192, 96), (130, 64)])
def test_scales_of_uneven_blocks_stay_small(size, wide):
    rng = np.random.default_rng(size)
    codes = rng.integers(-9, 9, (size, size)).astype(np.int8)
    number = -(-size // wide)
    scale = rng.random((number, number)).astype(np.float32)
    stored = StoredLinear(scaled._scaled, codes.shape, ("weight", "s"), block=(wide, wide))
    (weight,) = scaled._scaled({"weight": jnp.asarray(codes), "s": jnp.asarray(scale)}, stored)
    wanted = codes * np.repeat(np.repeat(scale, wide, 0), wide, 1)[:size, :size]
    np.testing.assert_array_equal(weight.decoded().T, wanted)
    assert max(weight.scales.scale.shape) <= size


@pytest.mark.long
@pytest.mark.parametrize(
    "form", [*(pytest.param(own, marks=pytest.mark.slow) for own in ("float8", "int8")), "nf4"]
)
def test_a_cache_is_written_once_and_gives_the_same_numbers(plain, tmp_path, form, monkeypatch):
    wanted = load_backbone(plain, backbone_format=form)
    first = load_backbone(plain, "auto", form, tmp_path)
    monkeypatch.setattr(writing, "write_quantised", None)
    second = load_backbone(plain, "auto", form, tmp_path)
    (entry,) = tmp_path.glob("[!.]*")
    assert first.config == second.config == wanted.config
    assert entry.name == f"{wanted.fingerprint}-{form}-float32-v{writing._VERSION}"
    for found in (first, second):
        assert (found.name_or_path, found.fingerprint) == (str(plain), wanted.fingerprint)
        jax.tree.map(np.testing.assert_array_equal, found.weights, wanted.weights)
    # It is a checkpoint of its own, which needs no format to be named.
    own = load_backbone(entry)
    assert own.config.linear_format == {"float8": "scaled"}.get(form, form)
    decoded = linear(wanted, "mlp", "down_proj").decoded()
    np.testing.assert_array_equal(linear(own, "mlp", "down_proj").decoded(), decoded)


def test_a_cache_of_large_weights_has_several_files(plain, tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_files, "_SHARD_BYTES", 50_000)
    found = load_backbone(plain, "auto", "int8", tmp_path)
    (entry,) = tmp_path.glob("[!.]*")
    assert len(list(entry.glob("model-*-of-*.safetensors"))) > 2
    wanted = load_backbone(plain, backbone_format="int8")
    jax.tree.map(np.testing.assert_array_equal, found.weights, wanted.weights)


@pytest.mark.long
def test_a_cache_needs_a_format_and_leaves_nothing_when_it_fails(plain, tmp_path):
    with pytest.raises(ValueError, match="needs a backbone_format"):
        load_backbone(plain, cache=tmp_path)
    with pytest.raises(PlanningError, match="backbone_cache needs a backbone_format"):
        RunOptions(backbone_cache="cache")
    narrow = tmp_path / "narrow"
    config = dataclasses.replace(CONFIG, hidden_size=49)
    save_backbone(Backbone.random(config), narrow)
    with pytest.raises(BackboneError, match="q_proj: .* multiple of 2"):
        load_backbone(narrow, "auto", "nf4", tmp_path / "cache")
    assert not list((tmp_path / "cache").glob("*nf4*v1")) and not list(tmp_path.glob("*.partial"))


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
