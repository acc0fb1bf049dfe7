"""Backbones are read and written in Hugging Face's format; errors name the file or tensor at
fault."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux.models import (
    BACKBONE_FORMATS,
    MODULES,
    Backbone,
    BackboneConfig,
    BackboneError,
    checkpoint_files,
    checkpoint_reader,
    checkpoint_tensors,
    linear_sizes,
    load_backbone,
    save_backbone,
)
from jaxmux.models.modules import abstract_weights
from jaxmux.models.tensor_names import hf_name, module_path
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

SIZES = dict(
    vocab_size=50,
    hidden_size=16,
    intermediate_size=24,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
)
CONFIGS = {
    "llama": BackboneConfig("LlamaForCausalLM", **SIZES),
    "llama with biases": BackboneConfig(
        "LlamaForCausalLM", **SIZES, attention_bias=True, output_bias=True, mlp_bias=True
    ),
    "tied": BackboneConfig("LlamaForCausalLM", **SIZES, tie_word_embeddings=True),
    "mistral": BackboneConfig("MistralForCausalLM", **SIZES, sliding_window=32),
    "qwen2": BackboneConfig("Qwen2ForCausalLM", **SIZES, attention_bias=True),
    "qwen3": BackboneConfig("Qwen3ForCausalLM", **SIZES, qk_norm=True),
}


def assert_same_weights(one, other):
    assert jax.tree.structure(one) == jax.tree.structure(other)
    for x, y in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert x.dtype == y.dtype
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def random_backbone(config: BackboneConfig, dtype=jnp.float32) -> Backbone:
    """A backbone of normal values, also in norms and biases, where `Backbone.random` has constants.
    It needs no compilation."""
    rng = np.random.default_rng(1)
    weights = jax.tree.map(
        lambda leaf: jnp.asarray(rng.standard_normal(leaf.shape, np.float32), leaf.dtype),
        abstract_weights(config, dtype),
    )
    return Backbone(config, weights, "random")


def test_who_changes_abstract_weights_changes_nobody_elses():
    (config, *_) = CONFIGS.values()
    expected = random_backbone(config).weights
    del abstract_weights(config)["layers"]["mlp"]
    found = abstract_weights(config)
    assert jax.tree.map(jnp.shape, found) == jax.tree.map(jnp.shape, expected)
    half = jax.tree.leaves(abstract_weights(config, jnp.bfloat16))
    assert {leaf.dtype for leaf in half} == {jnp.dtype(jnp.bfloat16)}


@pytest.mark.long
@pytest.mark.parametrize(
    ("config", "dtype"),
    [
        pytest.param(
            config,
            dtype,
            id=f"{name}-{jnp.dtype(dtype)}",
            marks=() if dtype == jnp.float32 or name == "llama" else pytest.mark.slow,
        )
        for name, config in CONFIGS.items()
        for dtype in (jnp.float32, jnp.bfloat16)
    ],
)
def test_a_saved_backbone_loads_back_the_same(config, dtype, tmp_path):
    backbone = random_backbone(config, dtype)
    save_backbone(backbone, tmp_path)
    loaded = load_backbone(tmp_path, dtype)
    assert loaded.config == config
    assert_same_weights(loaded.weights, backbone.weights)


@pytest.fixture
def folder(tmp_path) -> Path:
    save_backbone(random_backbone(CONFIGS["qwen3"]), tmp_path)
    return tmp_path


def edit_tensors(folder: Path, change) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path)


def edit_config(folder: Path, **values) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def shard(folder: Path, shards: int) -> list[str]:
    """Spreads the tensors over several files with an index, as large checkpoints are."""
    whole = folder / "model.safetensors"
    tensors, names, weight_map = load_file(whole), [], {}
    for i in range(shards):
        names.append(f"model-{i + 1:05}-of-{shards:05}.safetensors")
        part = dict(list(tensors.items())[i::shards])
        save_file(part, folder / names[-1])
        weight_map |= dict.fromkeys(part, names[-1])
    whole.unlink()
    index = {"metadata": {"total_size": 0}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return names


@pytest.mark.long
@pytest.mark.parametrize(
    ("stored", "piece_bytes"),
    [
        pytest.param(stored, piece_bytes, marks=() if piece_bytes == of_dtype else pytest.mark.slow)
        for stored, of_dtype in ((jnp.float16, 1), (jnp.float32, 200), (np.float64, 2**26))
        for piece_bytes in (1, 200, 2**26)
    ],
)
def test_pieces_of_any_size_give_the_tensors_of_the_file(piece_bytes, stored, folder, monkeypatch):
    """Compared with safetensors and NumPy."""
    monkeypatch.setattr(checkpoint_reader, "_PIECE_BYTES", piece_bytes)
    path = folder / "model.safetensors"
    tensors = {name: np.asarray(t, stored) for name, t in load_file(path).items()}
    save_file(tensors, path)
    come = []
    weights = load_backbone(folder, jnp.bfloat16, progress=come.append).weights
    for key_path, leaf in jax.tree.leaves_with_path(weights):
        names = module_path(key_path)
        layers = range(SIZES["num_layers"]) if names[0] == "layers" else [None]
        found = np.asarray(leaf) if names[0] == "layers" else np.asarray(leaf)[None]
        for layer, values in zip(layers, found, strict=True):
            expected = tensors[hf_name(names, layer)].astype(jnp.bfloat16)
            expected = expected.T if names[-1] == "kernel" else expected
            np.testing.assert_array_equal(values, expected)
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(weights))
    assert 0.9 * total < sum(come) <= total


def test_a_file_that_is_cut_while_it_is_read_is_named(folder, monkeypatch):
    path = folder / "model.safetensors"

    def cut_first(*given):
        os.truncate(path, path.stat().st_size // 2)
        return preadv(*given)

    preadv = os.preadv
    monkeypatch.setattr(checkpoint_files.os, "preadv", cut_first)
    with pytest.raises(BackboneError, match=f"{path}: .* is incomplete"):
        load_backbone(folder)


def test_tensor_names_and_layouts_are_hugging_faces(folder):
    weights = load_backbone(folder).weights
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        q = tensors[f"model.layers.{layer}.self_attn.q_proj.weight"]
        assert q.shape == (32, 16)
        np.testing.assert_array_equal(
            weights["layers"]["self_attn"]["q_proj"]["kernel"].at_layer(layer).decoded(), q.T
        )
        np.testing.assert_array_equal(
            weights["layers"]["self_attn"]["q_norm"]["weight"][layer],
            tensors[f"model.layers.{layer}.self_attn.q_norm.weight"],
        )
    np.testing.assert_array_equal(
        weights["lm_head"]["kernel"].decoded(), tensors["lm_head.weight"].T
    )
    assert {"model.embed_tokens.weight", "model.norm.weight"} < set(tensors)


def test_a_sharded_checkpoint_loads_as_the_whole_one(folder):
    whole = load_backbone(folder)
    shard(folder, 3)
    assert_same_weights(load_backbone(folder).weights, whole.weights)


def test_tensors_are_converted_to_the_dtype_asked_for(folder):
    half = load_backbone(folder, "bfloat16").weights
    wide = load_backbone(folder, "float32").weights
    cast = jax.tree.map(
        lambda leaf: leaf.astype(jnp.bfloat16),
        wide,
        is_leaf=lambda node: isinstance(node, FrozenWeight),
    )
    assert_same_weights(half, cast)


def test_auto_dtype_is_float32_on_cpu(folder):
    weights = load_backbone(folder).weights
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(weights))


def test_weights_can_be_read_by_whom_their_folder_can(tmp_path):
    # pytest's folders are private.
    tmp_path.chmod(0o755)
    save_backbone(random_backbone(CONFIGS["tied"]), tmp_path)
    assert (tmp_path / "model.safetensors").stat().st_mode & 0o777 == 0o644


def test_constants_of_old_checkpoints_and_a_repeated_tied_head_are_ignored(tmp_path):
    backbone = random_backbone(CONFIGS["tied"])
    save_backbone(backbone, tmp_path)

    def add(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()

    edit_tensors(tmp_path, add)
    assert_same_weights(load_backbone(tmp_path).weights, backbone.weights)


K_PROJ = "model.layers.1.self_attn.k_proj.weight"


def test_a_missing_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.pop(K_PROJ))
    with pytest.raises(BackboneError, match=f"{K_PROJ} is missing"):
        load_backbone(folder)


def test_a_missing_head_is_named_where_it_is_not_tied(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises(BackboneError, match="lm_head.weight is missing"):
        load_backbone(folder)


def table(tensors):
    return tensors["model.embed_tokens.weight"]


@pytest.mark.parametrize(
    ("values", "head", "tied", "says"),
    [
        ({"tie_word_embeddings": True}, "equal", True, None),
        ({"tie_word_embeddings": True}, "absent", True, None),
        ({"tie_word_embeddings": None}, "other", False, None),
        ({"tie_word_embeddings": False}, "other", False, None),
        ({"tie_word_embeddings": False}, "equal", False, None),
        (
            {"tie_word_embeddings": True},
            "other",
            False,
            "tie_word_embeddings=true, but lm_head.weight differs from model.embed_tokens.weight; "
            "the head is not the embedding",
        ),
        (
            {"tie_word_embeddings": None},
            "absent",
            True,
            "no tie_word_embeddings, but there is no lm_head.weight; the head is the embedding",
        ),
        (
            {"tie_word_embeddings": False, "text_config": {"tie_word_embeddings": True}},
            "absent",
            True,
            "tie_word_embeddings=false and text_config.tie_word_embeddings=true, but there is no "
            "lm_head.weight; the head is the embedding",
        ),
        (
            {"tie_word_embeddings": True, "text_config": {"tie_word_embeddings": False}},
            "equal",
            True,
            "text_config.tie_word_embeddings=false, but lm_head.weight equals "
            "model.embed_tokens.weight; the head is the embedding",
        ),
        (
            {"tie_word_embeddings": True},
            "quantised",
            False,
            "but lm_head.weight differs from model.embed_tokens.weight",
        ),
    ],
)
def test_the_weights_decide_whether_the_head_is_the_embedding(
    values, head, tied, says, folder, caplog
):
    heads = {
        "absent": lambda tensors: {},
        "equal": lambda tensors: {"lm_head.weight": table(tensors).copy()},
        "other": lambda tensors: {"lm_head.weight": table(tensors)[::-1].copy()},
        "quantised": lambda tensors: {
            "lm_head.weight": np.ones(table(tensors).shape, np.int8),
            "lm_head.SCB": np.ones(len(table(tensors)), np.float32),
        },
    }
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    edit_tensors(folder, lambda tensors: tensors.update(heads[head](tensors)))
    edit_config(folder, **values)
    if head == "quantised":
        edit_config(folder, quantization_config={"quant_method": "bitsandbytes"})
    for _ in range(2):
        assert BackboneConfig.from_folder(folder).tie_word_embeddings is tied
    assert ("lm_head" in load_backbone(folder).weights) is not tied
    messages = [record.getMessage() for record in caplog.records]
    assert [f"{folder / 'config.json'}: " in each for each in messages] == [True] * bool(says)
    assert says is None or says in messages[0]


def test_a_head_that_is_written_anew_is_compared_anew(folder):
    edit_config(folder, tie_word_embeddings=True)
    assert not BackboneConfig.from_folder(folder).tie_word_embeddings
    edit_tensors(folder, lambda tensors: tensors.update({"lm_head.weight": table(tensors).copy()}))
    assert BackboneConfig.from_folder(folder).tie_word_embeddings


@pytest.mark.long
def test_a_cached_backbone_says_what_its_head_is(folder, tmp_path, caplog):
    edit_config(folder, tie_word_embeddings=True)
    plain = load_backbone(folder).weights
    loaded = load_backbone(folder, backbone_format="int8", cache=tmp_path / "cache")
    (cached,) = (tmp_path / "cache").glob("*-int8-*/config.json")
    assert json.loads(cached.read_text())["tie_word_embeddings"] is False
    assert_same_weights(loaded.weights["lm_head"], plain["lm_head"])
    assert len(caplog.records) == 1


def test_settings_that_are_no_booleans_are_refused(folder):
    for key in ("tie_word_embeddings", "attention_bias", "mlp_bias", "use_sliding_window"):
        edit_config(folder, **{key: "false"})
        with pytest.raises(BackboneError, match=f"{key} should be true or false, found 'false'"):
            BackboneConfig.from_folder(folder)
        edit_config(folder, **{key: None})
        BackboneConfig.from_folder(folder)


def test_an_extra_tensor_is_named(folder):
    extra = {"model.layers.3.extra.weight": np.ones(3, np.float32)}
    edit_tensors(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(BackboneError, match="model.layers.3.extra.weight"):
        load_backbone(folder)


def test_layers_beyond_those_of_the_config_are_extra(folder):
    edit_config(folder, num_hidden_layers=2)
    with pytest.raises(BackboneError, match=r"model\.layers\.2\..* and \d+ more"):
        load_backbone(folder)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder):
    edit_tensors(folder, lambda t: t.update({K_PROJ: np.ones((16, 12), np.float32)}))
    with pytest.raises(BackboneError, match=rf"{K_PROJ} has shape \[16, 12\].*\[16, 16\]"):
        load_backbone(folder)


def test_a_transposed_tensor_is_misshapen(folder):
    name = "model.layers.0.mlp.up_proj.weight"
    edit_tensors(folder, lambda t: t.update({name: np.ascontiguousarray(t[name].T)}))
    with pytest.raises(BackboneError, match=name):
        load_backbone(folder)


@pytest.mark.parametrize("kept", [0, 4, 100, -1])
def test_a_truncated_file_is_named(folder, kept):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BackboneError, match="model.safetensors: .*truncated"):
        load_backbone(folder)


def test_a_truncated_shard_is_named(folder):
    names = shard(folder, 2)
    path = folder / names[1]
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(BackboneError, match=f"{names[1]}: .*truncated"):
        load_backbone(folder)


def test_a_missing_shard_is_named(folder):
    names = shard(folder, 3)
    (folder / names[1]).unlink()
    with pytest.raises(BackboneError, match=f"index.json: shard {names[1]} is missing"):
        load_backbone(folder)


@pytest.mark.parametrize("content", ["{not json", "{}", "[]"])
def test_a_broken_index_is_named(folder, content):
    shard(folder, 2)
    (folder / "model.safetensors.index.json").write_text(content)
    with pytest.raises(BackboneError, match="model.safetensors.index.json"):
        load_backbone(folder)


def test_a_folder_without_config_is_named(folder):
    (folder / "config.json").unlink()
    with pytest.raises(BackboneError, match=f"{folder}/config.json: not found"):
        load_backbone(folder)


def test_an_unknown_architecture_is_named(folder):
    edit_config(folder, architectures=["FalconForCausalLM"])
    with pytest.raises(BackboneError, match="'FalconForCausalLM'; known: LlamaForCausalLM"):
        load_backbone(folder)


def test_pickled_weights_are_never_read(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(BackboneError, match="only safetensors"):
        load_backbone(folder)


# 14 layers of 5 MB in bfloat16 and an embedding of 4 MB twice: 74 MB.
LARGE = BackboneConfig("LlamaForCausalLM", 4096, 512, 1024, 14, 8, 4, 64)

# Measures anonymous memory only: pages of the mapped file belong to the page cache.
LOAD_AND_WATCH = """
import sys, threading, time
import jax
from jaxmux.models import load_backbone

