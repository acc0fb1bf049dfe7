"""Adapters written as Hugging Face PEFT folders read back the same; other folders are refused."""

import dataclasses
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from jaxmux.peft import (
    AdapterError,
    Factors,
    LoRA,
    export_adapter,
    import_adapter,
    initial_adapter,
    resolve_targets,
)

SPECS = {
    "all linears": LoRA(rank=4, alpha=8.0, dropout=0.1),
    "two names": LoRA(rank=3, alpha=7.5, target_modules=("q_proj", "v_proj")),
    "one layer by name": LoRA(rank=2, alpha=4.0, target_modules=("layers.1.mlp.up_proj",)),
    "expression": LoRA(rank=2, alpha=16.0, target_modules=r"model\.layers\.[02]\..*\.o_proj"),
    "rsLoRA": LoRA(rank=4, alpha=8.0, rslora=True),
}
Q = "base_model.model.model.layers.1.self_attn.q_proj"


def trained(spec: LoRA, config):
    """Random factors, B too; zero in layers outside the targets."""
    targets = resolve_targets(spec.target_modules, config)
    rng = np.random.default_rng(0)
    adapter = {}
    for module, (a, b) in initial_adapter(spec, targets, config, 0).items():
        b = np.where(targets[module][:, None, None], rng.standard_normal(b.shape), b)
        adapter[module] = Factors(a, b.astype(np.float32))
    return adapter


def deltas(adapter, scale):
    """What the adapter adds to each frozen weight, [L, k, n]."""
    return {module: scale * np.float64(f.a) @ np.float64(f.b) for module, f in adapter.items()}


@pytest.fixture
def folder(tmp_path, config):
    spec = SPECS["all linears"]
    export_adapter(tmp_path, trained(spec, config), spec, config, "base")
    return tmp_path


def settings_of(folder) -> dict:
    return json.loads((folder / "adapter_config.json").read_text())


def edit_settings(folder, **values) -> None:
    (folder / "adapter_config.json").write_text(json.dumps(settings_of(folder) | values))


def edit_tensors(folder, change) -> None:
    tensors = load_file(folder / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, folder / "adapter_model.safetensors")


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_an_exported_adapter_reads_back_the_same(spec, config, tmp_path):
    adapter = trained(spec, config)
    export_adapter(tmp_path, adapter, spec, config, "base")
    found_spec, found = import_adapter(tmp_path, config)
    assert (found_spec.rank, found_spec.alpha, found_spec.dropout, found_spec.rslora) == (
        spec.rank,
        spec.alpha,
        spec.dropout,
        spec.rslora,
    )
    assert found_spec.scale == spec.scale
    assert found.keys() == adapter.keys()
    for module in adapter:
        for one, other in zip(found[module], adapter[module], strict=True):
            assert one.dtype == np.float32
            np.testing.assert_array_equal(one, other)


def test_an_export_removes_what_a_killed_one_left(folder, config):
    (folder / ".partial").mkdir()
    (folder / ".partial" / ".tmpA1b2C3").write_bytes(bytes(10))
    spec = SPECS["all linears"]
    export_adapter(folder, trained(spec, config), spec, config, "base")
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_tensors_have_pefts_names_and_layouts_and_no_others(spec, config, tmp_path):
    adapter = trained(spec, config)
    tmp_path.chmod(0o755)
    export_adapter(tmp_path, adapter, spec, config, "base")
    # Whoever can read the folder can load the adapter.
    assert {path.stat().st_mode & 0o777 for path in tmp_path.iterdir()} == {0o644}
    expected = {}
    for module, mask in resolve_targets(spec.target_modules, config).items():
        for layer in np.flatnonzero(mask):
            name = f"base_model.model.model.layers.{layer}.{module}"
            expected[f"{name}.lora_A.weight"] = adapter[module].a[layer].T
            expected[f"{name}.lora_B.weight"] = adapter[module].b[layer].T
    found = load_file(tmp_path / "adapter_model.safetensors")
    assert found.keys() == expected.keys()
    for name, wanted in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], wanted, err_msg=name)


