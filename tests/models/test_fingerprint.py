"""A backbone is recognised by its configuration and its weights, not by its files."""

import json
import os
import shutil

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux.models import Backbone, BackboneConfig, BackboneError, may_be_the_same, save_backbone
from jaxmux.models import fingerprint as fingerprint_module
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


def flip_byte(path, place: float) -> None:
    """Changes one byte in place; the size and the time of modification stay the same."""
    stat, offset = path.stat(), int(place * (path.stat().st_size - 1))
    with path.open("r+b") as file:
        file.seek(offset)
        (byte,) = file.read(1)
        file.seek(offset)
        file.write(bytes([byte ^ 1]))
    os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))


@pytest.mark.parametrize("place", [0.3, 0.4567, 0.61, 0.999, 1.0])
def test_every_byte_of_the_weights_counts(place, original, copy):
    flip_byte(copy / "model.safetensors", place)
    assert backbone_fingerprint(copy) != backbone_fingerprint(original)


@pytest.fixture
def keeps_digests(tmp_path, monkeypatch):
    """Digests of small files are kept, too, in a cache of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(fingerprint_module, "_LEAST_KEPT_BYTES", 0)


@pytest.fixture
def settled(keeps_digests, monkeypatch):
    """Files count as settled as soon as they are written."""
    monkeypatch.setattr(fingerprint_module, "_SETTLED_NS", -1)


@pytest.fixture
def reads(monkeypatch) -> list:
    """Has an entry for every read of the weights."""
    found, preadv = [], os.preadv
    monkeypatch.setattr(
        fingerprint_module.os, "preadv", lambda *given: found.append(1) or preadv(*given)
    )
    return found


def test_an_unchanged_file_is_read_once(original, copy, settled, reads):
    expected = backbone_fingerprint(original)
    assert backbone_fingerprint(copy) == expected
    reads.clear()
    assert backbone_fingerprint(copy) == expected and not reads


def test_a_change_that_keeps_size_and_modification_time_is_noticed(copy, settled):
    before = backbone_fingerprint(copy)
    flip_byte(copy / "model.safetensors", 0.5)
    assert backbone_fingerprint(copy) != before


def test_digests_of_a_file_that_has_just_been_written_are_not_kept(copy, keeps_digests, reads):
    """Within the same tick of the clock, the file could change once more."""
    (copy / "model.safetensors").touch()
    backbone_fingerprint(copy)
    reads.clear()
    backbone_fingerprint(copy)
    assert reads


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"file": [], "tensors": {"a": 1}}'])
def test_damaged_digests_are_computed_again(text, copy, settled, tmp_path):
    expected = backbone_fingerprint(copy)
    (kept,) = (tmp_path / "cache" / "jaxmux" / "digests").iterdir()
    kept.write_text(text)
    assert backbone_fingerprint(copy) == expected


def test_a_cache_that_cannot_be_written_changes_nothing(copy, settled, tmp_path):
    expected = backbone_fingerprint(copy)
    shutil.rmtree(tmp_path / "cache")
    (tmp_path / "cache").write_text("a file")
    assert backbone_fingerprint(copy) == expected


def test_fingerprints_of_earlier_versions_are_not_compared():
    old, new = "0123456789abcdef", "f" * 32
    assert may_be_the_same(old, new) and may_be_the_same(new, new)
    assert not may_be_the_same(new, "e" * 32) and not may_be_the_same(old, "f" * 16)


def test_other_weights_of_the_same_shapes_change_it(original, tmp_path):
    save_backbone(Backbone.random(CONFIG, seed=2), tmp_path)
    assert backbone_fingerprint(tmp_path) != backbone_fingerprint(original)


@pytest.mark.long
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
