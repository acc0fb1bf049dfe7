"""Remembers what takes long to compute of a backbone's weights, for further tasks."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any
from weakref import WeakKeyDictionary

import jax

from .kind import BaseTensors

# Most bytes for each backbone. What was not used for longest is forgotten first.
_MOST_BYTES = 2**30

# What is remembered of a backbone is gone with the function that gives its tensors.
_known: WeakKeyDictionary[BaseTensors, OrderedDict[Hashable, Any]] = WeakKeyDictionary()
# Tasks are prepared in several threads.
_lock = threading.Lock()


def remembered[T](base: BaseTensors, key: Hashable, compute: Callable[[], T]) -> T:
    """The result of `compute`, or what it returned for the same key and backbone before.

    Args:
      base: function that gives the tensors of the backbone.
      key: everything else on which the result depends.
      compute: function that returns a tree of NumPy arrays, which must not be changed.
    """
    with _lock:
        own = _known.setdefault(base, OrderedDict())
        if key in own:
            own.move_to_end(key)
            return own[key]
    found = compute()
    with _lock:
        own[key] = found
        while len(own) > 1 and _bytes(own) > _MOST_BYTES:
            own.popitem(last=False)
    return found


def _bytes(own: OrderedDict[Hashable, Any]) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(list(own.values())))
