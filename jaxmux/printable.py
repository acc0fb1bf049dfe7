"""What people read on terminals and pages. Text of others, such as names of files and words of a
model, is shown without unprintable characters: control characters, which a terminal obeys, line
separators, and halves of surrogate pairs."""


def escaped(text: str, keep: str = "") -> str:
    """The text with escapes in place of unprintable characters, as in "\\x1b".

    Args:
      text: the text.
      keep: unprintable characters that stay as they are.
    """
    return "".join(c if c.isprintable() or c in keep else ascii(c)[1:-1] for c in text)


def spaced(text: str) -> str:
    """The text with a space in place of each unprintable character, so that it has one line."""
    return "".join(c if c.isprintable() else " " for c in text)


# The state of a task that has given an adapter before its last step.
STOPPED_EARLY = "stopped early"


def shown_state(state: str, reason: str | None) -> str:
    """The state of a task as people read it: "stopped early" if training has ended well before the
    last step, else the state itself.

    Args:
      state: the task's status in training, or the state of a task of a server.
      reason: why the task is in that state; None if there is nothing to say. A task that has
        succeeded has a reason only if it stopped early.
    """
    return STOPPED_EARLY if state == "succeeded" and reason else state
