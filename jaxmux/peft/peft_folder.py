"""Reads and writes adapter folders, in the format of Hugging Face PEFT, which `peft` and vLLM load,
or in the format of AdapterHub.

If the chat template differs from that of the backbone's tokenizer, the folder has it in
`chat_template.jinja`, as folders of transformers and TRL do. jaxmux writes no other files of a
tokenizer: training does not change the tokenizer, its files have up to 35 MB, more than many
adapters, and some versions of vLLM load a tokenizer for each adapter that has one. Other training
programs write these files, and may have added tokens.
"""

import copy
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file, save_file

from jaxmux.atomic_files import share_like_folder, unwritable_named, write_atomically
from jaxmux.data import DataError, Rendering, load_tokenizer
from jaxmux.data.chat_templates import ChatTemplate, compiled, read_template
from jaxmux.errors import InputError
from jaxmux.field_checks import why_left_out
from jaxmux.models import BackboneConfig, may_be_the_same

from .kind import WEIGHTS as WEIGHTS
from .kind import AdapterKind, BaseTensors
from .kinds import KINDS, kind_of
from .model_card import CARD, Notes, adapter_card, model_name, public_name

# The settings in an adapter folder. The arrays are in the `weights_file` of the adapter's kind.
SETTINGS = "adapter_config.json"
# The key of the backbone's fingerprint in the metadata of the weights.
_BASE = "jaxmux.base_fingerprint"
# The key of the format in which the backbone's linears were stored. Absent if the format was a
# plain dtype.
_BASE_FORMAT = "jaxmux.base_format"
# Files of PEFT and of AdapterHub that are not read.
_PICKLES = ("adapter_model.bin", "pytorch_adapter.bin")
# Settings that PEFT and AdapterHub write. The adapter's kind reads or refuses those that change its
# outputs.
_KNOWN_SETTINGS = frozenset(
    """
    alora_invocation_tokens alpha_pattern arrow_config auto_mapping base_model_name_or_path bias
    corda_config d_initial ensure_weight_tying eva_config exclude_modules fan_in_fan_out
    feedforward_modules inference_mode init_ia3_weights init_lora_weights init_weights kasa_config
    layer_replication layers_pattern layers_to_transform loftq_config lora_alpha lora_bias
    lora_dropout lora_ga_config mask_type megatron_config megatron_core modules_to_save
    monteclora_config num_attention_heads num_layers num_transformer_submodules num_virtual_tokens
    peft_type peft_version projection_prng_key prompt_tuning_init prompt_tuning_init_text
    qalora_group_size r random_seed rank_pattern revision runtime_config save_projection
    target_modules target_parameters task_type token_dim token_indices tokenizer_kwargs
    tokenizer_name_or_path trainable_token_indices use_bdlora use_dora use_qalora use_rslora
    velora_config vera_dropout
    config config_id hidden_size model_class model_name model_type name version
    """.split()
)
# Model cards with more bytes are not read.
_LARGEST_CARD = 2**20
# Data types of weights that NumPy can hold, as safetensors names them (BF16 if JAX is installed).
_DTYPES = ("BF16", "F16", "F32", "F64", "I32", "I64")
TEMPLATE = "chat_template.jinja"
# The key in the metadata of the weights that lists the kinds of records.
TRAINED_ON = "jaxmux.trained_on"

# Files that hold a whole vocabulary.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Special tokens that change how a prompt is tokenized or where an answer ends.
_SPECIAL = ("bos_token", "eos_token")
_SETTINGS = "tokenizer_config.json"
# The folder of the templates other than the default one.
_ADDITIONAL = "additional_chat_templates"


class AdapterError(InputError):
    """An adapter folder cannot be read, or does not fit the backbone. The message names the file or
    folder, and the key or tensor at fault."""


