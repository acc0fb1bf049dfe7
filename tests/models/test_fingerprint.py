"""A backbone is recognised by its configuration and its weights, not by its files."""

import json
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux.models import Backbone, BackboneConfig, BackboneError, save_backbone
from jaxmux.models.fingerprint import backbone_fingerprint

CONFIG = BackboneConfig("LlamaForCausalLM", 64, 32, 48, 2, 4, 2, 8)


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    folder = tmp_path_factory.mktemp("original")
    save_backbone(Backbone.random(CONFIG, seed=1), folder)
    return folder


@pytest.fixture
def copy(original, tmp_path):
    return shutil.copytree(original, tmp_path / "copy")


def change_weights(folder, change):
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def test_a_copy_has_the_same_fingerprint(original, copy):
    assert backbone_fingerprint(copy) == backbone_fingerprint(original)


def test_the_division_into_shards_does_not_matter(original, copy):
    tensors = load_file(copy / "model.safetensors")
    (copy / "model.safetensors").unlink()
    names = sorted(tensors)
    owner = {}
    for number, part in enumerate((names[::2], names[1::2])):
        file = f"model-{number}.safetensors"
        save_file({name: tensors[name] for name in part}, copy / file)
        owner |= dict.fromkeys(part, file)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": owner}))
    assert backbone_fingerprint(copy) == backbone_fingerprint(original)


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.1.mlp.up_proj.weight"])
def test_a_changed_tensor_changes_it(name, original, copy):
    change_weights(copy, lambda tensors: tensors[name].__imul__(np.float32(1.001)))
    assert backbone_fingerprint(copy) != backbone_fingerprint(original)


def test_other_weights_of_the_same_shapes_change_it(original, tmp_path):
    save_backbone(Backbone.random(CONFIG, seed=2), tmp_path)
    assert backbone_fingerprint(tmp_path) != backbone_fingerprint(original)


def test_another_dtype_changes_it(original, tmp_path):
    save_backbone(Backbone.random(CONFIG, seed=1, dtype=jax.numpy.bfloat16), tmp_path)
    assert backbone_fingerprint(tmp_path) != backbone_fingerprint(original)


def test_a_changed_setting_changes_it(original, copy):
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(settings | {"rms_norm_eps": 1e-3}))
    assert backbone_fingerprint(copy) != backbone_fingerprint(original)


@pytest.mark.parametrize("kept", [0, 7, 100, -100])
def test_a_truncated_file_is_named(kept, copy):
    path = copy / "model.safetensors"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(BackboneError, match=f"{path}: cannot be read as safetensors"):
        backbone_fingerprint(copy)


@pytest.mark.parametrize("text", ["[]", "3", "{", "\udcff"])
def test_a_damaged_configuration_is_named(text, copy):
    (copy / "config.json").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(BackboneError, match="config.json: "):
        backbone_fingerprint(copy)


def test_shards_of_another_folder_are_refused(copy):
    (copy / "model.safetensors").rename(copy.parent / "outside.safetensors")
    index = {"weight_map": {"model.norm.weight": "../outside.safetensors"}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(
        BackboneError, match="'../outside.safetensors' should be a file of the same"
    ):
        backbone_fingerprint(copy)
