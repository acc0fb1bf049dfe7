"""A frozen weight matrix and the number format in which it is stored.

The model code multiplies by a weight only through `FrozenWeight`, and a kernel reads `values` only
after it has checked `format`, or after `plain_weights` has decoded one layer for it. A new number
format is therefore added in `number_formats` and in the kernels that support it, and nowhere else.
The *compute dtype*, the dtype of activations and gradients, is independent of the format: a product
is computed in the dtype of its activation.

A weight whose format is not a dtype of activations is decoded right before each product, forward
and backward, and the decoded layer is freed after it. Both passes decode the same array, so XLA
would decode it once and keep the result from the forward to the backward pass. To prevent this, an
optimization barrier makes each decoding depend on the activation of its product.

Weights in float8 are not decoded. Activations and gradients are encoded too, with one scale for
each token, so that no token's numbers depend on another's. The scales of output channels leave the
sum of `x W`, and are multiplied into `dy` before it is encoded for `dy W^T`.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from . import number_formats

# In these formats the stored values are the weights, in the dtype of the same name.
PLAIN_FORMATS = ("bfloat16", "float16", "float32")
FORMATS = (*PLAIN_FORMATS, *number_formats.FORMATS)
# Products with weights in this format are computed in float8.
FLOAT8 = "float8"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class FrozenWeight:
    """The weight matrix W [k, n] of one linear, or the stack [L, k, n] of all layers.

    It is a pytree of `values` and `scales`, so that transformations, shardings and slices of stacks
    apply to it leaf by leaf. Convert to another format with `encoded` or `astype`, not by mapping
    over leaves, which would not change `format`.

    Attributes:
      values: the stored numbers, [k, n] or [L, k, n]; in the formats of `number_formats`, of the
        shape described there. A `jax.ShapeDtypeStruct` in abstract weights.
      scales: the numbers besides the values that decoding needs; None if the format has none.
      format: name of the number format, one of `FORMATS`.
      rounding: dtype to which decoded weights are rounded before any other conversion, like in the
        library that encoded them; None for no rounding.
    """

    values: Any
    scales: Any
    format: str = dataclasses.field(metadata={"static": True})
    rounding: str | None = dataclasses.field(default=None, metadata={"static": True})

    @classmethod
    def of(cls, values: Float[Array, "*L k n"]) -> "FrozenWeight":
        """A weight in the dtype of `values`; ValueError if that is not one of `PLAIN_FORMATS`."""
        name = str(values.dtype)
        if name not in PLAIN_FORMATS:
            raise ValueError(f"weights stored as {name}; known: {', '.join(PLAIN_FORMATS)}")
        return cls(values, None, name)

    @classmethod
    def encoded(cls, values: Float[Array, "*L k n"], format: str | None) -> "FrozenWeight":
        """A weight that is stored in a format of `number_formats`, or for None in the dtype of
        `values`. ValueError if there is no such format, or if it cannot store this shape."""
        if format is None:
            return cls.of(values)
        if format not in number_formats.FORMATS:
            raise ValueError(unknown_format(format) or f"{format} is the name of a dtype")
        form = number_formats.FORMATS[format]
        if form.encode is None:
            raise ValueError(f"weights are read in the format {format!r}, but never encoded in it")
        if values.shape[-2] % form.least_multiple:
            raise ValueError(
                f"a weight of {values.shape[-2]} rows and {values.shape[-1]} columns cannot be "
                f"stored in the format {format!r}; its rows have to be a multiple of "
                f"{form.least_multiple}"
            )
        return cls(*form.encode(values), format)

    @property
    def is_plain(self) -> bool:
        return self.format in PLAIN_FORMATS

    @property
    def shape(self) -> tuple[int, ...]:
        """(k, n), or (L, k, n) for a stack."""
        if self.is_plain:
            return self.values.shape
        return self._format().shape(self.values)

    @property
    def input_size(self) -> int:
        return self.shape[-2]

    @property
    def output_size(self) -> int:
        return self.shape[-1]

    def stack_index(self, layer: Int[Array, ""] | int) -> Int[Array, ""] | int:
        """Index of a layer in a stack [L, k, n]. A stack of a single layer always holds the layer
        that is computed, whatever its index in the model."""
        return layer if self.shape[0] > 1 else 0

    def at_layer(self, layer: Int[Array, ""] | int) -> "FrozenWeight":
        index = self.stack_index(layer)
        return jax.tree.map(lambda leaf: leaf[index], self)

    def astype(self, dtype: Any) -> "FrozenWeight":
        """The same weight rounded to the format that is named like `dtype`."""
        return FrozenWeight.of(self.decoded(dtype))

    def decoded(self, dtype: Any = None) -> Float[Array, "*L k n"]:
        """The weights as floating-point numbers of a dtype; None means the dtype of a plain format,
        or float32 for other formats. ValueError if the format is not one of `FORMATS`."""
        weights = self.values
        if not self.is_plain:
            weights = self._format().decode(self.values, self.scales)
        if self.rounding and dtype != self.rounding:
            # Without the barrier, XLA may leave out a conversion to a dtype and back.
            rounded = lax.optimization_barrier(weights.astype(self.rounding))
            weights = rounded.astype(weights.dtype)
        return weights if dtype is None else weights.astype(dtype)

    @property
    def is_divisible(self) -> bool:
        """Whether each part of the linear's input or output has separate values and scales."""
        return not isinstance(self.scales, number_formats.DoubleQuantised)

    def divisible(self) -> "FrozenWeight":
        """The same weights, stored so that they can be divided (see `is_divisible`). For nf4 the
        scales become float32, which takes 9% more memory. If the linear's input is no multiple of
        64, it takes twice as much memory: there is then a scale for so few weights that four
        devices can divide the input."""
        if self.is_divisible:
            return self
        absmax = number_formats.decode_absmax(self.scales)
        scales = number_formats.absmax_of_rows(absmax, self.values.shape, finer=4)
        return dataclasses.replace(self, scales=scales)

    def map_axes(self, function: Callable[[Any, tuple[str | None, ...]], Any]) -> "FrozenWeight":
        """The weight with each array replaced by the result of a function. The function gets the
        array and the names of its axes except L: "input" or "output" if the axis is divided
        together with the linear's input or output, else None."""
        if self.is_plain:
            return dataclasses.replace(self, values=function(self.values, ("input", "output")))
        values, scales = jax.tree.map(
            function, (self.values, self.scales), self._format().axes(self.values, self.scales)
        )
        return dataclasses.replace(self, values=values, scales=scales)

    def matmul(
        self,
        x: Float[Array, "*N k"],
        dtype: Any = None,
        layer: Int[Array, ""] | int | None = None,
    ) -> Float[Array, "*N n"]:
        """`x W`, in plain XLA, with `x` in the compute dtype. The result and the sums have the
        `dtype`, or that of `x` for None. If this is a stack, `layer` is the index of a layer, and
        no copy of the layer's stored numbers is kept for the backward pass. ValueError if the
        format is not one of `FORMATS`."""
        if self.is_plain:
            weight = self if layer is None else self.at_layer(layer)
            return jnp.matmul(x, weight.decoded(x.dtype), preferred_element_type=dtype)
        return _product(dtype, x, self, layer)

    def matmul_transposed(
        self,
        dy: Float[Array, "*N n"],
        layer: Int[Array, ""] | int | None = None,
        row_scales: Float[Array, "*N"] | None = None,
    ) -> Float[Array, "*N k"]:
        """`dy W^T`, in plain XLA, in the compute dtype of `dy`: the gradient of `matmul` by `x`. If
        this is a stack, `layer` is the index of a layer. `row_scales` are scales of the rows of
        `dy` in float8, from `shared_row_scales`; None to compute them from `dy`. ValueError if the
        format is not one of `FORMATS`."""
        if self.format == FLOAT8:
            weight = self if layer is None else self.at_layer(layer)
            return _float8_transposed(dy, weight, row_scales)
        dy, values = _tied_values(dy, self, layer)
        return jnp.einsum("...n,kn->...k", dy, values)

    def folded(self, dy: Float[Array, "*N n"]) -> Float[Array, "*N n"]:
        """`dy` times the scales of a single layer's output channels in float8, in float32."""
        return dy.astype(jnp.float32) * self.scales

    def _format(self) -> number_formats.NumberFormat:
        if reason := unknown_format(self.format):
            raise ValueError(reason)
        return number_formats.FORMATS[self.format]


