"""Backbones that are loaded in parts, each device its own."""

import dataclasses
from collections import Counter, defaultdict

import jax
import numpy as np
import pytest

from jaxmux.models import Backbone, checkpoint_reader, load_backbone, save_backbone
from jaxmux.models.checkpoint_files import CheckpointTensors
from jaxmux.planner.devices import Replica
from jaxmux.sharding import (
    consecutive_parts,
    load_placed_backbone,
    place_backbone,
    random_placed_backbone,
    stage_meshes,
)

MESH = Replica.uniform(pp=2, tp=2, fsdp=2)


@pytest.fixture(scope="module", params=["tied", "untied"])
def folder(request, config, tmp_path_factory):
    folder = tmp_path_factory.mktemp("backbone")
    config = dataclasses.replace(
        config, tie_word_embeddings=request.param == "tied", vocab_size=104
    )
    save_backbone(Backbone.random(config, seed=9), folder)
    return folder


def places(config):
    homes = stage_meshes(MESH, jax.devices(), config)
    return consecutive_parts(MESH.stage_layers(config.num_layers)), homes


def test_a_folder_is_loaded_like_a_whole_backbone_that_is_divided(folder):
    whole = load_backbone(folder)
    expected = place_backbone(whole, *places(whole.config))
    found = load_placed_backbone(folder, "auto", *places(whole.config))
    assert jax.tree.structure(found.weights) == jax.tree.structure(expected.weights)
    for one, other in zip(*map(jax.tree.leaves, (found.weights, expected.weights)), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)


@pytest.mark.slow
@pytest.mark.parametrize("backbone_format", ["nf4", "float8"])
def test_linears_are_encoded_before_they_are_divided(config, tmp_path, backbone_format):
    sizes = dict(hidden_size=128, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=32)
    config = dataclasses.replace(config, **sizes, num_layers=2)
    save_backbone(Backbone.random(config, seed=9), tmp_path)
    whole = load_backbone(tmp_path, backbone_format=backbone_format)
    expected = place_backbone(whole, *places(whole.config))
    found = load_placed_backbone(tmp_path, "auto", *places(whole.config), backbone_format)
    assert jax.tree.structure(found.weights) == jax.tree.structure(expected.weights)
    for one, other in zip(*map(jax.tree.leaves, (found.weights, expected.weights)), strict=True):
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)
        np.testing.assert_array_equal(one, other)
    random = random_placed_backbone(whole.config, np.dtype("float32"), *places(whole.config))
    assert jax.tree.structure(random.weights) == jax.tree.structure(expected.weights)


def test_each_stage_reads_a_row_once_and_in_small_pieces(folder, monkeypatch):
    whole = load_backbone(folder)
    monkeypatch.setattr(checkpoint_reader, "_PIECE_BYTES", 512)
    read, indices = CheckpointTensors.read, defaultdict(Counter)

    def counted(self, name, rows=slice(None)):
        value = read(self, name, rows)
        indices[name].update(range(*rows.indices(self.shape(name)[0])))
        assert value.nbytes <= 512 + value.nbytes // len(value)
        return value

    monkeypatch.setattr(CheckpointTensors, "read", counted)
    load_placed_backbone(folder, "auto", *places(whole.config))
    # The embedding is on two stages if the head is tied to it.
    twice = {"model.embed_tokens.weight"} if whole.config.tie_word_embeddings else set()
    with CheckpointTensors(folder) as files:
        for name in files.names:
            times = 2 if name in twice else 1
            assert indices[name] == dict.fromkeys(range(files.shape(name)[0]), times), name


def test_a_random_backbone_is_made_in_parts(config):
    backbone = random_placed_backbone(config, np.dtype("float32"), *places(config))
    for weights, layers in zip(backbone.weights, MESH.stage_layers(config.num_layers), strict=True):
        values = weights["layers"]["mlp"]["up_proj"]["kernel"].values
        assert values.shape[0] == layers
        assert values.addressable_shards[0].data.size * 4 == values.size
        assert 0.015 < float(values.std()) < 0.025
    first, second = (np.asarray(jax.tree.leaves(w["layers"]["mlp"])[0]) for w in backbone.weights)
    assert not np.array_equal(first, second)
