"""Arrays of a pool, described before they exist: their sizes, the names of their axes, and whether
they are trained.

An adapter kind describes its pool as a tree of `LeafSpec`. Everything that stores, pads, selects or
updates the state of a slot works from these descriptions and knows no adapter kind.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

AXES = ("layer", "slot", "rank", "input", "output")


@dataclasses.dataclass(frozen=True)
class LeafSpec:
    """One array.

    Attributes:
      shape: size of each axis.
      axes: name of each axis: "layer" (of the backbone), "slot" (the task's place in the pool),
        "rank" (padded to the pool's rank), "input" or "output" (width of the adapted linear).
      trained: whether the array has gradients, moments and weight decay. Other arrays are frozen
        data of their slot.
      padding: value in ranks, layers and modules that the task of a slot does not have: 0, or 1
        where 1 leaves the backbone's output as it is.
      dtype: name of the dtype.

    Raises:
      ValueError: `axes` does not describe `shape`, or a leaf with a rank axis is not padded with 0.
        (The gradients of padded ranks are 0 only if their values are.)
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
        return self.axes.index("slot")

    def of_slot(self) -> "LeafSpec":
        """The array of one slot: this one without its slot axis."""
        at = self.slot_axis
        return dataclasses.replace(
            self,
            shape=self.shape[:at] + self.shape[at + 1 :],
            axes=self.axes[:at] + self.axes[at + 1 :],
        )

    def zero_padded(self) -> "LeafSpec":
        """An array of the same shape that holds gradients or moments."""
        return dataclasses.replace(self, padding=0.0)

    def empty(self) -> jax.Array:
        """The array of a pool in which no slot is taken."""
        return jnp.full(self.shape, self.padding, self.dtype)


class Layout:
    """A tree of `LeafSpec` that can be hashed, so that it can be a static argument of a jitted
    function.

    Attributes:
      tree: the tree.
    """

    def __init__(self, tree: Any):
        self.tree = tree
        leaves, structure = jax.tree.flatten(tree)
        self._key = tuple(leaves), structure

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Layout) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)


def trained(specs: Any, tree: Any) -> Any:
    """The tree with None, which JAX takes for an empty subtree, in place of leaves that `specs`
    does not declare as trained."""
    return jax.tree.map(lambda spec, leaf: leaf if spec.trained else None, specs, tree)


def with_trained(specs: Any, tree: Any, replacement: Any) -> Any:
    """The tree with its trained leaves replaced: the inverse of `trained`."""
    return jax.tree.map(
        lambda spec, leaf, new: new if spec.trained else leaf, specs, tree, replacement
    )


def named_leaves(tree: Any) -> dict[str, Any]:
    """The leaves by their path in the tree, for example `adapter/mlp.up_proj/a`."""
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
