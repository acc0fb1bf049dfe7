"""Hints for names that a user has misspelt."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean NAME?" with the most similar of the known names, or an empty text if
    none is similar.

    Args:
      name: the name that is unknown.
      known: the names that are known.
    """
    similar = get_close_matches(name, list(known), n=1)
    return f"did you mean {similar[0]}?" if similar else ""