def anonymous():
    with open("/proc/self/status") as status:
        return next(int(l.split()[1]) for l in status if l.startswith("RssAnon")) * 1024

jax.numpy.ones(1).astype("bfloat16").block_until_ready()
before = peak = anonymous()
done = threading.Event()

def watch():
    global peak
    while not done.is_set():
        peak = max(peak, anonymous())
        time.sleep(0.002)

watcher = threading.Thread(target=watch)
watcher.start()
weights = load_backbone(sys.argv[1], sys.argv[2]).weights
jax.block_until_ready(weights)
done.set()
watcher.join()
sizes = [x.nbytes for x in jax.tree.leaves(weights)]
print(peak - before, sum(sizes), max(sizes))
"""


@pytest.fixture(scope="module")
def large_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("large")
    save_backbone(random_backbone(LARGE, jnp.bfloat16), folder)
    return folder


@pytest.mark.long
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("dtype", [pytest.param("bfloat16", marks=pytest.mark.slow), "float32"])
def test_loading_needs_the_model_and_one_stacked_parameter(large_folder, dtype):
    found = subprocess.run(
        [sys.executable, "-P", "-c", LOAD_AND_WATCH, str(large_folder), dtype],
        capture_output=True,
        text=True,
        check=True,
        # Freed blocks below this size stay with the process. By default glibc lets the limit grow
        # to 32 MB, less than a parameter of a real model but more than one of this model.
        # Programs are optimised, because they run for longer than they are compiled.
        env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536", "XLA_FLAGS": ""},
    )
    growth, model, largest = map(int, found.stdout.split()[-3:])
    # One layer's tensor while it is loaded, and overhead of the allocator and the threads.
    slack = 10e6
    assert model > 2 * (largest + slack)
    assert growth < model + largest + slack, f"{growth / 1e6:.0f} MB for {model / 1e6:.0f} MB"


def test_sizes_are_those_of_the_backbone():
    config = BackboneConfig("LlamaForCausalLM", **(SIZES | {"head_dim": 5}))
    sizes = {m.split(".")[-1]: linear_sizes(config, m) for m in MODULES}
    assert sizes == {
        "q_proj": (16, 20),
        "k_proj": (16, 10),
        "v_proj": (16, 10),
        "o_proj": (20, 16),
        "gate_proj": (16, 24),
        "up_proj": (16, 24),
        "down_proj": (24, 16),
    }


@pytest.fixture
def wide_folder(tmp_path) -> Path:
    """A backbone whose linears have widths that every format can store, and few shapes."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 16}
    config = dataclasses.replace(CONFIGS["llama"], **sizes, num_heads=4, num_kv_heads=4)
    save_backbone(random_backbone(config), tmp_path)
    return tmp_path


