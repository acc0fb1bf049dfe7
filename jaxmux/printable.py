"""Text for terminals and pages.

Text from elsewhere, such as names of files and words of a model, is shown without unprintable
characters: control characters, which a terminal obeys, line separators, and halves of surrogate
pairs. Names that are too wide for a table are broken between words.
"""

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console, ConsoleOptions
    from rich.measure import Measurement
    from rich.text import Text

# A word with the separators behind it. A comma between digits belongs to a number.
_WORD = re.compile(r"(?:[^\s_./=:;,+-]|(?<=\d),(?=\d))+[\s_./=:;,+-]*|[\s_./=:;,+-]+")


def escaped(text: str, keep: str = "") -> str:
    """Writes unprintable characters of a text as escapes such as "\\x1b".

    Args:
      text: the text.
      keep: unprintable characters that stay as they are.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def spaced(text: str) -> str:
    """Replaces each unprintable character of a text by a space, so that the text has one line."""
    return "".join(c if c.isprintable() else " " for c in text)


# The state of a task that ended with an adapter before its last step.
STOPPED_EARLY = "stopped early"


def shown_state(state: str, reason: str | None) -> str:
    """Returns the state of a task for people and files: "stopped early" if the task succeeded
    before its last step, else the state itself.

    Args:
      state: the task's status in training, or the state of a task of a server.
      reason: why the task is in that state, or None. A task that has succeeded has a reason only if
        it stopped early.
    """
    return STOPPED_EARLY if state == "succeeded" and reason else state


class Name:
    """A cell of a rich table with a text such as a name or a path. If the column is too narrow,
    the text is broken behind spaces, underscores, slashes and other separators; a word is broken
    only if it is wider than the column."""

    def __init__(self, text: str):
        self.text = text

    def __str__(self) -> str:
        return self.text

    def __rich_measure__(self, console: "Console", options: "ConsoleOptions") -> "Measurement":
        from rich.cells import cell_len
        from rich.measure import Measurement

        words = [word for line in self.text.split("\n") for word in _WORD.findall(line)]
        longest = max((cell_len(word.rstrip()) for word in words), default=0)
        widest = max(map(cell_len, self.text.split("\n")))
        return Measurement(longest, widest).clamp(max_width=options.max_width)

    def __rich_console__(self, console: "Console", options: "ConsoleOptions") -> Iterator["Text"]:
        from rich.cells import cell_len
        from rich.text import Text

        def fits(text: str) -> bool:
            return cell_len(text.rstrip()) <= options.max_width

        for line in self.text.split("\n"):
            shown = ""
            for part in re.findall(r"\s*\S+\s*|\s+", line):
                # A part that fits into one line is not broken.
                for word in [part] if fits(part) else _WORD.findall(part):
                    if shown and not fits(shown + word):
                        yield Text(shown.rstrip(), overflow="fold")
                        shown = ""
                    shown += word
            yield Text(shown.rstrip(), overflow="fold")
