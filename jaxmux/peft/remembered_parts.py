"""Remembers parts of a backbone's weights that take long to compute, for further tasks."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from weakref import WeakKeyDictionary

from jaxmux.pallas_kernels.grouped_lora import Factors

from .kind import BaseTensors

# Most bytes for each backbone. Parts that were not used for longest are forgotten first.
_MOST_BYTES = 2**30

# What is remembered of a backbone is gone with the function that gives its tensors.
_known: WeakKeyDictionary[BaseTensors, OrderedDict[Hashable, Factors]] = WeakKeyDictionary()
# Tasks are prepared in several threads.
_lock = threading.Lock()


def remembered(base: BaseTensors, key: Hashable, compute: Callable[[], Factors]) -> Factors:
    """The result of `compute`, or what it returned for the same key and backbone before.

    Args:
      base: function that gives the tensors of the backbone.
      key: everything else on which the result depends.
      compute: function that returns NumPy arrays, which must not be changed.
    """
    with _lock:
        own = _known.setdefault(base, OrderedDict())
        if key in own:
            own.move_to_end(key)
            return own[key]
    found = compute()
    with _lock:
        own[key] = found
        while len(own) > 1 and sum(a.nbytes + b.nbytes for a, b in own.values()) > _MOST_BYTES:
            own.popitem(last=False)
    return found
