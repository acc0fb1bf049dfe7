"""The chat template in an adapter folder, and the kinds of records that the adapter was trained on.

The folder has the template in `chat_template.jinja`, as those of transformers and TRL do, if it is
not that of the backbone's tokenizer. It has no other files of a tokenizer: training does not change
the backbone's, whose files have up to 35 MB, more than many adapters, and versions of vLLM load a
tokenizer for each adapter that has one.
"""

import copy
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from jaxmux.atomic_files import write_atomically
from jaxmux.data import Rendering
from jaxmux.data.chat_templates import ChatTemplate, compiled, read_template

from .kinds import KINDS

TEMPLATE = "chat_template.jinja"
# The key of the kinds of records in the metadata of the weights.
TRAINED_ON = "jaxmux.trained_on"


def write_chat_template(folder: Path, rendering: Rendering | None) -> None:
    """Writes the template that adapters expect into a folder; without one, the folder has none.

    Args:
      folder: an adapter folder, or one of a checkpoint.
      rendering: how the adapter's training data became text; None if that is not known.

    Raises:
      OSError: the file cannot be written.
    """
    template = rendering.own_template if rendering else None
    if template is None:
        (folder / TEMPLATE).unlink(missing_ok=True)
    else:
        write_atomically(folder / TEMPLATE, template)


def adapter_tokenizer(folder: str | Path, tokenizer: Any) -> Any:
    """The tokenizer that renders and tokenizes prompts of an adapter: one with the chat template in
    the adapter's folder, or the backbone's if the folder has none.

    Args:
      folder: the adapter folder, of jaxmux or of a program that saves a tokenizer with an adapter.
      tokenizer: the backbone's tokenizer, which is not changed.

    Raises:
      DataError: the template cannot be read.
    """
    template = _template_in(Path(folder))
    return tokenizer if template is None else with_chat_template(tokenizer, template)


def with_chat_template(tokenizer: Any, template: ChatTemplate) -> Any:
    """A copy of a tokenizer with another chat template. Messages call it by the template's name.

    Args:
      tokenizer: the tokenizer.
      template: the template.
    """
    own = copy.copy(tokenizer)
    own.chat_template, own.name_or_path = template.text, template.name
    return own


def trained_on(folder: str | Path) -> str:
    """The kinds of records that an adapter was trained on, as `Rendering.kinds` names them; empty
    if its folder does not tell.

    Args:
      folder: the adapter folder.
    """
    for name in dict.fromkeys(kind.weights_file for kind in KINDS.values()):
        try:
            with safe_open(Path(folder) / name, framework="numpy") as file:
                return (file.metadata() or {}).get(TRAINED_ON, "")
        except (OSError, SafetensorError):
            # Reading the adapter tells what is wrong with it.
            continue
    return ""


def _template_in(folder: Path) -> ChatTemplate | None:
    if (folder / TEMPLATE).is_file():
        return read_template(folder / TEMPLATE)
    settings = folder / "tokenizer_config.json"
    try:
        found = json.loads(settings.read_text(encoding="utf-8")).get("chat_template")
    except (OSError, ValueError, AttributeError):
        return None
    return compiled(ChatTemplate(found, str(settings))) if isinstance(found, str) else None
