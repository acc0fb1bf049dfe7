"""Chooses among the implementations of an op."""

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

# By name, in order of preference: the function, and its refusal. A refusal takes the arguments of a
# call and returns the reason why the function cannot serve the call, or None if it can.
Implementations = Mapping[str, tuple[Callable[..., Any], Callable[..., str | None]]]


def choose(
    op: str, implementations: Implementations, wanted: str | None, arguments: tuple, call: str
) -> Callable[..., Any]:
    """The function of the implementation with the name `wanted`; or for None, of the first one that
    does not refuse the call, with a log of the choice and its reason. `op` is the name of the
    public function, for errors; `arguments` are those of the refusals; `call` describes the call in
    the log. ValueError if there is no such implementation, or if it cannot serve the call."""
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
    reasons = [f"{name} cannot serve it: {reason}" for name, reason in refusals.items() if reason]
    return "; ".join(reasons)


@functools.cache  # Logs a choice once, not once for each layer.
def _log_choice(call: str, name: str, reasons: str) -> None:
    logging.getLogger("jaxmux").info("%s: %s%s", call, name, f" ({reasons})" if reasons else "")
