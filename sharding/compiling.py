"""Compiles the programs that meshes would run, without running them.

A thread that does what an engine does, but within `only_compiling`, compiles all of the engine's
programs while the engine itself trains. Shapes with shardings take the place of its arrays.
"""

from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from typing import Any

import jax

from jaxmux.pallas_kernels.compilation import compiled

_only_compiling: ContextVar[bool] = ContextVar("only_compiling", default=False)


@contextmanager
def only_compiling() -> Iterator[None]:
    """A context in which meshes run and copy nothing: `StageMesh.run` compiles the program, and
    arrays are `jax.ShapeDtypeStruct` with a sharding. Other threads are not affected."""
    token = _only_compiling.set(True)
    try:
        yield
    finally:
        _only_compiling.reset(token)


def compiles_only() -> bool:
    """Whether the caller is within `only_compiling`."""
    return _only_compiling.get()


def compiled_results(program: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a program.

    Args:
      program: a function from `jax.jit`.
      *arguments: its arguments; shapes may take the place of arrays.

    Returns:
      The shapes, dtypes and shardings of its results.
    """
    lowered = program.lower(*arguments)
    shardings = compiled(lowered).output_shardings
    return jax.tree.map(_shape, lowered.out_info, shardings)


def shapes_of(tree: Any, sharding: Any = None) -> Any:
    """Shapes, dtypes and shardings of arrays.

    Args:
      tree: the arrays, or their shapes.
      sharding: one sharding for all of them, or a tree like `tree`; None takes their own.
    """
    if sharding is None:
        return jax.tree.map(lambda x: _shape(x, x.sharding), tree)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _shape(x, sharding), tree)
    return jax.tree.map(_shape, tree, sharding)


def in_threads(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """The results of a function for several values, each computed in a thread, which is within
    `only_compiling` if the caller is.

    Args:
      function: the function. The first of its exceptions is raised.
      values: the values.
    """
    with ThreadPoolExecutor() as threads:
        own = [threads.submit(copy_context().run, function, value) for value in values]
        return [each.result() for each in own]


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
