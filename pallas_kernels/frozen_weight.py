"""A frozen weight matrix and the number format in which it is stored.

The model code multiplies by a weight only through `FrozenWeight`, and a kernel reads `values` only
after it has checked `format`. A new number format is therefore added here and in the kernels that
support it, and nowhere else. The *compute dtype*, that of activations and gradients, is independent
of the format: it is the dtype of the activation that a product is given.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

# In these formats the stored values are the weights themselves, in the dtype of the same name.
FORMATS = ("bfloat16", "float16", "float32")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenWeight:
    """The weight matrix W [k, n] of one linear, or a stack [L, k, n] of those of all layers.

    It is a pytree of `values` and `scales`, so that transformations, shardings and slices of stacks
    apply to it leaf by leaf. Convert to another format with `astype`, not by mapping over leaves,
    which would leave `format` as it was.

    Attributes:
      values: the stored numbers, [k, n] or [L, k, n]; a `jax.ShapeDtypeStruct` in abstract weights.
      scales: factors by which stored numbers are multiplied; None in formats that have none.
      format: name of the number format, one of `FORMATS`.
    """

    values: Any
    scales: Any
    format: str = dataclasses.field(metadata={"static": True})

    @classmethod
    def of(cls, values: Float[Array, "*L k n"]) -> "FrozenWeight":
        """A weight that is stored as it is given.

        Raises:
          ValueError: the dtype of `values` is not one of `FORMATS`.
        """
        name = str(values.dtype)
        if reason := unknown_format(name):
            raise ValueError(reason)
        return cls(values, None, name)

    @property
    def shape(self) -> tuple[int, ...]:
        """(k, n), or (L, k, n) for a stack."""
        return self.values.shape

    @property
    def input_size(self) -> int:
        """k, the width of the linear's input."""
        return self.shape[-2]

    @property
    def output_size(self) -> int:
        """n, the width of the linear's output."""
        return self.shape[-1]

    def stack_index(self, layer: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """Index of a layer in a stack [L, k, n]. A stack of a single layer holds the layer that is
        computed, whichever it is."""
        return layer if self.shape[0] > 1 else 0

    def at_layer(self, layer: Int[Array, ""] | int) -> "FrozenWeight":
        """The weight of one layer of a stack (see `stack_index`)."""
        index = self.stack_index(layer)
        return jax.tree.map(lambda leaf: leaf[index], self)

    def astype(self, dtype: Any) -> "FrozenWeight":
        """The same weight rounded to the format that is named like `dtype`."""
        return FrozenWeight.of(self.decoded(dtype))

    def decoded(self, dtype: Any = None) -> Float[Array, "*L k n"]:
        """The weights as floating-point numbers of a dtype; None for the dtype of the format.

        Raises:
          ValueError: the format is not one of `FORMATS`.
        """
        if reason := unknown_format(self.format):
            raise ValueError(reason)
        return self.values if dtype is None else self.values.astype(dtype)

    def matmul(self, x: Float[Array, "*N k"], dtype: Any = None) -> Float[Array, "*N n"]:
        """`x W` of a single layer's weight, in plain XLA.

        Args:
          x: activations, in the compute dtype.
          dtype: of the result and of the sums; None for that of `x`.

        Raises:
          ValueError: the format is not one of `FORMATS`.
        """
        return jnp.matmul(x, self.decoded(x.dtype), preferred_element_type=dtype)

    def matmul_transposed(self, dy: Float[Array, "*N n"]) -> Float[Array, "*N k"]:
        """`dy W^T` of a single layer's weight, in plain XLA: the gradient of `matmul` by `x`.

        Args:
          dy: gradients of outputs, in the compute dtype, which is also that of the result.

        Raises:
          ValueError: the format is not one of `FORMATS`.
        """
        return jnp.einsum("...n,kn->...k", dy, self.decoded(dy.dtype))


def unknown_format(name: str) -> str | None:
    """Why no weight can be stored in the format of this name; None if one can."""
    if name in FORMATS:
        return None
    return f"unknown weight format {name!r}; known: {', '.join(FORMATS)}"
