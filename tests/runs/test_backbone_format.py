"""Runs whose backbone stores its linears in a format of its own."""

import dataclasses
import shutil

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file

from jaxmux import RunDirectoryError
from jaxmux.models import Backbone, BackboneError, load_backbone, save_backbone


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("runs") / "int8"


@pytest.fixture(scope="module")
def task(make_task):
    return make_task("one", steps=3)


@pytest.fixture(scope="module")
def summary(train, run_dir, task):
    return train(run_dir, task, backbone_format="int8")


def test_a_run_trains_what_it_trains_on_the_decoded_backbone(
    summary, run_dir, train, task, backbone, tmp_path
):
    assert summary.tasks["one"]["status"] == "succeeded"
    decoded = tmp_path / "decoded"
    shutil.copytree(backbone, decoded)
    save_backbone(load_backbone(backbone, backbone_format="int8"), decoded)
    train(tmp_path / "run", task, backbone=decoded)
    train(tmp_path / "plain", task)
    found, wanted, plain = (
        load_file(folder / "adapters" / "one" / "adapter_model.safetensors")
        for folder in (run_dir, tmp_path / "run", tmp_path / "plain")
    )
    weights = run_dir / "adapters" / "one" / "adapter_model.safetensors"
    with safe_open(weights, framework="numpy") as file:
        assert file.metadata()["jaxmux.base_format"] == "int8"
    for name, tensor in found.items():
        np.testing.assert_array_equal(tensor, wanted[name])
    assert any(np.any(tensor != plain[name]) for name, tensor in found.items())


def test_a_run_directory_belongs_to_a_format(summary, run_dir, train, task):
    with pytest.raises(RunDirectoryError, match="backbone_format"):
        train(run_dir, task)
    with pytest.raises(RunDirectoryError, match="backbone_format"):
        train(run_dir, task, backbone_format="nf4")


def test_a_linear_that_the_format_cannot_store_is_named(train, task, backbone, tmp_path):
    folder = shutil.copytree(backbone, tmp_path / "odd")
    config = dataclasses.replace(load_backbone(folder).config, intermediate_size=47)
    save_backbone(Backbone.random(config), folder)
    with pytest.raises(BackboneError, match="down_proj: .* multiple of 2"):
        train(tmp_path / "run", task, backbone=folder, backbone_format="nf4")