every_format = pytest.mark.parametrize(
    "backbone_format",
    [
        pytest.param(name, marks=() if name == "nf4" else pytest.mark.slow)
        for name in BACKBONE_FORMATS
    ],
)


def linears(backbone: Backbone) -> dict[str, FrozenWeight]:
    layers = backbone.weights["layers"]
    return {n: own["kernel"] for block in ("self_attn", "mlp") for n, own in layers[block].items()}


@pytest.mark.long
@every_format
def test_linears_are_stored_in_the_format_asked_for(wide_folder, backbone_format, tmp_path):
    plain = load_backbone(wide_folder)
    backbone = load_backbone(wide_folder, backbone_format=backbone_format)
    assert backbone.config.backbone_format == backbone_format
    assert backbone.fingerprint == plain.fingerprint
    assert_same_weights(backbone.weights | {"layers": None}, plain.weights | {"layers": None})
    encoded = jax.jit(FrozenWeight.encoded, static_argnums=1)
    wanted = {
        name: encoded(weight.values, backbone_format) for name, weight in linears(plain).items()
    }
    assert_same_weights(linears(backbone), wanted)
    abstract = abstract_weights(backbone.config, jnp.float32)
    assert jax.tree.map(jnp.shape, backbone.weights) == jax.tree.map(jnp.shape, abstract)

    # What reads tensors on the host sees the values with which the devices compute.
    base = checkpoint_tensors(wide_folder, np.dtype(np.float32), backbone_format)
    decoded = np.asarray(jax.jit(FrozenWeight.decoded)(wanted["up_proj"]))[1]
    np.testing.assert_array_equal(base("model.layers.1.mlp.up_proj.weight"), decoded.T)
    name = "model.embed_tokens.weight"
    np.testing.assert_array_equal(base(name), plain.weights["embed_tokens"]["weight"])

    save_backbone(backbone, tmp_path / "saved")
    saved = linears(load_backbone(tmp_path / "saved"))
    np.testing.assert_array_equal(saved["up_proj"].values[1], decoded)


@pytest.mark.long
@every_format
def test_a_random_backbone_in_a_format_decodes_to_normal_weights(backbone_format):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 16}
    sizes |= {"num_heads": 4, "num_kv_heads": 4, "backbone_format": backbone_format}
    for weight in linears(Backbone.random(dataclasses.replace(CONFIGS["llama"], **sizes))).values():
        assert weight.format == backbone_format
        decoded = np.asarray(jax.jit(FrozenWeight.decoded)(weight))
        assert 0.019 < np.std(decoded) < 0.021
        assert np.any(decoded[0] != decoded[1])


def test_a_linear_that_a_format_cannot_store_is_named(tmp_path):
    config = dataclasses.replace(CONFIGS["llama"], intermediate_size=23)
    save_backbone(random_backbone(config), tmp_path)
    with pytest.raises(BackboneError, match="down_proj: .* 'nf4'; its rows have to be a multiple"):
        load_backbone(tmp_path, backbone_format="nf4")
