"""The choice among the implementations of an op."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

# By name, the function and its refusal: why it cannot serve a call. The first that can is picked.
Implementations = Mapping[str, tuple[Callable[..., Any], Callable[..., str | None]]]


def choose(
    op: str, implementations: Implementations, wanted: str | None, arguments: tuple, call: str
) -> Callable[..., Any]:
    """The wanted implementation, or the first that does not refuse the arguments.

    Args:
      op: the public function's name, for errors.
      wanted: None picks, and logs which and why.
      arguments: of the refusals.
      call: what is called, for the log.

    Raises:
      ValueError: no such implementation, or it cannot serve these arguments.
    """
    if wanted is not None and wanted not in implementations:
        known = ", ".join(implementations)
        raise ValueError(f"unknown implementation {wanted!r} of {op}; known: {known}")
    refusals = {}
    for name in [wanted] if wanted else implementations:
        function, refusal = implementations[name]
        refusals[name] = refusal(*arguments)
        if refusals[name] is None:
            break
    else:
        raise ValueError(f"{op}: {_reasons(refusals)}")
    if wanted is None:
        _log_choice(call, name, _reasons(refusals))
    return function


def _reasons(refusals: dict[str, str | None]) -> str:
    found = [f"{name} cannot serve it: {reason}" for name, reason in refusals.items() if reason]
    return "; ".join(found)


@functools.cache  # A choice is worth one line, not one per layer.
def _log_choice(call: str, name: str, reasons: str) -> None:
    logging.getLogger("jaxmux").info("%s: %s%s", call, name, f" ({reasons})" if reasons else "")
