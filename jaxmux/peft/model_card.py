"""The README.md of an exported adapter or merged checkpoint, in the form of Hugging Face's model
cards: metadata in YAML, then Markdown.

Text that users have chosen, such as names of files, is written as JSON strings in the YAML and as
code spans or blocks in the Markdown, so that it is not interpreted as markup.
"""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxmux.data import Rendering
from jaxmux.installation import installed_versions
from jaxmux.printable import spaced

CARD = "README.md"
# The maximum ranks that vLLM accepts.
_VLLM_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
# The folder of a model in the cache of huggingface_hub: models--ORG--NAME/snapshots/COMMIT.
_CACHED = re.compile(r"models--([\w.-]+?)--([\w.-]+)/snapshots/\w+/?$")
# Names of models that the hub accepts.
_HUB_NAME = re.compile(r"(?:[A-Za-z0-9][\w.-]*/)?[A-Za-z0-9][\w.-]{0,95}", re.ASCII)

_HERE = "# run this in the folder of this card"
# If the backbone has no public name, the card does not show its path; adapter_config.json does.
_IMPORT_JSON = ("import json", "")
_READ_NAME = (
    """python3 -c 'import json; print(json.load(open("adapter_config.json"))"""
    """["base_model_name_or_path"])'"""
)


class Notes(NamedTuple):
    """Facts about the training of an adapter, for its card.

    Attributes:
      title: name of the task.
      sections: the tables by heading. A table maps labels to values: objects are shown as JSON, and
        None is left out.
      datasets: names of data sets on the Hugging Face hub that were trained on.
    """

    title: str
    sections: Mapping[str, Mapping[str, Any]]
    datasets: Sequence[str] = ()


def adapter_card(
    settings: Mapping[str, Any],
    base_model: str,
    base_format: str | None,
    kind: str,
    merges: bool,
    notes: Notes | None,
    rendering: Rendering | None = None,
) -> str:
    """The card of an adapter folder.

    Args:
      settings: the content of its adapter_config.json.
      base_model: name or path of the backbone; the card shows only the last part of a path.
      base_format: the format in which the linears of the backbone were stored; None means its
        dtype.
      merges: whether `jaxmux export --merge` can merge adapters of this kind.
      notes, rendering: as for `export_adapter`.
    """
    base, public = model_name(base_model), public_name(base_model)
    has_template = bool(rendering and rendering.own_template)
    is_peft = "peft_type" in settings
    tags = [f"base_model:adapter:{base}", "jaxmux"]
    if is_peft:
        tags.append("transformers")
    if settings.get("peft_type") == "LORA":
        tags.append("lora")
    front = _front(base, "adapter", "peft" if is_peft else "adapter-transformers", tags, notes)
    title = notes.title if notes else Path(base).name
    stored = f", whose linears were stored in {_code(base_format)}" if base_format else ""
    text = [
        front,
        f"# {_code(title)}",
        f"An adapter of the kind {_code(kind)} for {_code(base)}{stored}, trained with jaxmux. "
        "It makes sense on this model only.",
        *_sections(notes),
        "## Use",
        _prompts(rendering, "the chat template in `chat_template.jinja`"),
        (_use_with_peft if is_peft else _use_with_adapters)(
            public, _tokenizer_class(base_model), has_template
        ),
        _use_with_vllm(settings, public, title, merges, has_template),
    ]
    return "\n\n".join(filter(None, text)) + "\n"


def merged_card(
    base_model: str, kind: str, notes: Notes | None, rendering: Rendering | None = None
) -> str:
    """The card of a checkpoint into which an adapter is merged. Arguments are as for
    `adapter_card`."""
    base, reader = model_name(base_model), _tokenizer_class(base_model)
    title = notes.title if notes else Path(base).name
    text = [
        _front(base, "finetune", "transformers", ["jaxmux"], notes),
        f"# {_code(title)}",
        f"The model {_code(base)} with an adapter of the kind {_code(kind)} merged into its "
        "weights. The adapter was trained with jaxmux.",
        *_sections(notes),
        "## Use",
        _prompts(rendering, "the chat template of the tokenizer"),
        _block(
            "python",
            f"from transformers import AutoModelForCausalLM, {reader}",
            "",
            _HERE,
            'model = AutoModelForCausalLM.from_pretrained(".")',
            f'tokenizer = {reader}.from_pretrained(".")',
        ),
    ]
    return "\n\n".join(filter(None, text)) + "\n"


