"""Hints for names that a user has misspelt."""

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns "did you mean NAME?" with the known name that is most similar to an unknown one. The
    text is empty if none is similar."""
    similar = get_close_matches(name, list(known), n=1)
    return f"did you mean {similar[0]}?" if similar else ""
