"""Reads a backbone's configuration from a Hugging Face `config.json`, and checks it."""

import dataclasses
import json
import logging
import math
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .checkpoint_files import EMBEDDING_TENSOR, HEAD_TENSOR, CheckpointTensors, has_weights, shards
from .errors import BackboneError
from .quantised.linears import kept_linears, quantised_tensors
from .quantised.settings import Quantisation, quantisation_of

# The key of config.json that says whether the head and the embedding are one table.
_TIED = "tie_word_embeddings"
# Formats, besides dtypes, in which a backbone can store the linears of its layers.
BACKBONE_FORMATS = ("float8", "int8", "nf4")


# Paths of the linears that can carry an adapter, as Hugging Face names them within a layer. The
# dropout hash identifies a linear by its index in this tuple: append to it, never reorder it.
MODULES = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


@dataclasses.dataclass(frozen=True)
class Llama3Rope:
    """Frequency scaling of Llama 3.1 (`rope_type: llama3`); lengths in tokens."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position_embeddings: int


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """Sizes and options of a Llama-family decoder. `BackboneConfig.from_folder` reads them from a
    Hugging Face checkpoint folder; `Backbone.config` holds them.

    Attributes:
      architecture: Hugging Face class name: "LlamaForCausalLM", "MistralForCausalLM",
        "Qwen2ForCausalLM" or "Qwen3ForCausalLM".
      hidden_size: d, the width of the residual stream.
      intermediate_size: width of the gated MLP.
      num_layers: L, number of decoder layers.
      num_heads: number of query heads.
      num_kv_heads: number of key/value heads.
      rms_norm_eps: number added to the mean square in RMS norms.
      rope_theta: base of the rotary frequencies.
      rope_scaling: numbers of Llama 3.1's scaling of the rotary frequencies; None for no scaling.
      max_position_embeddings: longest sequence for which the model was trained, in tokens.
      sliding_window: a token attends to itself and the `sliding_window - 1` tokens before it; None
        for no limit.
      attention_bias: whether q_proj, k_proj and v_proj have biases.
      output_bias: whether o_proj has a bias.
      mlp_bias: whether gate_proj, up_proj and down_proj have biases.
      qk_norm: whether queries and keys have an RMSNorm over the head dimension (Qwen3).
      tie_word_embeddings: whether the language-model head is the transposed embedding. If the
        weights in a folder contradict its config.json, the weights decide.
      backbone_format: format of `number_formats` in which the weights of the layers' linears are
        stored, for example "int8". None means the format of the checkpoint: the dtype of the other
        weights, unless the checkpoint is quantised.
      quantisation: settings of a quantised checkpoint, from its config.json; None if the checkpoint
        is not quantised.
      kept: the linears of a quantised checkpoint that keep their stored format: for each, the name,
        as in `MODULES`, and the shapes, dtypes and format of the weight in one layer.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_scaling: Llama3Rope | None = None
    max_position_embeddings: int = 4096
    sliding_window: int | None = None
    attention_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_word_embeddings: bool = False
    backbone_format: str | None = None
    quantisation: Quantisation | None = None
    kept: tuple[tuple[str, FrozenWeight], ...] = ()

    @classmethod
    def from_folder(
        cls, folder: str | Path, backbone_format: str | None = None
    ) -> "BackboneConfig":
        """Reads `folder/config.json`. Whether the head is the embedding, and how the linears of a
        quantised checkpoint are stored, is read from the weights.

        Raises:
          BackboneError: the file is missing or not JSON, the architecture is unknown, a value is
            missing or not supported, or the checkpoint is quantised in a way that is not supported.
        """
        path = Path(folder) / "config.json"
        try:
            raw = json.loads(path.read_text())
        except OSError:
            hint = "a backbone folder holds config.json and *.safetensors"
            if not path.parent.exists():
                hint = f"there is no such folder; download the model first, {hint}"
            raise BackboneError(f"{path}: not found; {hint}") from None
        except ValueError as e:  # malformed JSON, or bytes that are not text
            raise BackboneError(f"{path}: not valid JSON: {e}") from None
        config = parse_config(raw, str(path))
        config = dataclasses.replace(
            config,
            backbone_format=backbone_format,
            tie_word_embeddings=_is_tied(path, raw, config.tie_word_embeddings),
        )
        quantisation = quantisation_of(raw, str(path))
        if quantisation is None:
            return config
        sizes = {module: linear_sizes(config, module)[::-1] for module in MODULES}
        with CheckpointTensors(path.parent) as files:
            if not quantised_tensors(files):
                _warn_once(
                    f"{path}: says that the weights are quantised ({quantisation.method}), but no "
                    "tensor of them is; they are read as they are, and trained on as that"
                )
            kept = kept_linears(files, quantisation, sizes, config.num_layers, backbone_format)
        return dataclasses.replace(config, quantisation=quantisation, kept=tuple(kept.items()))

    @property
    def plain(self) -> "BackboneConfig":
        """The same model with all weights in one dtype."""
        return dataclasses.replace(self, backbone_format=None, quantisation=None, kept=())

    @property
    def linear_format(self) -> str | None:
        """The format in which linears of the layers are stored; None means the dtype of the other
        weights. If the linears of a quantised checkpoint have several formats, the format of the
        first entry of `kept`."""
        return self.backbone_format or next((weight.format for _, weight in self.kept), None)

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


