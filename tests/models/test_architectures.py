"""config.json of every supported architecture, in the spelling of transformers 4 and 5."""

import dataclasses
import json

import pytest

from jaxmux.models import BackboneConfig, BackboneError
from jaxmux.models.architectures import Llama3Rope, parse_config, to_hf_config

SIZES = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 172,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(architecture="LlamaForCausalLM", drop=(), **values) -> BackboneConfig:
    raw = {"architectures": [architecture]} | SIZES | values
    return parse_config({k: v for k, v in raw.items() if k not in drop}, "config.json")


def biases(c: BackboneConfig) -> tuple[bool, bool, bool]:
    return c.attention_bias, c.output_bias, c.mlp_bias


def test_sizes_are_read():
    c = parse(rms_norm_eps=1e-6, max_position_embeddings=99, tie_word_embeddings=True)
    assert (c.vocab_size, c.hidden_size, c.intermediate_size, c.num_layers) == (512, 64, 172, 3)
    assert (c.num_heads, c.num_kv_heads, c.head_dim) == (8, 2, 8)
    assert (c.query_size, c.kv_size) == (64, 16)
    assert (c.rms_norm_eps, c.max_position_embeddings, c.tie_word_embeddings) == (1e-6, 99, True)


def test_llama_2_has_as_many_key_heads_as_heads():
    assert parse(drop=["num_key_value_heads"]).num_kv_heads == 8


def test_head_size_may_differ_from_the_even_split():
    c = parse("Qwen3ForCausalLM", head_dim=32)
    assert (c.head_dim, c.query_size, c.kv_size) == (32, 256, 64)


@pytest.mark.parametrize(
    ("architecture", "values", "expected"),
    [
        ("LlamaForCausalLM", {}, (False, False, False)),
        ("LlamaForCausalLM", {"attention_bias": True}, (True, True, False)),
        ("LlamaForCausalLM", {"mlp_bias": True}, (False, False, True)),
        ("MistralForCausalLM", {"attention_bias": True}, (False, False, False)),
        ("Qwen2ForCausalLM", {}, (True, False, False)),
        ("Qwen3ForCausalLM", {}, (False, False, False)),
        ("Qwen3ForCausalLM", {"attention_bias": True}, (True, True, False)),
    ],
)
def test_biases_are_those_of_the_architecture(architecture, values, expected):
    assert biases(parse(architecture, **values)) == expected


@pytest.mark.parametrize("values", [{"head_dim": 15}, {"hidden_size": 24, "head_dim": None}])
def test_heads_of_an_odd_size_are_refused(values):
    with pytest.raises(BackboneError, match="has (15|3) dimensions .* should be even"):
        parse("Qwen3ForCausalLM", **values)


def test_only_qwen3_norms_queries_and_keys():
    names = ("LlamaForCausalLM", "MistralForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
    assert [parse(name).qk_norm for name in names] == [False, False, False, True]


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 5e5, "rope_scaling": LLAMA3},
        {"rope_theta": 5e5, "rope_scaling": {"type": "llama3"} | LLAMA3},
        {"rope_parameters": LLAMA3 | {"rope_theta": 5e5}, "dtype": "bfloat16"},
    ],
    ids=["transformers 4", "older still", "transformers 5"],
)
def test_llama3_rope_is_read_in_every_spelling(values):
    c = parse(**values)
    assert c.rope_theta == 5e5
    assert c.rope_scaling == Llama3Rope(8.0, 1.0, 4.0, 8192)


@pytest.mark.parametrize(
    "values",
    [
        {"rope_theta": 1e6},
        {"rope_theta": 1e6, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}},
    ],
)
def test_plain_rope_is_read_in_every_spelling(values):
    c = parse(**values)
    assert (c.rope_theta, c.rope_scaling) == (1e6, None)


def test_rope_theta_defaults_to_ten_thousand():
    assert parse().rope_theta == 10000.0


@pytest.mark.parametrize(
    ("architecture", "values", "window"),
    [
        ("MistralForCausalLM", {"sliding_window": 4096}, 4096),
        ("MistralForCausalLM", {"sliding_window": None}, None),
        ("LlamaForCausalLM", {}, None),
        ("Qwen2ForCausalLM", {"sliding_window": 128, "use_sliding_window": False}, None),
        (
            "Qwen2ForCausalLM",
            {"sliding_window": 128, "use_sliding_window": True, "max_window_layers": 0},
            128,
        ),
        ("LlamaForCausalLM", {"sliding_window": 128, "use_sliding_window": True}, None),
        (
            "Qwen3ForCausalLM",
            {
                "sliding_window": None,
                "use_sliding_window": False,
                "layer_types": ["full_attention"] * 3,
            },
            None,
        ),
    ],
)
def test_sliding_window_is_that_of_the_architecture(architecture, values, window):
    assert parse(architecture, **values).sliding_window == window


