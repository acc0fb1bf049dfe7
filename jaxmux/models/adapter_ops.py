"""The operations of adapter kinds at the points of a decoder layer (MuxTune 3.2: Adapter,
Aggregate).

Low-rank adapters of linears are part of the frozen products (see `adapted_linears`). Every other
kind has an `AdapterOp`. A *point* is a linear ("self_attn.q_proj"), a norm ("input_layernorm",
"post_attention_layernorm", or "norm" after the last layer), a sub-block ("self_attn" or "mlp"), the
embedding ("embed_tokens"), the head ("lm_head"), or embedding and head together if they are one
table ("tied_embedding"). The arrays of a kind are stored by the points that the kind changes.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import Factors
from jaxmux.pallas_kernels.slot_values import rows_of_tokens, values_of_chunks

# The kind whose arrays are the factors of linears.
LOW_RANK_KIND = "lora"
# Name of an array in kinds that have low-rank factors: float32 [L, T], the scale of their product.
SCALE = "scale"
# If tasks have dropout, these keys lie beside the arrays at the head of kinds with low-rank
# factors: the `token_counters` [chunks, l] of the tokens, and the rate of dropout, [chunks].
COUNTERS, RATE = "counters", "rate"
# Key of the owner slot of every chunk. It lies beside arrays of all slots (`AdapterOp.of_slots`).
CHUNK_SLOT = "chunk_slot"
# The norm after the last layer. Its arrays also have an axis of layers, of which only the last
# entry is used, so they lie on the devices of the last layer.
FINAL_NORM = "norm"
# The embedding of tokens. Its arrays have the axis "first" instead of the axis of layers.
EMBEDDING = "embed_tokens"
# The embedding's name in Hugging Face's checkpoints.
EMBEDDING_TENSOR = "model.embed_tokens.weight"
# The head. Its arrays have the axis "last" instead of the axis of layers.
HEAD = "lm_head"
# The embedding and the head if they are one table. Its arrays have the axis "first".
TIED = "tied_embedding"
# The points at which logits are changed.
AT_HEAD = (TIED, HEAD)
# The points that are not in a layer.
OUTSIDE = (EMBEDDING, FINAL_NORM, *AT_HEAD)


class AdapterOp:
    """The operations of an adapter kind at the points of a layer. A subclass overrides the methods
    of the points that its kind changes; the methods here return their input.

    All methods work on chunks, each of which belongs to one task. `own` holds the kind's arrays at
    the point, for the owner of every chunk: a tree of float32 arrays [chunks, ...]. For tasks of
    other kinds, and for layers that a task does not adapt, these arrays hold the padding of their
    `LeafSpec`; a method must then return its input bit for bit. No method may mix values of two
    chunks. JAX differentiates the methods.

    Instances are static arguments of compiled programs, so they are hashable and do not change.

    Attributes:
      of_slots: names of arrays that are too large to be gathered for every chunk. They belong to no
        layer and are not trained. `own` holds them for all slots, [T, ...], and the owner slot of
        every chunk as `CHUNK_SLOT`.
      by_token: names of arrays at the embedding that have a row for every token of the vocabulary,
        [1, T, vocab, ...]. `own` holds the rows of the tokens of every chunk, [chunks, l, ...].
      low_rank: whether adapters also have low-rank factors. One of the kind's arrays is then
        `SCALE`, the scale of a linear's low-rank product.
      paired_ranks: whether ranks 2i and 2i + 1 of the low-rank factors belong together. They are
        then A and A - A0 in the first factor, and B - B0 and B0 in the second factor, for trained A
        and B and constants A0 and B0. The product is thus A B - A0 B0, without the rounding errors
        of two large products. The rank is even.
    """

    of_slots: frozenset[str] = frozenset()
    by_token: frozenset[str] = frozenset()
    low_rank: bool = False
    paired_ranks: bool = False

    def embedding_output(
        self, own: Any, x: Float[Array, "chunks l d"], tokens: Int[Array, "chunks l"]
    ) -> Float[Array, "chunks l d"]:
        """The residual stream before the first layer, from the embeddings `x` of the tokens. At the
        position of a virtual token, `x` has no meaning."""
        return x

    def changes_input(self, own: Any) -> bool:
        """Whether `linear_input` changes the input of a linear that has these arrays. Then linears
        that otherwise read the same input are applied one by one."""
        return False

    def linear_input(self, own: Any, x: Float[Array, "chunks l k"]) -> Float[Array, "chunks l k"]:
        """The input of a linear, from the input `x` of the frozen linear."""
        return x

    def product(self, own: Any, y: Float[Array, "chunks l n"]) -> Float[Array, "chunks l n"]:
        """The product of a linear, from the sum `y` of the frozen and the low-rank product. The
        bias is added afterwards. The method must be linear in `y`, because each tensor-parallel
        device may have only a summand of `y`."""
        return y

    def after_update(
        self,
        own: Any,
        factors: Factors,
        weight: FrozenWeight,
        total: Callable[[Array], Array],
    ) -> dict[str, Array]:
        """New values, by name, of arrays that are not trained but depend on trained ones. Called
        after every update of a kind with low-rank factors, for several slots at once. If the linear
        is divided among devices, the arguments are this device's part.

        Args:
          own: the kind's arrays at a linear in one layer, by name, [slots, ...].
          factors: the low-rank factors a [slots, k, R] and b [slots, R, n].
          weight: the frozen weight [k, n].
          total: sums over all devices if the linear's input is divided among them.
        """
        return {}

    def linear_output(
        self,
        own: Any,
        x: Float[Array, "chunks l k"],
        y: Float[Array, "chunks l n"],
        first_column: Int[Array, ""] | int,
    ) -> Float[Array, "chunks l n"]:
        """The output of a linear, from its output `y` with bias and low-rank adapter. The method
        must be linear in `x` and `y` together, because each tensor-parallel device may have only
        some columns of the input `x`, from `first_column` on, and a summand of `y`."""
        return y

    def norm_output(
        self, own: Any, x: Float[Array, "chunks l d"], h: Float[Array, "chunks l d"], eps: float
    ) -> Float[Array, "chunks l d"]:
        """The output of a norm, from its input `x` and the output `h` of the frozen norm. `eps` is
        the number that the norm adds to the mean square."""
        return h

    def block_output(
        self, own: Any, before: Float[Array, "chunks l d"], h: Float[Array, "chunks l d"]
    ) -> Float[Array, "chunks l d"]:
        """The summand that a sub-block adds to the residual stream, from the stream `before` the
        sub-block and the output `h` of the frozen sub-block."""
        return h

    def logits(
        self,
        own: Any,
        hidden: Float[Array, "chunks l d"],
        logits: Float[Array, "chunks l vocab"],
        first_token: Int[Array, ""] | int,
    ) -> Float[Array, "chunks l vocab"]:
        """The logits of the tokens. If this device has only a part of the vocabulary, it begins at
        `first_token`. `hidden` is the input of the head; `logits` is the float32 product of input
        and head."""
        return logits


# By name of the kind, the arrays of all slots, or gradient accumulators. For `LOW_RANK_KIND` these
# are factors by module path; for other kinds, trees by point.
AllAdapters = Mapping[str, Any]

# Pairs of the name and the operations of each kind in use.
AdapterOps = tuple[tuple[str, AdapterOp], ...]


class LayerAdapters(NamedTuple):
    """The adapters of a layer, other than low-rank ones, for the chunks of a stream.

    Attributes:
      own: by name of the kind and point, the arrays of every chunk's owner.
      scales: by linear, float32 [T], summands that are added to the scales of low-rank products.
    """

    ops: AdapterOps
    own: Mapping[str, Mapping[str, Any]]
    chunks: int
    scales: Mapping[str, Float[Array, " T"]] = MappingProxyType({})

    def touch(self, point: str) -> bool:
        """Whether any kind has arrays at the point."""
        return any(point in points for points in self.own.values())

    def change_product(self, point: str) -> bool:
        return any(
            point in self.own[name] and type(op).product is not AdapterOp.product
            for name, op in self.ops
        )

    def change_input(self, point: str) -> bool:
        return any(
            point in self.own[name] and op.changes_input(self.own[name][point])
            for name, op in self.ops
        )

    def apply(
        self, method: str, point: str, *streams: Float[Array, "N _"], **numbers: Any
    ) -> Float[Array, "N _"]:
        """Applies a method of `AdapterOp` of all kinds at a point, one kind after another.
        `streams` and `numbers` are the method's arguments after `own`. The last stream is replaced
        by the result of the previous kind."""
        *others, last = streams
        others = [self._chunked(x) for x in others]
        for name, op in self.ops:
            if (arrays := self.own[name].get(point)) is not None:
                changed = getattr(op, method)(arrays, *others, self._chunked(last), **numbers)
                last = changed.astype(last.dtype).reshape(last.shape)
        return last

    def _chunked(self, x: Float[Array, "N k"]) -> Float[Array, "chunks l k"]:
        return x.reshape(self.chunks, -1, x.shape[-1])


def layer_adapters(
    ops: AdapterOps,
    adapters: AllAdapters,
    accumulators: AllAdapters | None,
    chunk_slot: Int[Array, " chunks"],
    layer: Int[Array, ""] | int,
    outside: Sequence[str] = (),
    tokens: Int[Array, "chunks l"] | None = None,
) -> tuple[LayerAdapters, AllAdapters | None]:
    """The adapters of a layer for the chunks of a stream, and the accumulators, which
    `values_of_chunks` passes through. If `outside` is not empty, these points are read instead of
    those of the layer: the norm after the last layer, or the embedding and the head, with layer 0.
    `tokens` are the tokens of each chunk, for the embedding."""

    by_kind: dict[str, Mapping[str, Any]] = {}
    scales: dict[str, Array] = {}

    def part(tree: Mapping[str, Any]) -> dict[str, Any]:
        return {
            point: arrays
            for point, arrays in tree.items()
            if (point in outside if outside else point not in OUTSIDE)
        }

    for name, op in ops:
        whole, gathered = _split(op.of_slots, part(adapters[name]))
        by_token = frozenset() if tokens is None else op.by_token
        tables, gathered = _split(by_token, gathered)
        none, sums, table_sums = None, None, None
        if accumulators is not None:
            none, sums = _split(op.of_slots, part(accumulators[name]))
            table_sums, sums = _split(by_token, sums)
        of_chunks, sums = values_of_chunks(gathered, sums, chunk_slot, layer)
        if tables:
            rows, table_sums = rows_of_tokens(tables, table_sums, chunk_slot, tokens)
            of_chunks = _joined(rows, of_chunks)
        if op.of_slots:
            whole = {point: {**arrays, CHUNK_SLOT: chunk_slot} for point, arrays in whole.items()}
        by_kind[name] = _joined(whole, of_chunks)
        if accumulators is not None:
            sums = _joined(none, _joined(table_sums, sums))
            accumulators = {**accumulators, name: {**accumulators[name], **sums}}
        linears = part(adapters[name]) if op.low_rank and not outside else {}
        for point, arrays in linears.items():
            scales[point] = scales.get(point, 0) + arrays[SCALE][layer]
    return LayerAdapters(ops, by_kind, len(chunk_slot), scales), accumulators


def _split(names: frozenset[str], tree: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """By point, the arrays with these names, and the arrays with other names."""
    if not names:
        return {}, dict(tree)

    def chosen(named: bool) -> dict[str, Any]:
        return {
            point: {name: x for name, x in arrays.items() if (name in names) == named}
            for point, arrays in tree.items()
        }

    return chosen(True), chosen(False)


def _joined(named: Mapping[str, Any], others: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `_split`."""
    return {
        point: {**named[point], **arrays} if point in named else arrays
        for point, arrays in others.items()
    }


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def rows_of_chunks(
    rows: Float[Array, "chunks R d"], index: Int[Array, "chunks l"], count: int, dtype: jnp.dtype
) -> Float[Array, "chunks l d"]:
    """For each token, the row `index` of its chunk's float32 matrix, converted to `dtype`; zeros if
    the index is outside the `count` rows. The gradient of a matrix is summed in float32, in a fixed
    order, even on a GPU."""
    inside = (index >= 0) & (index < count)
    taken = jnp.take_along_axis(rows, jnp.where(inside, index, 0)[..., None], axis=1)
    return jnp.where(inside[..., None], taken, 0).astype(dtype)