def linear_sizes(config: BackboneConfig, module: str) -> tuple[int, int]:
    """Input and output width (k, n) of a linear of a decoder layer. `module` is a path, for example
    "self_attn.q_proj", or its last component. Raises KeyError for other names."""
    d, wide, q, kv = config.hidden_size, config.intermediate_size, config.query_size, config.kv_size
    return {
        "q_proj": (d, q),
        "k_proj": (d, kv),
        "v_proj": (d, kv),
        "o_proj": (q, d),
        "gate_proj": (d, wide),
        "up_proj": (d, wide),
        "down_proj": (wide, d),
    }[module.split(".")[-1]]


def has_bias(config: BackboneConfig, module: str) -> bool:
    """Whether a linear of a decoder layer has a bias; `module` as for `linear_sizes`."""
    name = module.split(".")[-1]
    if name in ("q_proj", "k_proj", "v_proj"):
        return config.attention_bias
    return config.output_bias if name == "o_proj" else config.mlp_bias


# Values that an architecture implies, regardless of its config.json.
_FIXED: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"attention_bias": False, "output_bias": False, "mlp_bias": False},
    "Qwen2ForCausalLM": {"attention_bias": True, "output_bias": False, "mlp_bias": False},
    "Qwen3ForCausalLM": {"mlp_bias": False, "qk_norm": True},
}
# Values that Hugging Face transformers uses for keys that are missing in a config.json.
_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, "max_window_layers": 28},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "max_window_layers": 28, "head_dim": 128},
}


def parse_config(raw: dict[str, Any], where: str) -> BackboneConfig:
    """Makes a `BackboneConfig` from `raw`, the contents of the config.json called `where`. Raises
    BackboneError if the architecture is unknown, or a value is missing or not supported."""
    if not isinstance(raw, dict):
        raise BackboneError(f"{where}: should be a JSON object, found {type(raw).__name__}")
    try:
        return _parse(raw, where)
    except (TypeError, KeyError, IndexError, AttributeError, ValueError) as e:
        if isinstance(e, BackboneError):
            raise
        raise BackboneError(f"{where}: a value is missing or has the wrong type ({e})") from None


def record_tying(raw: dict[str, Any], is_tied: bool) -> None:
    """Changes `raw`, the contents of a config.json, to say whether the head is the embedding."""
    for settings in _tying_settings(raw).values():
        if settings is raw or _TIED in settings:
            settings[_TIED] = is_tied


