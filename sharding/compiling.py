"""Compiles the programs that meshes would run, without running them.

A thread can do the same work as an engine within `only_compiling`, on shapes with shardings in
place of arrays. This compiles all of the engine's programs while the engine itself trains.
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
    """Within this context, meshes run and copy nothing: `StageMesh.run` only compiles the program,
    and every array is a `jax.ShapeDtypeStruct` with a sharding. Other threads are not affected."""
    token = _only_compiling.set(True)
    try:
        yield
    finally:
        _only_compiling.reset(token)


def compiles_only() -> bool:
    return _only_compiling.get()


def compiled_results(program: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function from `jax.jit` for these arguments, arrays or their shapes. Returns the
    shapes, dtypes and shardings of its results."""
    lowered = program.lower(*arguments)
    shardings = compiled(lowered).output_shardings
    return jax.tree.map(_shape, lowered.out_info, shardings)


def shapes_of(tree: Any, sharding: Any = None) -> Any:
    """Shapes, dtypes and shardings of arrays. `sharding` is one for all of the arrays, or a tree
    like `tree`; None takes the sharding that each array has."""
    if sharding is None:
        return jax.tree.map(lambda x: _shape(x, x.sharding), tree)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _shape(x, sharding), tree)
    return jax.tree.map(_shape, tree, sharding)


def in_threads(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """The function's result for each value. Each is computed in a thread, which is within
    `only_compiling` if the caller is. Raises the first exception of the function."""
    values = list(values)
    if len(values) < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(copy_context().run, function, value) for value in values]
        return [result.result() for result in results]


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