def test_config_has_every_key_that_loaders_ask_for(folder):
    settings = settings_of(folder)
    expected = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "base",
        "r": 4,
        "lora_alpha": 8,
        "lora_dropout": 0.1,
        "bias": "none",
        "use_rslora": False,
        "rank_pattern": {},
        "alpha_pattern": {},
        "inference_mode": True,
    }
    assert {key: settings[key] for key in expected} == expected
    names = "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split()
    assert sorted(settings["target_modules"]) == sorted(names)


@pytest.mark.parametrize(
    ("expression", "names"),
    [
        (
            SPECS["expression"].target_modules,
            [f"model.layers.{i}.self_attn.o_proj" for i in (0, 2)],
        ),
        # Both match modules that are no linears, with which PEFT refuses to load the adapter.
        (".*self_attn.*", ["k_proj", "o_proj", "q_proj", "v_proj"]),
        (
            r"model\.layers\.[1]\.mlp.*",
            [f"model.layers.1.mlp.{name}_proj" for name in ("down", "gate", "up")],
        ),
    ],
)
def test_an_expression_is_recorded_as_the_names_of_its_linears(expression, names, config, tmp_path):
    spec = LoRA(rank=2, alpha=16.0, target_modules=expression)
    export_adapter(tmp_path, trained(spec, config), spec, config, "base")
    assert settings_of(tmp_path)["target_modules"] == names
    assert_same_targets(import_adapter(tmp_path, config)[0], spec, config)


def test_a_single_name_chooses_the_same_linears_as_a_list(config):
    for name in ("q_proj", "self_attn.q_proj"):
        assert_same_targets(LoRA(target_modules=name), LoRA(target_modules=(name,)), config)


def assert_same_targets(one: LoRA, other: LoRA, config) -> None:
    found, wanted = (resolve_targets(s.target_modules, config) for s in (one, other))
    assert found.keys() == wanted.keys()
    for module, mask in wanted.items():
        np.testing.assert_array_equal(found[module], mask)


def test_all_linear_in_a_list_is_never_written_as_a_module_name(config, tmp_path):
    """PEFT knows "all-linear" as a string alone; a list that holds it fits no module there."""
    try:
        spec = LoRA(rank=2, target_modules=("all-linear",))
        export_adapter(tmp_path, trained(spec, config), spec, config, "base")
    except ValueError:
        return
    assert "all-linear" not in settings_of(tmp_path)["target_modules"]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_serving_mode_folds_the_scale_into_b(spec, config, tmp_path):
    adapter = trained(spec, config)
    export_adapter(tmp_path, adapter, spec, config, "base", serving=True)
    settings = settings_of(tmp_path)
    assert settings["lora_alpha"] == settings["r"] == spec.rank
    assert not settings["use_rslora"]
    assert settings["rank_pattern"] == settings["alpha_pattern"] == {}
    served_spec, served = import_adapter(tmp_path, config)
    assert served_spec.scale == 1
    wanted = deltas(adapter, spec.scale)
    for module, found in deltas(served, 1.0).items():
        np.testing.assert_allclose(found, wanted[module], rtol=1e-5, atol=1e-6)


def test_half_precision_tensors_are_read_as_float32(folder, config):
    whole = import_adapter(folder, config)[1]
    edit_tensors(folder, lambda t: t.update({k: v.astype(np.float16) for k, v in t.items()}))
    for module, factors in import_adapter(folder, config)[1].items():
        for found, wanted in zip(factors, whole[module], strict=True):
            assert found.dtype == np.float32
            np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"peft_type": "BOFT"}, "peft_type='BOFT' is not supported; BOFT is left out: its b"),
        ({"peft_type": "OFT"}, "OFT is left out: its rotations"),
        ({"peft_type": "PREFIX_TUNING"}, "prefix tuning is left out: it trains worse"),
        ({"peft_type": "LORAX"}, "peft_type='LORAX' is not supported; known kinds: lora, "),
        ({"bias": "all"}, "bias='all'"),
        ({"use_qalora": True}, "use_qalora=True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa': .* convert"),
        ({"init_lora_weights": "corda"}, "init_lora_weights='corda': .* convert"),
        (
            {"rank_pattern": {"q_proj": 0}},
            "rank_pattern should be a mapping from names to an int",
        ),
        ({"alpha_pattern": {"q_proj": "8"}}, "alpha_pattern should be a mapping from names to a "),
        (
            {"alpha_pattern": {"(q_proj": 8}},
            r"alpha_pattern: '\(q_proj' is no valid regular",
        ),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save is left out: it would be a whole copy"),
        ({"init_lora_weights": "loftq"}, "init_lora_weights='loftq'; LoftQ is left out: it quant"),
        ({"use_rslora": "no"}, "rslora should be True or False, found 'no'"),
        ({"r": 0}, "rank should be an integer"),
        ({"target_modules": ["query"]}, "'query' matches no linear"),
        ({"target_modules": None}, "target_modules is empty"),
    ],
    ids=str,
)
def test_settings_that_are_not_supported_are_named(values, problem, folder, config):
    edit_settings(folder, **values)
    with pytest.raises(AdapterError, match=f"adapter_config.json: .*{problem}"):
        import_adapter(folder, config)