def export_adapter(
    folder: str | Path,
    adapter: Any,
    spec: Any,
    config: BackboneConfig,
    base_model: str,
    *,
    serving: bool = False,
    base_fingerprint: str = "",
    base: BaseTensors | None = None,
    notes: Notes | None = None,
    rendering: Rendering | None = None,
) -> None:
    """Writes an adapter as a folder, in the format of Hugging Face PEFT, which `peft` and vLLM
    load, or of AdapterHub for bottleneck adapters. The folder gets a model card for the Hugging
    Face hub (README.md), and the chat template of the training data (chat_template.jinja) if it
    differs from that of the backbone's tokenizer.

    Args:
      folder: folder to write; it is created if it does not exist.
      adapter: the trained weights, for example from `Engine.adapter`. For LoRA: by path of a linear
        within a layer ("mlp.up_proj"), the factors a [L, k, r] and b [L, r, n] of all L layers.
      spec: the specification with which the adapter was trained, for example a `LoRA`.
      config: configuration of the backbone (`Backbone.config`). Its `backbone_format` is recorded
        in the metadata of the weights.
      base_model: name or path of the backbone. `base_model_name_or_path` records its public name if
        known, otherwise this value.
      serving: False writes the factors as they are, and records alpha and rsLoRA of `spec`. True
        multiplies B by the adapter's scale and records a scale of 1 (lora_alpha = rank, no rsLoRA),
        for servers that do not support rsLoRA. The outputs of the adapter are the same.
      base_fingerprint: hash of the backbone, from `backbone_fingerprint`, by which `import_adapter`
        recognises the backbone; if it is empty, no hash is recorded.
      base: function that returns a tensor of the backbone by its name, from `checkpoint_tensors`.
        Kinds that are trained as differences from the backbone, such as `LNTuning`, need it.
      notes: facts about the training for the card; None if there are none.
      rendering: how the training data became text, from `PreparedTask.samples`; None if unknown.
        The metadata of the weights record the kinds of records.

    Raises:
      ValueError: the adapter has no place in this backbone, or `base` is needed.
      KeyError: `adapter` lacks an array that `spec` describes.
      OSError: a file cannot be written.
    """
    folder, kind = Path(folder), kind_of(spec)
    tensors = kind.tensors(spec, adapter, config, serving, base)
    settings = {
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": public_name(base_model) or base_model,
        "inference_mode": True,
        **kind.settings(spec, config, serving),
    }
    folder.mkdir(parents=True, exist_ok=True)
    # The files are renamed when they are complete, because other processes may wait for them.
    # safetensors first writes to a file with a random name, which remains if the process is killed.
    # This file lies in a separate folder, so that the next export removes it.
    partial = folder / ".partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    shutil.copymode(folder, partial)
    weights = partial / kind.weights_file
    metadata = {
        "format": "pt",
        _BASE: base_fingerprint,
        _BASE_FORMAT: config.linear_format,
        TRAINED_ON: rendering.kinds if rendering else "",
    }
    metadata = {key: value for key, value in metadata.items() if value}
    try:
        with unwritable_named(weights):
            save_file(tensors, weights, metadata=metadata)
        share_like_folder(weights)
        _sort_metadata(weights)
        weights.replace(folder / kind.weights_file)
        for other in {other_kind.weights_file for other_kind in KINDS.values()} - {
            kind.weights_file
        }:
            (folder / other).unlink(missing_ok=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    merges = kind.merged is not None
    card = adapter_card(
        settings, base_model, config.linear_format, kind.name, merges, notes, rendering
    )
    write_atomically(folder / CARD, card)
    write_chat_template(folder, rendering)
    # The order of patterns within a setting matters, so only the settings themselves are sorted.
    text = json.dumps(dict(sorted(settings.items())), indent=2)
    write_atomically(folder / SETTINGS, text + "\n")


def import_adapter(
    folder: str | Path,
    config: BackboneConfig,
    base_fingerprint: str = "",
    base: BaseTensors | None = None,
    base_model: str = "",
) -> tuple[Any, Any]:
    """Reads an adapter folder. A warning reports settings that jaxmux does not know, and a base
    model whose name is not the backbone's.

    Args:
      folder: folder with `adapter_config.json` and the weights.
      config: configuration of the backbone on which the adapter was trained (`Backbone.config`).
      base_fingerprint: hash of the backbone, from `backbone_fingerprint`. An adapter that records
        another hash is refused. If the argument is empty, nothing is checked.
      base: as for `export_adapter`.
      base_model: name or path of the backbone, which is compared with the names in
        adapter_config.json and README.md. If the argument is empty, nothing is compared.

    Returns:
      The specification, for example a `LoRA`, and the weights. For LoRA, the weights are the
      factors a [L, k, r] and b [L, r, n] by path of a linear within a layer ("mlp.up_proj"):
      float32 NumPy arrays, zero in layers that are not adapted. Fields that the folder does not
      record, such as `initialisation` and `loraplus_ratio` of LoRA, have their defaults.

    Raises:
      AdapterError: no kind of adapter has such a folder (a LoRA with biases, for example), or a
        file or tensor is missing, unknown or of the wrong shape.
    """
    folder = Path(folder)
    settings, where = _read_settings(folder), folder / SETTINGS
    kind = _recognised(settings, where)
    if whole := settings.get("modules_to_save"):
        raise AdapterError(f"{where}: modules_to_save={whole!r}; {why_left_out('modules_to_save')}")
    tensors, recorded = _read_tensors(folder / kind.weights_file)
    if recorded and base_fingerprint and not may_be_the_same(recorded, base_fingerprint):
        raise AdapterError(
            f"{folder}: was trained on another backbone "
            f"({settings.get('base_model_name_or_path')}), on which alone it makes sense"
        )
    try:
        spec = kind.from_settings(settings, config)
    except (KeyError, TypeError, ValueError) as e:
        raise AdapterError(f"{where}: {e}") from None
    try:
        adapter = kind.from_tensors(spec, tensors, config, base)
    except ValueError as e:
        raise AdapterError(f"{folder}: {e}") from None
    if tensors:
        raise AdapterError(f"{folder}: tensor {min(tensors)} belongs to no target module")
    if unknown := sorted(key for key in settings.keys() - _KNOWN_SETTINGS if settings[key]):
        _warn_once(
            f"{where}: jaxmux does not know, and ignores, {', '.join(map(repr, unknown[:5]))}"
            f"{' and others' * (len(unknown) > 5)}; an adapter that needs this computes something "
            "else here"
        )
    if base_model:
        is_same = bool(recorded) and recorded == base_fingerprint
        _warn_of_another_base(folder, settings, base_model, is_same)
    return spec, adapter


def _warn_of_another_base(
    folder: Path, settings: Mapping[str, Any], base_model: str, is_same: bool
) -> None:
    """Warns if the folder names another base model than the backbone. `is_same` means that
    fingerprints prove the backbone to be the same, even if its folder has been renamed."""
    paths = (model_name(base_model), base_model, os.path.realpath(base_model))
    names = {Path(path).name.casefold() for path in paths}
    claims = {SETTINGS: settings.get("base_model_name_or_path"), CARD: _base_on_card(folder)}
    for file, claim in claims.items():
        for name in claim if isinstance(claim, list) else [claim]:
            if not name or not isinstance(name, str):
                continue
            if is_same and public_name(name) is None:
                continue
            if Path(model_name(name)).name.casefold() not in names:
                _warn_once(
                    f"{folder / file}: names the base model {name!r}, and the backbone is "
                    f"{base_model}; an adapter makes sense on the model that it was trained on"
                )
                return


def _base_on_card(folder: Path) -> Any:
    """The base model in the metadata of the model card; None if it cannot be read."""
    # Imported here because only folders with a card need these packages.
    from huggingface_hub import metadata_load
    from yaml import YAMLError

    try:
        if (folder / CARD).stat().st_size > _LARGEST_CARD:
            return None
        return (metadata_load(folder / CARD) or {}).get("base_model")
    except (OSError, ValueError, AttributeError, YAMLError):
        return None


@cache
def _warn_once(message: str) -> None:
    logging.getLogger(__name__).warning("%s", message)


def is_adapter_folder(folder: Path) -> bool:
    """Whether a folder, which need not exist, has the two files of an adapter. The files are not
    read."""
    return (folder / SETTINGS).is_file() and any(
        (folder / kind.weights_file).is_file() for kind in KINDS.values()
    )


def _recognised(settings: dict[str, Any], where: Path) -> AdapterKind:
    for kind in KINDS.values():
        if kind.recognise(settings):
            return kind
    name = settings.get("peft_type")
    reason = why_left_out(name) or f"known kinds: {', '.join(KINDS)}"
    raise AdapterError(f"{where}: peft_type={name!r} is not supported; {reason}")


def _sort_metadata(path: Path) -> None:
    """Sorts the metadata in a safetensors file, whose order is otherwise random, so that equal
    adapters give equal files. Returns when the file is on disk."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        file.seek(8)
        file.write(
            json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode().ljust(length)
        )
        file.flush()
        os.fsync(file.fileno())


def _read_settings(folder: Path) -> dict[str, Any]:
    settings = folder / SETTINGS
    if not settings.is_file():
        raise AdapterError(f"{settings}: not found")
    try:
        values = json.loads(settings.read_text())
    except (ValueError, OSError, RecursionError) as e:
        raise AdapterError(f"{folder}: cannot be read: {e}") from None
    if not isinstance(values, dict):
        raise AdapterError(f"{settings}: should be a JSON object, found {type(values).__name__}")
    return values


def _read_tensors(weights: Path) -> tuple[dict[str, np.ndarray], str]:
    """The tensors, and the fingerprint of the backbone, which is empty if none is recorded."""
    if not weights.is_file():
        pickles = [name for name in _PICKLES if (weights.parent / name).is_file()]
        hint = f"; {pickles[0]} may run code when it is read, save safetensors" if pickles else ""
        raise AdapterError(f"{weights}: not found{hint}")
    try:
        with safe_open(weights, framework="numpy") as file:
            base = (file.metadata() or {}).get(_BASE, "")
            for name in file.keys():
                if (dtype := file.get_slice(name).get_dtype()) not in _DTYPES:
                    raise AdapterError(
                        f"{weights}: tensor {name} is {dtype}; expected {', '.join(_DTYPES)}"
                    )
        return load_file(weights), base
    except (ValueError, OSError, SafetensorError) as e:
        if isinstance(e, AdapterError):
            raise
        raise AdapterError(f"{weights.parent}: cannot be read: {e}") from None


def write_chat_template(folder: Path, rendering: Rendering | None) -> None:
    """Writes the chat template of an adapter into `folder`, which holds the adapter or a merged
    checkpoint. If there is none to write, removes the folder's template."""
    template = rendering.own_template if rendering else None
    if template is None:
        (folder / TEMPLATE).unlink(missing_ok=True)
    else:
        write_atomically(folder / TEMPLATE, template)


def adapter_tokenizer(folder: str | Path, tokenizer: Any) -> Any:
    """The tokenizer that renders and tokenizes prompts of an adapter, and decodes its answers. If
    the folder has a vocabulary, it is the folder's tokenizer; otherwise it is the backbone's
    tokenizer, with the folder's chat template if there is one.

    Args:
      folder: the adapter folder, of jaxmux or of a program that saves a tokenizer with an adapter.
      tokenizer: the backbone's tokenizer, which is not changed.

    Returns:
      `tokenizer` itself if it has the same tokens and the same template, otherwise another object.
      `tokenizer_key` tells whether its tokens are those of the backbone's tokenizer.

    Raises:
      DataError: the template or the tokenizer cannot be read, or the folder has no vocabulary but
        names tokens that the backbone's tokenizer does not have.
    """
    folder = Path(folder)
    template = _template_in(folder)
    if any((folder / name).is_file() for name in _VOCABULARIES):
        in_folder = load_tokenizer(folder)
        if not (folder / _SETTINGS).is_file():
            # Nothing else in the folder names special tokens.
            for name in _SPECIAL:
                if (token := getattr(tokenizer, name)) in in_folder.get_vocab():
                    setattr(in_folder, name, token)
        if difference_of_tokens(in_folder, tokenizer):
            return in_folder
        if template is None and in_folder.chat_template is not None:
            template = ChatTemplate(in_folder.chat_template, f"the chat template of {folder}")
    elif wrong := next(_unknown_tokens(folder, tokenizer), ""):
        raise DataError(
            f"{folder}: {wrong}, and the folder has no vocabulary ({', '.join(_VOCABULARIES)}). "
            "Copy the whole tokenizer with which the adapter was trained into the folder, or "
            f"remove {_SETTINGS} if the adapter was trained with the backbone's tokenizer"
        )
    if template is None or template.text == tokenizer.chat_template:
        return tokenizer
    return with_chat_template(tokenizer, template)


def refuse_other_tokens(folder: str | Path, tokenizer: Any) -> None:
    """Raises DataError if an adapter's folder has a tokenizer with other tokens than the
    backbone's; the message tells the difference. Other errors are as for `adapter_tokenizer`."""
    in_folder = adapter_tokenizer(folder, tokenizer)
    if tokenizer_key(in_folder)[0] != tokenizer_key(tokenizer)[0]:
        raise DataError(
            f"{folder}: the adapter's tokenizer is not that of the backbone: "
            f"{difference_of_tokens(in_folder, tokenizer)}. Training reads data with the tokenizer "
            "of the backbone; put the adapter's tokenizer files into a copy of the backbone's "
            "folder, or remove them from the adapter's folder if its tokens were the backbone's"
        )


def tokenizer_key(tokenizer: Any) -> tuple[int, str]:
    """A key that is equal for two tokenizers in use if they have the same tokens and the same chat
    template. Its first part identifies the tokens."""
    return id(tokenizer.backend_tokenizer), str(tokenizer.chat_template)


def difference_of_tokens(in_folder: Any, backbones: Any) -> str:
    """Describes how the tokens of an adapter's tokenizer differ from those of the backbone's; empty
    if both make the same tokens of every text."""
    ids, wanted = in_folder.get_vocab(), backbones.get_vocab()
    if ids != wanted:
        differing = sorted((n, t) for t, n in ids.items() if wanted.get(t) != n)
        if differing:
            (number, token), count = differing[0], len(differing)
            there = wanted.get(token)
            place = "lacks" if there is None else f"has at {there}"
            more = f", and {count - 1} more" if count > 1 else ""
            return f"it has the token {token!r} at {number}, which the backbone's {place}{more}"
        token = min(wanted.keys() - ids.keys())
        return f"it lacks the token {token!r}, which the backbone's has at {wanted[token]}"
    for name in _SPECIAL:
        if (token := getattr(in_folder, name)) != (there := getattr(backbones, name)):
            return f"its {name} is {token!r}, and the backbone's {there!r}"
    parts, wanted_parts = (
        json.loads(tokenizer.backend_tokenizer.to_str()) for tokenizer in (in_folder, backbones)
    )
    for part in parts.keys() - {"truncation", "padding", "version"}:
        if parts[part] != wanted_parts[part]:
            return f"its {part.replace('_', ' ')} is another one"
    return ""


def with_chat_template(tokenizer: Any, template: ChatTemplate) -> Any:
    """A copy of a tokenizer with another chat template; messages call it by the template's name."""
    renamed = copy.copy(tokenizer)
    renamed.chat_template, renamed.name_or_path = template.text, template.name
    return renamed


def trained_on(folder: str | Path) -> str:
    """The kinds of records that an adapter was trained on, as `Rendering.kinds` names them; empty
    if its folder does not record them."""
    for name in dict.fromkeys(kind.weights_file for kind in KINDS.values()):
        try:
            with safe_open(Path(folder) / name, framework="numpy") as file:
                return (file.metadata() or {}).get(TRAINED_ON, "")
        except (OSError, SafetensorError):
            # The error is raised when the adapter itself is read.
            continue
    return ""


def _unknown_tokens(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Describes each added, BOS or EOS token in the folder's JSON files that `tokenizer` does not
    have in the same way."""
    settings = _settings_in(folder / _SETTINGS)
    try:
        listed = settings.get("added_tokens_decoder", {})
        added = {token["content"]: int(number) for number, token in listed.items()}
    except (AttributeError, KeyError, TypeError, ValueError):
        raise DataError(
            f"{folder / _SETTINGS}: added_tokens_decoder should be an object of tokens with their "
            'content, by their numbers, such as {"128256": {"content": "<tool>"}}'
        ) from None
    for token, number in (added | _settings_in(folder / "added_tokens.json")).items():
        if tokenizer.get_added_vocab().get(token) != number:
            yield f"its tokenizer has the token {token!r} at {number}, which the backbone's has not"
    named = _settings_in(folder / "special_tokens_map.json") | settings
    for name in _SPECIAL:
        token = named.get(name)
        token = token.get("content") if isinstance(token, Mapping) else token
        if token is not None and token != getattr(tokenizer, name):
            yield (
                f"its tokenizer has the {name} {token!r}, and the backbone's "
                f"{getattr(tokenizer, name)!r}"
            )


def _settings_in(path: Path) -> dict[str, Any]:
    try:
        settings = json.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read: {error}") from error
    if not isinstance(settings, dict):
        raise DataError(f"{path}: holds no JSON object")
    return settings


def _template_in(folder: Path) -> ChatTemplate | None:
    """The template of an adapter folder. If there are several, the text maps their names to them,
    as in transformers' tokenizers."""
    by_name = {}
    if (folder / TEMPLATE).is_file():
        by_name["default"] = read_template(folder / TEMPLATE).text
    for file in sorted(folder.glob(f"{_ADDITIONAL}/*.jinja")):
        by_name[file.stem] = read_template(file).text
    where = folder / (TEMPLATE if "default" in by_name else _ADDITIONAL)
    if not by_name:
        where = folder / _SETTINGS
        by_name = _named_templates(where, _settings_in(where).get("chat_template"))
    if not by_name:
        return None
    return ChatTemplate(
        by_name["default"] if by_name.keys() == {"default"} else by_name, str(where)
    )


def _named_templates(file: Path, setting: Any) -> dict[str, str]:
    """The chat templates of a tokenizer_config.json by name. The setting is one text or a list."""
    if setting is None:
        return {}
    if isinstance(setting, str):
        setting = [{"name": "default", "template": setting}]
    try:
        texts = {
            template["name"]: template["template"].removeprefix("\ufeff") for template in setting
        }
    except (AttributeError, KeyError, TypeError):
        raise DataError(
            f"{file}: chat_template should be a text, or a list of objects with 'name' and "
            "'template'"
        ) from None
    return {name: compiled(ChatTemplate(text, str(file))).text for name, text in texts.items()}