def _tying_settings(raw: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """The objects in a config.json that may say whether the head is the embedding, by the name of
    the setting in messages."""
    section = raw.get("text_config")
    sections = {f"text_config.{_TIED}": section} if isinstance(section, dict) else {}
    return {_TIED: raw} | sections


def _is_tied(path: Path, raw: dict[str, Any], claimed: bool) -> bool:
    """Whether the head is the embedding, by the rule of transformers 5: if the folder has both
    tables and its config.json (`raw`, which says `claimed`) calls them one table, the weights
    decide."""
    claims = {
        name: where[_TIED]
        for name, where in _tying_settings(raw).items()
        if where.get(_TIED) is not None
    }
    if (claims and not any(claims.values())) or not has_weights(path.parent):
        return claimed
    files = tuple((file, file.stat().st_mtime_ns) for file in shards(path.parent))
    is_tied, reason = _tying_of_files(path.parent, files, claimed)
    if is_tied != claimed or len(set(claims.values())) > 1:
        says = " and ".join(f"{name}={json.dumps(value)}" for name, value in claims.items())
        _warn_once(
            f"{path}: {says or f'no {_TIED}'}, but {reason}; the head is "
            f"{'the embedding' if is_tied else 'not the embedding'}, as in the weights"
        )
    return is_tied


@cache
def _tying_of_files(
    folder: Path, files: tuple[tuple[Path, int], ...], claimed: bool
) -> tuple[bool, str]:
    """Whether the head is the embedding, and why. The result is cached, because comparing two
    tables can take a second; `files` has the times of the last changes, which identify the
    contents."""
    with CheckpointTensors(folder) as tensors:
        head = tensors.of_module(HEAD_TENSOR.removesuffix(".weight"))
        if not head:
            return True, f"there is no {HEAD_TENSOR}"
        if EMBEDDING_TENSOR not in tensors:
            return claimed, f"there is only {HEAD_TENSOR}"
        if head != [HEAD_TENSOR] or not _equal(tensors, HEAD_TENSOR, EMBEDDING_TENSOR):
            return False, f"{HEAD_TENSOR} differs from {EMBEDDING_TENSOR}"
    return claimed, f"{HEAD_TENSOR} equals {EMBEDDING_TENSOR}"


def _equal(tensors: CheckpointTensors, one: str, other: str) -> bool:
    """Whether two tensors have the same shape and values. They are read in parts of about 10 MB."""
    shape = tensors.shape(one)
    if shape != tensors.shape(other) or len(shape) != 2:
        return False
    rows, size = max(1, 2**22 // shape[1]), shape[0]
    parts = [slice(start, min(start + rows, size)) for start in range(0, size, rows)]
    return all(np.array_equal(tensors.read(one, p), tensors.read(other, p)) for p in parts)


@cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning("%s", message)


def _parse(raw: dict[str, Any], where: str) -> BackboneConfig:
    architecture = (raw.get("architectures") or ["<none>"])[0]
    if architecture not in _FIXED:
        raise BackboneError(
            f"{where}: unknown architecture {architecture!r}; known: {', '.join(_FIXED)}"
        )
    raw = _DEFAULTS[architecture] | raw
    if raw.get("hidden_act", "silu") != "silu":
        raise BackboneError(f"{where}: hidden_act={raw['hidden_act']!r}; only 'silu' is supported")

    def required(key: str) -> int:
        value = raw.get(key)
        if type(value) is not int or value < 1:
            raise BackboneError(f"{where}: {key} should be a positive integer, found {value!r}")
        return value

    def optional(key: str) -> int | None:
        return None if raw.get(key) is None else required(key)

    def flag(key: str, settings: dict[str, Any] = raw) -> bool:
        value = settings.get(key)
        if value is not None and type(value) is not bool:
            raise BackboneError(f"{where}: {key} should be true or false, found {value!r}")
        return bool(value)

    heads = required("num_attention_heads")
    hidden = required("hidden_size")
    head_dim = optional("head_dim") or hidden // heads
    if head_dim % 2:
        raise BackboneError(
            f"{where}: a head has {head_dim} dimensions (head_dim, or hidden_size / "
            "num_attention_heads); rotary position embeddings turn pairs of them, so the number "
            "should be even"
        )
    attention_bias = flag("attention_bias")
    tied = [flag(_TIED, settings) for settings in _tying_settings(raw).values()]
    flag("use_sliding_window")
    rope = raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    fields: dict[str, Any] = dict(
        architecture=architecture,
        vocab_size=required("vocab_size"),
        hidden_size=hidden,
        intermediate_size=required("intermediate_size"),
        num_layers=required("num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=optional("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=_positive(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        rope_theta=_positive(
            rope.get("rope_theta", raw.get("rope_theta", 10000.0)), "rope_theta", where
        ),
        rope_scaling=_rope_scaling(rope, where),
        max_position_embeddings=optional("max_position_embeddings") or 4096,
        sliding_window=_sliding_window(raw, architecture, where),
        attention_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=flag("mlp_bias"),
        tie_word_embeddings=tied[0],
    )
    config = BackboneConfig(**(fields | _FIXED[architecture]))
    if config.num_heads % config.num_kv_heads:
        raise BackboneError(
            f"{where}: num_attention_heads={config.num_heads} is not a multiple of "
            f"num_key_value_heads={config.num_kv_heads}"
        )
    return config


def to_hf_config(config: BackboneConfig, dtype: str) -> dict[str, Any]:
    """The contents of a config.json from which Hugging Face transformers makes the same model;
    `dtype` is the name of the dtype of the saved tensors."""
    rope: dict[str, Any] = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rope_scaling:
        rope |= {"rope_type": "llama3", **dataclasses.asdict(config.rope_scaling)}
    raw = {
        "architectures": [config.architecture],
        "model_type": config.architecture.removesuffix("ForCausalLM").lower(),
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_parameters": rope,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "tie_word_embeddings": config.tie_word_embeddings,
        "dtype": dtype,
    }
    if config.architecture == "MistralForCausalLM":
        raw |= {"sliding_window": config.sliding_window}
    elif config.sliding_window:
        window = {"use_sliding_window": True, "max_window_layers": 0}
        raw |= {"sliding_window": config.sliding_window, **window}
    return raw


def _rope_scaling(rope: dict[str, Any], where: str) -> Llama3Rope | None:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise BackboneError(
            f"{where}: rope type {kind!r} is not supported; known: 'default', 'llama3'"
        )
    names = [f.name for f in dataclasses.fields(Llama3Rope)]
    if missing := [name for name in names if name not in rope]:
        raise BackboneError(f"{where}: rope type 'llama3' lacks {', '.join(missing)}")
    numbers = {name: _positive(rope[name], f"{name} of the rope type", where) for name in names}
    length = int(numbers.pop("original_max_position_embeddings"))
    return Llama3Rope(**numbers, original_max_position_embeddings=length)


def _positive(value: Any, key: str, where: str) -> float:
    if type(value) not in (int, float) or not 0 < value < math.inf:
        raise BackboneError(f"{where}: {key} should be a positive number, found {value!r}")
    return float(value)


def _sliding_window(raw: dict[str, Any], architecture: str, where: str) -> int | None:
    # Llama has no windows in transformers, regardless of its config.json.
    window = None if architecture == "LlamaForCausalLM" else raw.get("sliding_window")
    if not window:
        return None
    if type(window) is not int or window < 0:
        raise BackboneError(
            f"{where}: sliding_window should be a positive integer, found {window!r}"
        )
    if architecture == "MistralForCausalLM":
        return window
    if not raw.get("use_sliding_window", False):
        return None
    layers = raw["num_hidden_layers"]
    full = min(layers, raw["max_window_layers"])
    default = ["full_attention"] * full + ["sliding_attention"] * (layers - full)
    kinds = set(raw.get("layer_types") or default)
    if len(kinds) > 1:
        raise BackboneError(
            f"{where}: a sliding window on some layers only (layer_types, max_window_layers) "
            "is not supported"
        )
    return window if "sliding_attention" in kinds else None