@pytest.mark.parametrize("key", ["r", "lora_alpha"])
def test_a_missing_setting_is_named(key, folder, config):
    settings = settings_of(folder)
    del settings[key]
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    with pytest.raises(AdapterError, match=f"adapter_config.json: .*'{key}'"):
        import_adapter(folder, config)


def test_a_missing_tensor_is_named(folder, config):
    edit_tensors(folder, lambda t: t.pop(f"{Q}.lora_B.weight"))
    with pytest.raises(AdapterError, match=f"{Q}.lora_B.weight is missing"):
        import_adapter(folder, config)


def test_an_extra_tensor_is_named(folder, config):
    extra = {"base_model.model.lm_head.lora_A.weight": np.ones((4, 16), np.float32)}
    edit_tensors(folder, lambda t: t.update(extra))
    with pytest.raises(AdapterError, match="lm_head.lora_A.weight belongs to no target module"):
        import_adapter(folder, config)


def test_a_misshapen_tensor_is_named_with_both_shapes(folder, config):
    edit_tensors(folder, lambda t: t.update({f"{Q}.lora_A.weight": np.ones((4, 15), np.float32)}))
    with pytest.raises(AdapterError, match=rf"{Q}.lora_A.weight has shape \[4, 15\], .*\[4, 16\]"):
        import_adapter(folder, config)


def test_an_adapter_of_another_backbone_is_refused(folder, config):
    deeper = dataclasses.replace(config, num_layers=4)
    with pytest.raises(AdapterError, match=r"layers\.3\.self_attn\.q_proj.* is missing"):
        import_adapter(folder, deeper)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_missing_file_is_named(name, folder, config):
    (folder / name).unlink()
    with pytest.raises(AdapterError, match=name):
        import_adapter(folder, config)


def test_a_pickle_is_not_read_and_named(folder, config):
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(AdapterError, match=r"not found; adapter_model.bin may run code when it is"):
        import_adapter(folder, config)


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_truncated_file_is_refused(name, folder, config):
    path = folder / name
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(AdapterError, match=f"{folder}.*cannot be read"):
        import_adapter(folder, config)


def test_a_config_that_is_no_object_is_refused(folder, config):
    (folder / "adapter_config.json").write_text("[]")
    with pytest.raises(AdapterError, match="adapter_config.json|cannot be read"):
        import_adapter(folder, config)


def test_a_rank_beyond_memory_is_refused_before_arrays_are_made(folder, config):
    edit_settings(folder, r=10**12)
    with pytest.raises(AdapterError, match="rank is 1000000000000, but no linear .* is wider"):
        import_adapter(folder, config)


def test_modules_that_are_no_list_are_refused(folder, config):
    edit_settings(folder, target_modules=5)
    with pytest.raises(AdapterError, match="adapter_config.json: "):
        import_adapter(folder, config)


def test_a_deeply_nested_config_is_refused(folder, config):
    (folder / "adapter_config.json").write_text('{"r": ' + "[" * 100_000)
    with pytest.raises(AdapterError, match="cannot be read"):
        import_adapter(folder, config)