def public_name(base_model: str) -> str | None:
    """The name of a backbone on the Hugging Face hub, from the path of a folder in the hub's cache
    or from a folder's config.json (`_name_or_path`); None if unknown."""
    if cached := _CACHED.search(base_model):
        return f"{cached[1]}/{cached[2]}"
    if not Path(base_model).exists():
        return base_model if _is_public(base_model) else None
    try:
        noted = json.loads((Path(base_model) / "config.json").read_text())["_name_or_path"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return noted if isinstance(noted, str) and _is_public(noted) else None


def _is_public(name: str) -> bool:
    """Whether a name has the form ORGANISATION/NAME and is not a local folder."""
    return "/" in name and bool(_HUB_NAME.fullmatch(name)) and not Path(name).exists()


def model_name(base_model: str) -> str:
    """The name of a backbone on the Hugging Face hub if known, otherwise the last part of its
    path."""
    return public_name(base_model) or Path(base_model).name or "backbone"


def _front(base: str, relation: str, library: str, tags: Sequence[str], notes: Notes | None) -> str:
    """The metadata of the card, without a name that the hub would refuse."""
    fields: dict[str, Any] = {}
    if _HUB_NAME.fullmatch(base) and not re.search(r"--|\.\.|[.-]$|\.git$", base):
        fields |= {"base_model": base, "base_model_relation": relation}
    else:
        tags = [tag for tag in tags if base not in tag]
    fields |= {"library_name": library, "pipeline_tag": "text-generation", "tags": sorted(tags)}
    if notes and notes.datasets:
        fields["datasets"] = sorted(set(notes.datasets))
    lines = []
    for name, value in fields.items():
        # A JSON string in ASCII is also a YAML string.
        values = [f"\n- {json.dumps(item)}" for item in value] if isinstance(value, list) else ()
        lines.append(f"{name}:{''.join(values) or f' {json.dumps(value)}'}")
    return "\n".join(("---", *lines, "---"))


def _sections(notes: Notes | None) -> list[str]:
    blocks = []
    sections = dict(notes.sections) if notes else {}
    sections["Versions"] = installed_versions("jaxmux", "jax", "jaxlib")
    for heading, values in sections.items():
        rows = {label: value for label, value in values.items() if value is not None}
        if not rows:
            continue
        blocks += [f"## {heading}", *_table(rows)]
        for label, value in rows.items():
            if isinstance(value, Mapping):
                blocks += [f"{label}:", _block("json", json.dumps(value, indent=2))]
    return blocks


def _table(rows: Mapping[str, Any]) -> list[str]:
    """A table of the rows whose values are not objects."""
    plain = [
        f"| {label} | {_value(value)} |"
        for label, value in rows.items()
        if not isinstance(value, Mapping)
    ]
    return ["\n".join(("| | |", "|---|---|", *plain))] if plain else []


def _value(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(_value, value))
    if isinstance(value, float):
        return f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else _code(value)


def _code(text: str) -> str:
    """A text as a code span, within a line or a cell of a table."""
    shown = spaced(text).strip() or "?"
    # A backslash keeps a bar from ending the cell, even in a code span.
    shown = shown.replace("|", "\\|")
    ticks = "`" * (1 + max(map(len, re.findall("`+", shown)), default=0))
    padding = " " * ("`" in (shown[0], shown[-1]))
    return f"{ticks}{padding}{shown}{padding}{ticks}"


def _block(language: str, *lines: str) -> str:
    """A block of code. No line may begin with backticks."""
    return "\n".join((f"```{language}", *lines, "```"))


def _prompts(rendering: Rendering | None, template_file: str) -> str:
    """A paragraph about the prompts that an adapter expects; empty if unknown. `template_file`
    names the place of a template that differs from that of the backbone's tokenizer."""
    if rendering is None or not rendering.kinds:
        return ""
    if not rendering.chat_templates:
        return "It was trained on texts without a chat template, so prompts need none."
    template = (
        template_file if rendering.own_template else "the chat template of the model's tokenizer"
    )
    also = ", and on texts without a template" if rendering.texts else ""
    return f"It was trained on chats that {template} renders{also}. Prompts need the same."


def _tokenizer_class(base_model: str) -> str:
    """The class of transformers that reads a backbone's tokenizer in the same way as jaxmux."""
    # AutoTokenizer may choose a class by the model's type, which can give other tokens.
    has_file = (Path(base_model) / "tokenizer.json").is_file()
    return "PreTrainedTokenizerFast" if has_file else "AutoTokenizer"


def _loaded_base(public: str | None, variable: str, reader: str, has_template: bool) -> list[str]:
    """The lines of code that load the backbone into a variable, and its tokenizer."""
    lines = [f"name = {json.dumps(public)}"]
    if public is None:
        lines = [
            'with open("adapter_config.json") as file:',
            '    name = json.load(file)["base_model_name_or_path"]',
        ]
    lines.append(f"{variable} = AutoModelForCausalLM.from_pretrained(name)")
    lines.append(f"tokenizer = {reader}.from_pretrained(name)")
    if has_template:
        lines.append('with open("chat_template.jinja") as file:')
        lines.append("    tokenizer.chat_template = file.read()")
    return lines


def _use_with_peft(public: str | None, reader: str, has_template: bool) -> str:
    return _block(
        "python",
        *_IMPORT_JSON[: 2 * (public is None)],
        "from peft import PeftModel",
        f"from transformers import AutoModelForCausalLM, {reader}",
        "",
        _HERE,
        *_loaded_base(public, "base", reader, has_template),
        'model = PeftModel.from_pretrained(base, ".")',
    )


def _use_with_adapters(public: str | None, reader: str, has_template: bool) -> str:
    return _block(
        "python",
        *_IMPORT_JSON[: 2 * (public is None)],
        "import adapters",
        f"from transformers import AutoModelForCausalLM, {reader}",
        "",
        _HERE,
        *_loaded_base(public, "model", reader, has_template),
        "adapters.init(model)",
        'model.load_adapter(".", with_head=False, use_safetensors=True, set_active=True)',
    )


def _use_with_vllm(
    settings: Mapping[str, Any], public: str | None, title: str, merges: bool, has_template: bool
) -> str:
    """How to serve an adapter with vLLM, or how to convert it for vLLM."""
    merge = "`jaxmux export --merge` makes a checkpoint that vLLM loads."
    not_loaded = ("use_dora", "rank_pattern", "alpha_pattern", "trainable_token_indices")
    if settings.get("peft_type") == "LORA" and not any(settings.get(key) for key in not_loaded):
        ranks = [rank for rank in _VLLM_RANKS if rank >= settings["r"]]
        if not ranks:
            return f"vLLM has no room for rank {settings['r']}. {merge}"
        base = f'"$({_READ_NAME})"' if public is None else shlex.quote(public)
        return _block(
            "sh",
            _HERE,
            f"vllm serve {base} --enable-lora --max-lora-rank {ranks[0]} "
            f"--lora-modules {shlex.quote(spaced(title))}=."
            + " --chat-template chat_template.jinja"
            * has_template,
        )
    if settings.get("peft_type") == "VERA" or settings.get("rank_pattern"):
        return "`jaxmux export --serving` makes a LoRA adapter of it that vLLM loads."
    return f"vLLM does not load this kind. {merge}" if merges else "vLLM does not load this kind."
