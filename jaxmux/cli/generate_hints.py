"""Hints of `jaxmux generate` at prompts of another kind than adapters were trained on."""

from collections.abc import Mapping
from pathlib import Path

from jaxmux.peft import trained_on

# Most names shown in a hint.
_MOST = 3


def hint_at_kind(are_chats: bool, folders: Mapping[str, Path]) -> str:
    """A line that names the option which gives adapters the kind of prompts on which they were
    trained; empty if they already get that kind, or their folders do not tell the kind.

    Args:
      are_chats: whether the prompts are chats.
      folders: by label, the folders of the adapters.
    """
    expected = "texts" if are_chats else "chats"
    names = [label for label, folder in folders.items() if trained_on(folder) == expected]
    if not names:
        return ""
    shown = ", ".join(names[:_MOST])
    if len(names) > _MOST:
        shown += f" and {len(names) - _MOST} more"
    were = f"{shown} {'was' if len(names) == 1 else 'were'} trained on {expected}"
    if are_chats:
        return f"hint: {were}, not on chats; use --prompt without --template"
    return f"hint: {were}; use --template, or --chat"
