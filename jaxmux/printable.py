"""Text of others, such as names of files and words of a model, without unprintable characters:
control characters, which a terminal obeys, line separators, and halves of surrogate pairs."""


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
