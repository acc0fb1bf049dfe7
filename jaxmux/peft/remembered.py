"""Remembers what takes long to compute of a backbone's weights, for further tasks."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import jax

from .kind import BaseTensors

# Most bytes for each backbone. What was not used for longest is forgotten first.
_MOST_BYTES = 2**30


class _OfBackbone(NamedTuple):
    """By key, the results that are known, and those that are being computed."""

    results: OrderedDict[Hashable, Any]
    coming: dict[Hashable, Future[Any]]


# What is remembered of a backbone is gone with the function that gives its tensors.
_known: WeakKeyDictionary[BaseTensors, _OfBackbone] = WeakKeyDictionary()
# Tasks are prepared in several threads.
_lock = threading.Lock()


def remembered[T](base: BaseTensors, key: Hashable, compute: Callable[[], T]) -> T:
    """The result of `compute`, or what it returned for the same key and backbone before.

    If another thread is computing it, this one waits for its result. If that fails, it computes the
    result itself, so that no task fails by the error of another one.

    Args:
      base: function that gives the tensors of the backbone.
      key: everything else on which the result depends.
      compute: function that returns a tree of NumPy arrays, which must not be changed. It does not
        call `remembered`.
    """
    while True:
        with _lock:
            own = _known.setdefault(base, _OfBackbone(OrderedDict(), {}))
            if key in own.results:
                own.results.move_to_end(key)
                return own.results[key]
            other = own.coming.get(key)
            if other is None:
                own.coming[key] = coming = Future()
                break
        if other.exception() is None:
            return other.result()
    try:
        found = compute()
    except BaseException as e:
        with _lock:
            del own.coming[key]
        coming.set_exception(e)
        raise
    with _lock:
        del own.coming[key]
        own.results[key] = found
        while len(own.results) > 1 and _bytes(own.results) > _MOST_BYTES:
            own.results.popitem(last=False)
    coming.set_result(found)
    return found


def _bytes(results: OrderedDict[Hashable, Any]) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(list(results.values())))