def test_tensors_that_numpy_cannot_hold_are_named(folder, config):
    header = {"x": {"dtype": "F8_E4M3", "shape": [4], "data_offsets": [0, 4]}}
    text = json.dumps(header).encode()
    data = len(text).to_bytes(8, "little") + text + bytes(4)
    (folder / "adapter_model.safetensors").write_bytes(data)
    with pytest.raises(AdapterError, match="tensor x is F8_E4M3; expected BF16, F16, F32, F64"):
        import_adapter(folder, config)


def warnings_of(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_settings_that_are_not_known_are_told_once_by_name(folder, config, caplog):
    edit_settings(folder, rank_schedule=[1, 2], lora_alfa=3, from_the_future=None, peft_version="1")
    for _ in range(2):
        import_adapter(folder, config)
    (message,) = warnings_of(caplog)
    assert message.startswith(f"{folder / 'adapter_config.json'}: jaxmux does not know, and ignor")
    assert "'lora_alfa', 'rank_schedule';" in message
    assert "from_the_future" not in message and "peft_version" not in message


@pytest.mark.parametrize("key", ["arrow_config", "kasa_config", "monteclora_config", "use_bdlora"])
def test_settings_that_change_what_is_computed_are_refused(key, folder, config):
    edit_settings(folder, **{key: {"a": 1}})
    with pytest.raises(AdapterError, match=f"adapter_config.json: {key}=.* is not supported"):
        import_adapter(folder, config)


# By case: what adapter_config.json and the card name, the backbone, whether the fingerprint of the
# weights says that it is the same, and whether there is a warning.
BASES = {
    "the same path": ("/models/base", None, "/models/base", False, False),
    "the same name elsewhere": ("/models/Base", None, "/data/base", False, False),
    "its name on the hub": ("org/base", None, "/models/base", False, False),
    "a copy of another organisation": ("org/base", "org/base", "other/base", False, False),
    "the cache of the hub": ("org/base", None, "/c/models--org--base/snapshots/0ab", False, False),
    "nothing": (None, None, "/models/base", False, False),
    "another path": ("/models/another", None, "/models/base", False, True),
    "another name": ("org/another", None, "/models/base", False, True),
    "another name on the card": ("org/base", "org/another", "/models/base", False, True),
    "a list on the card": (None, ["org/another"], "/models/base", False, True),
    "a name without an organisation": ("another", None, "/models/base", False, True),
    "a backbone that was moved": ("/models/another", "another", "/models/base", True, False),
    "another name, though it is the same": ("org/another", None, "/models/base", True, True),
}


@pytest.mark.parametrize("case", BASES)
def test_an_adapter_that_names_another_base_model_is_told_once(case, folder, config, caplog):
    named, on_card, backbone, is_same, warns = BASES[case]
    edit_settings(folder, base_model_name_or_path=named)
    card = f"---\nbase_model: {json.dumps(on_card)}\n---\n# a\n" if on_card else "# a\n"
    (folder / "README.md").write_text(card)
    weights = folder / "adapter_model.safetensors"
    save_file(load_file(weights), weights, {"jaxmux.base_fingerprint": "1"} if is_same else None)
    for _ in range(2):
        import_adapter(folder, config, "1", base_model=backbone)
    messages = warnings_of(caplog)
    assert len(messages) == warns
    if warns:
        assert "another' and the backbone is" in messages[0].replace("',", "'")
        assert messages[0].endswith("on the model that it was trained on")


def test_the_public_name_of_the_backbone_is_recorded(config, tmp_path):
    spec, backbone = SPECS["two names"], tmp_path / "models--org--base" / "snapshots" / "0ab"
    for base, recorded in ((str(backbone), "org/base"), (str(tmp_path), "org/noted")):
        (tmp_path / "config.json").write_text('{"_name_or_path": "org/noted"}')
        export_adapter(tmp_path / "a", trained(spec, config), spec, config, base)
        assert settings_of(tmp_path / "a")["base_model_name_or_path"] == recorded
        card = (tmp_path / "a" / "README.md").read_text()
        assert f'base_model: "{recorded}"' in card and f'name = "{recorded}"' in card