def _rows_forward(rows, index, count, dtype):
    return rows_of_chunks(rows, index, count, dtype), index


def _rows_backward(count, dtype, index, dy):
    return float32_sums("clr,cld->crd", jax.nn.one_hot(index, count, dtype=dtype), dy), None


rows_of_chunks.defvjp(_rows_forward, _rows_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def matmul_of_chunks(
    x: Float[Array, "chunks l k"], w: Float[Array, "chunks k n"], dtype: jnp.dtype | None = None
) -> Float[Array, "chunks l n"]:
    """The product of every chunk, in the compute dtype, with its own float32 matrix. Sums, and the
    gradient of `w`, are float32. `dtype` is the dtype of the result; None means the dtype of
    `x`."""
    return float32_sums("clk,ckn->cln", x, w.astype(x.dtype)).astype(dtype or x.dtype)


def _forward(x, w, dtype):
    return matmul_of_chunks(x, w, dtype), (x, w)


def _backward(dtype, residuals, dy):
    x, w = residuals
    dy = dy.astype(x.dtype)
    dx = float32_sums("cln,ckn->clk", dy, w.astype(x.dtype)).astype(x.dtype)
    return dx, float32_sums("clk,cln->ckn", x, dy)


matmul_of_chunks.defvjp(_forward, _backward)


def float32_sums(spec: str, left: Array, right: Array) -> Array:
    """An einsum whose sums and result are float32."""
    if jax.default_backend() == "cpu":
        # On a CPU, XLA has no batched products of half precision with float32 sums.
        left, right = left.astype(jnp.float32), right.astype(jnp.float32)
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)