def plain_weights(
    x: Float[Array, "N _"],
    weights: Sequence[FrozenWeight],
    layer: Int[Array, ""] | int,
    kept: str | None = None,
) -> tuple[Float[Array, "N _"], tuple[FrozenWeight, ...]]:
    """The weights of a layer for kernels that read values in the dtype of the activations.

    Args:
      x: the activations that the weights multiply. Use the returned `x` instead, so that weights
        are not decoded before the activations are computed.
      weights: stacks [L, k, n].
      kept: a format that the kernel reads, besides the plain ones.

    Returns:
      `x`, and each weight: unchanged if its format is plain or `kept`, else a stack of this one
      layer (see `FrozenWeight.stack_index`) in the dtype of `x`.
    """

    def is_read(weight: FrozenWeight) -> bool:
        return weight.is_plain or weight.format == kept

    x, encoded = _tied(x, tuple(each for each in weights if not is_read(each)))
    decoded = (FrozenWeight.of(each.at_layer(layer).decoded(x.dtype)[None]) for each in encoded)
    return x, tuple(each if is_read(each) else next(decoded) for each in weights)


def shared_row_scales(
    dys: Sequence[Float[Array, "N _"]],
    weights: Sequence[FrozenWeight],
    layer: Int[Array, ""] | int,
) -> Float[Array, " N"] | None:
    """The scales of rows in float8 with which several products `dy W^T` can be added up: for each
    row the largest scale of all terms; None if the weights are in another format. The products are
    those of linears that read the same input, with stacks [L, k, n] of weights."""
    if weights[0].format != FLOAT8:
        return None
    folded = (weight.at_layer(layer).folded(dy) for dy, weight in zip(dys, weights, strict=True))
    return reduce(jnp.maximum, map(number_formats.row_scales, folded))