QWEN_WINDOW = {"sliding_window": 128, "use_sliding_window": True}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        ({"architectures": ["GPT2LMHeadModel"]}, "'GPT2LMHeadModel'; known: LlamaForCausalLM"),
        ({"architectures": None}, "unknown architecture"),
        ({"hidden_size": None}, "hidden_size should be a positive integer"),
        ({"vocab_size": "512"}, "vocab_size should be a positive integer, found '512'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads should be a positive integer"),
        ({"head_dim": "16"}, "head_dim should be a positive integer, found '16'"),
        ({"max_position_embeddings": 1e6}, "max_position_embeddings should be a positive integer"),
        ({"rms_norm_eps": "1e-5"}, "rms_norm_eps should be a positive number, found '1e-5'"),
        ({"rope_theta": 0}, "rope_theta should be a positive number, found 0"),
        ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta should be a positive number"),
        (
            {"rope_scaling": LLAMA3 | {"factor": "8"}},
            "factor of the rope type should be a positive",
        ),
        (
            {"architectures": ["MistralForCausalLM"], "sliding_window": "4096"},
            "sliding_window should be a positive integer",
        ),
        ({"num_key_value_heads": 3}, "num_attention_heads=8.*num_key_value_heads=3"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope type 'yarn'"),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope type 'linear'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "lacks low_freq_factor"),
        (
            {"architectures": ["Qwen2ForCausalLM"], "max_window_layers": 2} | QWEN_WINDOW,
            "max_window_layers",
        ),
        (
            {
                "architectures": ["Qwen2ForCausalLM"],
                "layer_types": ["full_attention", "sliding_attention"],
            }
            | QWEN_WINDOW,
            "layer_types",
        ),
    ],
)
def test_what_is_not_supported_is_named_with_the_file(values, problem):
    with pytest.raises(BackboneError, match=f"^there/config.json: .*{problem}"):
        parse_config({"architectures": ["LlamaForCausalLM"]} | SIZES | values, "there/config.json")


@pytest.mark.parametrize("missing", sorted(set(SIZES) - {"num_key_value_heads"}))
def test_a_missing_size_is_named(missing):
    with pytest.raises(BackboneError, match=missing):
        parse(drop=[missing])


def test_a_folder_without_config_is_refused(tmp_path):
    with pytest.raises(BackboneError, match="config.json: not found"):
        BackboneConfig.from_folder(tmp_path)


def test_a_config_that_is_not_json_is_refused(tmp_path):
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(BackboneError, match="config.json: not valid JSON"):
        BackboneConfig.from_folder(tmp_path)


ROUND_TRIPS = {
    "llama 3.1": ("LlamaForCausalLM", {"rope_scaling": LLAMA3, "rope_theta": 5e5}),
    "tied": ("LlamaForCausalLM", {"tie_word_embeddings": True}),
    "mistral": ("MistralForCausalLM", {"sliding_window": 64, "head_dim": 16}),
    "qwen2": ("Qwen2ForCausalLM", {}),
    "qwen2 window": ("Qwen2ForCausalLM", QWEN_WINDOW | {"max_window_layers": 0}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 32, "rope_theta": 1e6}),
}


@pytest.mark.parametrize(("architecture", "values"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_a_written_config_reads_back_the_same(architecture, values):
    c = parse(architecture, **values)
    raw = json.loads(json.dumps(to_hf_config(c, "bfloat16")))
    assert raw["dtype"] == "bfloat16"
    assert parse_config(raw, "config.json") == c


@pytest.mark.long
@pytest.mark.parametrize(("architecture", "values"), ROUND_TRIPS.values(), ids=ROUND_TRIPS)
def test_transformers_understands_a_written_config(architecture, values, tmp_path):
    from transformers import AutoConfig

    c = parse(architecture, **values)
    (tmp_path / "config.json").write_text(json.dumps(to_hf_config(c, "bfloat16")))
    theirs = AutoConfig.from_pretrained(tmp_path)
    assert theirs.architectures == [architecture]
    assert (theirs.num_attention_heads, theirs.num_key_value_heads) == (8, 2)
    assert (theirs.head_dim, theirs.rms_norm_eps) == (c.head_dim, c.rms_norm_eps)
    assert theirs.rope_parameters["rope_theta"] == c.rope_theta
    assert theirs.rope_parameters["rope_type"] == ("llama3" if c.rope_scaling else "default")
    assert theirs.tie_word_embeddings == c.tie_word_embeddings
    if c.sliding_window:
        assert theirs.sliding_window == c.sliding_window
        assert set(getattr(theirs, "layer_types", None) or ["sliding_attention"]) == {
            "sliding_attention"
        }
    theirs.save_pretrained(tmp_path / "rewritten")
    assert BackboneConfig.from_folder(tmp_path / "rewritten") == c


def test_configs_are_hashable_static_arguments():
    c = parse(rope_scaling=LLAMA3)
    assert hash(c) == hash(dataclasses.replace(c))
