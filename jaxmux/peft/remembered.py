"""A cache, shared by all tasks, of values that take long to compute from a backbone's weights."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax

from .kind import BaseTensors

# Maximum number of bytes for each backbone. The least recently used results are dropped first.
_MOST_BYTES = 2**30


class _OfBackbone(NamedTuple):
    """The results that are known, and the results that are being computed, by key."""

    results: OrderedDict[Hashable, Any]
    coming: dict[Hashable, Future[Any]]


# The results of a backbone are dropped together with the function that returns its tensors.
_known: WeakKeyDictionary[BaseTensors, _OfBackbone] = WeakKeyDictionary()
# Tasks are prepared in several threads.
_lock = threading.Lock()


def remembered[T](base: BaseTensors, key: Hashable, compute: Callable[[], T]) -> T:
    """Returns the result of `compute`, or of an earlier call with the same key and backbone.

    If another thread is computing the result, this thread waits. If the other thread fails, this
    thread computes the result itself, so that no task fails because of another task's error.

    Args:
      base: returns the tensors of the backbone.
      key: everything else on which the result depends.
      compute: returns a tree of NumPy arrays, which must not be changed. It must not call
        `remembered`.
    """
    while True:
        with _lock:
            cache = _known.setdefault(base, _OfBackbone(OrderedDict(), {}))
            if key in cache.results:
                cache.results.move_to_end(key)
                return cache.results[key]
            other = cache.coming.get(key)
            if other is None:
                cache.coming[key] = coming = Future()
                break
        if other.exception() is None:
            return other.result()
    try:
        result = compute()
    except BaseException as e:
        with _lock:
            del cache.coming[key]
        coming.set_exception(e)
        raise
    with _lock:
        del cache.coming[key]
        cache.results[key] = result
        while len(cache.results) > 1 and _bytes(cache.results) > _MOST_BYTES:
            cache.results.popitem(last=False)
    coming.set_result(result)
    return result


def _bytes(results: OrderedDict[Hashable, Any]) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(list(results.values())))