def unknown_format(name: str) -> str | None:
    """Why no weight can be stored in the format of this name; None if weights can be."""
    if name in FORMATS:
        return None
    return f"unknown weight format {name!r}; known: {', '.join(FORMATS)}"


def _tied(x: Array, weights: tuple[FrozenWeight, ...]) -> tuple[Array, tuple[FrozenWeight, ...]]:
    """The arguments, with a barrier so that weights are decoded only after `x` is computed; without
    a barrier if all formats are plain."""
    if all(weight.is_plain for weight in weights):
        return x, weights
    return lax.optimization_barrier((x, weights))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(dtype, x, weight, layer):
    """`x W`; no decoded weights are kept for the backward pass."""
    if weight.format == FLOAT8:
        of_layer = weight if layer is None else weight.at_layer(layer)
        return _float8_product(x, of_layer).astype(x.dtype if dtype is None else dtype)
    x, values = _tied_values(x, weight, layer)
    return jnp.matmul(x, values, preferred_element_type=dtype)


def _product_forward(dtype, x, weight, layer):
    return _product(dtype, x, weight, layer), (jnp.zeros((), x.dtype), weight, layer)


def _product_backward(_, residuals, dy):
    like, weight, layer = residuals
    return weight.matmul_transposed(dy.astype(like.dtype), layer), None, None


_product.defvjp(_product_forward, _product_backward)


def _float8_product(x, weight):
    scales = number_formats.row_scales(x)
    values = number_formats.quantised_rows(x, scales)
    return _float8_matmul(values, weight.values, 1) * scales[..., None] * weight.scales


def _float8_transposed(dy, weight, row_scales):
    folded = weight.folded(dy)
    scales = number_formats.row_scales(folded) if row_scales is None else row_scales
    values = number_formats.quantised_rows(folded, scales)
    return (_float8_matmul(values, weight.values, 0) * scales[..., None]).astype(dy.dtype)


def _float8_matmul(x, values, axis: int):
    """The product over the last axis of `x` and an axis of `values`, with float32 sums."""
    dimensions = (((x.ndim - 1,), (axis,)), ((), ()))
    return lax.dot_general(x, values, dimensions, preferred_element_type=jnp.float32)


def _tied_values(x, weight, layer):
    """`x`, and the weights of a layer in the dtype of `x`, decoded only after `x` is computed."""
    x, (weight,) = _tied(x, (weight,))
    return x, (weight if layer is None else weight.at_layer(layer)).decoded(x.dtype)
