"""The chat template or tokenizer in an adapter folder, and the kinds of records that the adapter
was trained on.

If the chat template is not the one of the backbone's tokenizer, the folder has it in
`chat_template.jinja`, as folders of transformers and TRL do. jaxmux writes no other files of a
tokenizer. Training does not change the tokenizer, its files have up to 35 MB, more than many
adapters, and some versions of vLLM load a tokenizer for each adapter that has one. Other trainers
write these files, and may have added tokens.
"""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jaxmux.atomic_files import write_atomically
from jaxmux.data import DataError, Rendering, load_tokenizer
from jaxmux.data.chat_templates import ChatTemplate, compiled, read_template

from .kinds import KINDS

TEMPLATE = "chat_template.jinja"
# The key in the metadata of the weights that lists the kinds of records.
TRAINED_ON = "jaxmux.trained_on"

# Files that hold a whole vocabulary.
_VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tekken.json")
# Special tokens that change how a prompt is tokenized or where an answer ends.
_SPECIAL = ("bos_token", "eos_token")
_SETTINGS = "tokenizer_config.json"
# The folder of the templates besides the default one.
_ADDITIONAL = "additional_chat_templates"


def write_chat_template(folder: Path, rendering: Rendering | None) -> None:
    """Writes the template that an adapter expects into its folder or into a checkpoint; removes the
    folder's template if there is none to write."""
    template = rendering.own_template if rendering else None
    if template is None:
        (folder / TEMPLATE).unlink(missing_ok=True)
    else:
        write_atomically(folder / TEMPLATE, template)


def adapter_tokenizer(folder: str | Path, tokenizer: Any) -> Any:
    """The tokenizer that renders and tokenizes prompts of an adapter, and decodes its answers. It
    is the folder's tokenizer if the folder has a vocabulary, and otherwise the backbone's
    tokenizer, with the folder's chat template if there is one.

    Args:
      folder: the adapter folder, of jaxmux or of a program that saves a tokenizer with an adapter.
      tokenizer: the backbone's tokenizer, which is not changed.

    Returns:
      `tokenizer` itself if it has the same tokens and the same template, and otherwise another
      object. `tokenizer_key` tells whether its tokens are those of the backbone's tokenizer.

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
    """Raises DataError, which tells the difference, if an adapter's folder has a tokenizer with
    other tokens than the backbone's. Other errors are as for `adapter_tokenizer`."""
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
    template. Its first part stands for the tokens."""
    return id(tokenizer.backend_tokenizer), str(tokenizer.chat_template)


def difference_of_tokens(in_folder: Any, backbones: Any) -> str:
    """How the tokens of an adapter's tokenizer differ from those of the backbone's, in words; empty
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
    """A copy of a tokenizer with another chat template, by whose name messages call it."""
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
            # The error appears when the adapter itself is read.
            continue
    return ""


def _unknown_tokens(folder: Path, tokenizer: Any) -> Iterator[str]:
    """Describes each added, BOS or EOS token in the folder's JSON files that differs from
    `tokenizer`'s."""
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
    """The template of an adapter folder. If there are several, the text is a mapping from their
    names, as in transformers' tokenizers."""
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
    """The chat templates of a tokenizer_config.json, which has one text or a list, by name."""
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
