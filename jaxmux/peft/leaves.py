"""Describes the arrays of a pool: their shapes, the names of their axes, and whether they are
trained.

An adapter kind describes its pool as a tree of `LeafSpec`. The code that stores, pads, selects or
updates the state of a slot uses only these descriptions and knows no adapter kind.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

AXES = ("copy", "layer", "first", "last", "slot", "rank", "input", "output", "sum")


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """Description of one array of adapters or of their training state, without its values.

    The arrays of all tasks are stacked in a *pool*, in which every task has a *slot*. All slots
    have the largest rank and all modules (adapted linears) of any task; ranks and modules that a
    task does not have are padding.

    Attributes:
      shape: size of each axis.
      axes: name of each axis:

        - "layer": the layers of the backbone.
        - "first": size 1; the array belongs to the backbone before its layers, and lies on the
          devices of the first layer.
        - "last": size 1; the array belongs to the backbone after its layers, and lies on the
          devices of the last layer.
        - "slot": the tasks.
        - "rank": the rank of the pool, or of one task.
        - "input", "output": the width of the adapted linear.
        - "sum": the sums that are kept of a global batch.
        - "copy": summands on several devices; the array means their sum.

        No name occurs twice. An array has at most one of "layer", "first" and "last".
      trained: whether the array has gradients, optimizer moments and weight decay; False for data
        that the task needs but does not train.
      padding: value in the ranks, layers and modules that a slot's task does not have: the value
        that leaves the backbone's output unchanged, 0 or 1.
      dtype: name of the dtype.

    Raises:
      ValueError: `axes` has an unknown or repeated name or another length than `shape`, or an array
        with a rank axis is not padded with 0. (The gradients of padded ranks are 0 only if their
        values are 0.)
    """

    shape: tuple[int, ...]
    axes: tuple[str, ...]
    trained: bool = True
    padding: float = 0.0
    dtype: str = "float32"

    def __post_init__(self):
        known = all(axis in AXES for axis in self.axes)
        if not known or len(set(self.axes)) != len(self.axes) or len(self.shape) != len(self.axes):
            raise ValueError(f"axes {self.axes} do not describe a leaf of shape {self.shape}")
        if "rank" in self.axes and self.padding:
            raise ValueError(f"a leaf with a rank axis is padded with 0, not {self.padding}")

    @property
    def slot_axis(self) -> int:
        """Index of the axis "slot". Raises ValueError if there is none."""
        return self.axes.index("slot")

    @property
    def place(self) -> int:
        """For an array without the axis "layer", the index of the layer on whose devices it lies: 0
        or -1."""
        return -1 if "last" in self.axes else 0

    @property
    def divides_layers(self) -> bool:
        """Whether a part of the backbone may hold only some of this array: its own layers, or all
        or nothing. Every part holds other arrays whole."""
        return bool({"layer", "first", "last"} & {*self.axes})

    def of_layers(self, first: int, layers: int, to_end: bool) -> "LeafSpec":
        """Describes the part of this array that `layers` consecutive layers from `first` on hold.
        `to_end` says whether they include the backbone's last layer.

        If an array has the axis "first" but the first layer is not included, or has the axis "last"
        but the last layer is not included, the part is a single 0 for each slot. (XLA cannot
        compile all programs with empty arrays.)
        """
        sizes = {"layer": layers}
        if self._is_elsewhere(first, to_end):
            sizes = dict.fromkeys(set(AXES) - {"copy", "slot"}, 1)
        pairs = zip(self.axes, self.shape, strict=True)
        return dataclasses.replace(self, shape=tuple(sizes.get(axis, n) for axis, n in pairs))

    def _is_elsewhere(self, first: int, to_end: bool) -> bool:
        return ("first" in self.axes and first > 0) or ("last" in self.axes and not to_end)

    def cut(self, value: Any, first: int, layers: int, to_end: bool) -> Any:
        """Cuts out the values that some consecutive layers hold, as `of_layers` describes them.
        `first` and `to_end` refer to `value`, which may itself belong to a part of the backbone."""
        if "layer" in self.axes:
            return value[(*(slice(None),) * self.axes.index("layer"), slice(first, first + layers))]
        if not self._is_elsewhere(first, to_end):
            return value
        pairs = zip(self.axes, value.shape, strict=True)
        return np.zeros([n if axis in ("copy", "slot") else 1 for axis, n in pairs], value.dtype)

    def joined(self, values: Sequence[Any], concatenate: Callable[..., Any]) -> Any:
        """Joins the values of consecutive parts of the backbone, given in order: the inverse of
        `cut`. `concatenate` is NumPy's or JAX's function."""
        if "layer" not in self.axes:
            return values[self.place]
        if len(values) == 1:
            return values[0]
        return concatenate(values, self.axes.index("layer"))

    def of_rank(self, rank: int) -> "LeafSpec":
        """Describes the same array with another size of the axis "rank", if it has this axis."""
        pairs = zip(self.axes, self.shape, strict=True)
        shape = tuple(rank if axis == "rank" else n for axis, n in pairs)
        return dataclasses.replace(self, shape=shape)

    def of_slot(self) -> "LeafSpec":
        """Describes the same array for a single slot, without the slot axis. Raises ValueError if
        there is no slot axis."""
        at = self.slot_axis
        return dataclasses.replace(
            self,
            shape=self.shape[:at] + self.shape[at + 1 :],
            axes=self.axes[:at] + self.axes[at + 1 :],
        )

    def zero_padded(self) -> "LeafSpec":
        """Describes the gradients or moments of this array, which are padded with 0."""
        return dataclasses.replace(self, padding=0.0)

    def empty(self) -> jax.Array:
        """A new array in which every value is `padding`, as in a pool without tasks."""
        return jnp.full(self.shape, self.padding, self.dtype)


class Layout:
    """A hashable wrapper of a tree of `LeafSpec`, for use as a static argument of a jitted
    function. Compiled functions read from it which axis of each array counts the tasks. Two layouts
    are equal if their trees have equal structures and equal descriptions."""

    def __init__(self, tree: Any):
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        self._key = tuple(leaves), structure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def trained(specs: Any, tree: Any) -> Any:
    """Returns a copy of a tree with None, which JAX treats as an empty subtree, in place of every
    leaf that is not trained. `specs` is a tree of `LeafSpec` with the same structure; the leaves of
    `tree` may be arrays or descriptions."""
    return jax.tree.map(lambda spec, leaf: leaf if spec.trained else None, specs, tree)


def with_trained(specs: Any, tree: Any, replacement: Any) -> Any:
    """Returns a copy of a tree with new trained leaves: the inverse of `trained`. `replacement` has
    the form of `trained`'s result."""
    return jax.tree.map(
        lambda spec, leaf, new: new if spec.trained else leaf, specs, tree, replacement
    )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by their path in the tree, for example "adapter/mlp.up_proj/a"."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
