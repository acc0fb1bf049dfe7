"""What the frozen backbone computes of a task's own samples, for adapters whose initial values
depend on the data: the inputs of linears, and the gradients of their weights.

The samples go through the backbone on the host, in float32 and layer by layer. The tensors of a
layer are read when they are needed. So the result is the same on every mesh, needs no memory of the
devices, and can be computed beside training.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmux.data.microbatch import Microbatch, fill_microbatch
from jaxmux.data.samples import Sample

from .adapter_ops import EMBEDDING_TENSOR, LOW_RANK_KIND, AdapterOp
from .architectures import MODULES, BackboneConfig, linear_sizes
from .forward import ForwardOptions, SlotTable, finish, run_layers
from .head import microbatch_losses
from .host import on_host
from .modules import abstract_weights
from .tensor_names import tensor_names, weights_of_tensors

# By linear, the first linear of its layer that reads the same input.
FIRST_READERS: Mapping[str, str] = {module: module for module in MODULES} | {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}
# Rows have this length times a power of two, so that few different programs are compiled.
_SHORTEST_ROW = 64
# The host holds all scores of a row's attention, so its memory grows with the square of this.
_LONGEST_SAMPLE = 2048
_LAYER, _FIRST_LAYER = "model.layers.{}.", "model.layers.0."

# By name, tensors of Hugging Face's checkpoint. Those of a layer have the names of the first one.
_Tensors = Mapping[str, Float[Array, "..."]]


class Calibration(NamedTuple):
    """A backbone, and samples that go through it.

    `calibration_of` makes it.

    Attributes:
      config: configuration of the backbone.
      tensors: function from the name of a tensor in Hugging Face's checkpoint to its values.
      microbatch: the samples. Every row is a chunk, and a slot of its own.
      labelled: bool [N], whether the token at a position of the stream counts in the loss.
    """

    config: BackboneConfig
    tensors: Callable[[str], np.ndarray]
    microbatch: Microbatch
    labelled: Bool[np.ndarray, " N"]

    def linear_inputs(self) -> Iterator[dict[str, Float[np.ndarray, "labelled k"]]]:
        """For every layer in turn, what its linears read at the labelled tokens, float32.

        Yields:
          By path of a linear within the layer, its input. Of linears with the same input only the
          first one is there, see `FIRST_READERS`.

        Raises:
          ValueError: a value is not finite.
        """
        x = self._embedded()
        for layer in range(self.config.num_layers):
            arrays = self._layer(layer), x, self.microbatch
            x, inputs = on_host(_layer_with_inputs, self.config, *arrays)
            found = {module: np.asarray(own)[self.labelled] for module, own in inputs.items()}
            _refuse_non_finite(found, layer)
            yield found

    def weight_gradients(
        self, modules: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, Float[np.ndarray, "n k"]]]]:
        """The gradients of the mean loss of the labelled tokens by the weights of linears, float32,
        from the last layer to the first.

        Args:
          modules: paths of the linears within a layer.

        Yields:
          Index of the layer; and by path of a linear its gradient in the layout of Hugging Face,
          [n, k] for output width n and input width k.

        Raises:
          ValueError: a value is not finite.
        """
        inputs = [self._embedded()]
        for layer in range(self.config.num_layers):
            arrays = self._layer(layer), inputs[-1], self.microbatch
            inputs.append(on_host(_layer_output, self.config, *arrays))
        names = [name for name in tensor_names(self.config) if ".layers." not in name]
        if not self.config.tie_word_embeddings:
            names.remove(EMBEDDING_TENSOR)
        outside = {name: self.tensors(name) for name in names}
        arrays = outside, inputs.pop(), self.microbatch
        dx = on_host(_gradient_of_hidden, self.config, *arrays)
        for layer in reversed(range(self.config.num_layers)):
            arrays = self._layer(layer), inputs.pop(), self.microbatch, dx
            dx, found = on_host(_layer_gradients, self.config, tuple(modules), *arrays)
            found = {module: np.asarray(own) for module, own in found.items()}
            _refuse_non_finite(found, layer)
            yield layer, found

    def _embedded(self) -> Float[np.ndarray, "N d"]:
        return np.asarray(self.tensors(EMBEDDING_TENSOR)[self.microbatch.tokens.reshape(-1)])

    def _layer(self, layer: int) -> _Tensors:
        names = [name for name in tensor_names(self.config) if name.startswith(_FIRST_LAYER)]
        return {
            name: self.tensors(_LAYER.format(layer) + name.removeprefix(_FIRST_LAYER))
            for name in names
        }


def calibration_of(
    config: BackboneConfig,
    tensors: Callable[[str], np.ndarray],
    samples: Iterable[Sample],
    tokens: int,
) -> Calibration:
    """A backbone with the first tokens of a task's samples.

    Args:
      config: configuration of the backbone.
      tensors: function from the name of a tensor in Hugging Face's checkpoint of the backbone to
        its float32 values.
      samples: the samples, of which only as many are taken as are needed.
      tokens: number of tokens, unless the samples have fewer; the last sample is cut, and
        of every sample no more than 2048 tokens are taken.

    Raises:
      ValueError: none of these tokens counts in the loss.
    """
    taken = _first_tokens(samples, tokens)
    if not any(sample.target_tokens for sample in taken):
        raise ValueError(
            f"none of the first {tokens} tokens of its training data counts in the loss; raise "
            "calibration_tokens"
        )
    lengths = [sample.stream_length for sample in taken]
    row_len = _SHORTEST_ROW
    while row_len < max(lengths):
        row_len *= 2
    placements, row, used = [], 0, 0
    for index, length in enumerate(lengths):
        if used + length > row_len:
            row, used = row + 1, 0
        placements.append((0, index, row, used))
        used += length
    rows = row + 1
    microbatch = fill_microbatch(
        placements, {0: taken}, rows=rows, row_len=row_len, chunk_len=row_len
    )
    # The place before a labelled token predicts it; the one before a sample's first predicts none.
    labelled = np.roll(microbatch.loss_weight.reshape(-1) > 0, 1)
    slots = np.arange(rows, dtype=np.int32)
    return Calibration(config, tensors, microbatch._replace(chunk_slot=slots), labelled)


def _first_tokens(samples: Iterable[Sample], tokens: int) -> list[Sample]:
    """The first samples, cut to a number of tokens, and each to its first 2048. The model reads all
    of these, because each sample has one token more, which does not count in the loss."""
    found = []
    for sample in samples:
        most = min(tokens, _LONGEST_SAMPLE)
        ids, mask = sample.input_ids[:most], sample.target_mask[:most]
        found.append(Sample(np.append(ids, ids[-1:]), np.append(mask, False), sample.sample_id))
        tokens -= len(ids)
        if tokens == 0:
            break
    return found


class _Seen(AdapterOp):
    """Changes nothing, but the gradient of its array is what the linear reads."""

    def linear_output(self, own, x, y, first_column):
        return _with_gradient(y, own["seen"], x)


@jax.custom_vjp
def _with_gradient(y: Array, seen: Array, x: Array) -> Array:
    """`y`; the gradient of `seen` is `x`."""
    return y


_with_gradient.defvjp(lambda y, seen, x: (y, x), lambda x, dy: (dy, x, jnp.zeros_like(x)))

_SEEN = "seen"


def _options(row_len: int, **others: Any) -> ForwardOptions:
    return ForwardOptions("xla", "xla", remat="none", unroll=True, max_sequences=row_len, **others)


def _run_layer(
    config: BackboneConfig,
    tensors: _Tensors,
    x: Float[Array, "N d"],
    microbatch: Microbatch,
    seen: Mapping[str, Any] | None = None,
) -> Float[Array, "N d"]:
    one = dataclasses.replace(config.plain, num_layers=1)
    wanted = {"layers": abstract_weights(one)["layers"]}
    weights = weights_of_tensors(wanted, tensors.__getitem__)
    rows, row_len = microbatch.tokens.shape
    slots = SlotTable(*(jnp.zeros(rows, dtype) for dtype in ("float32", "float32", "uint32")))
    adapters, ops = {LOW_RANK_KIND: {}}, ()
    if seen is not None:
        adapters[_SEEN], ops = seen, ((_SEEN, _Seen()),)
    options = _options(row_len, adapter_ops=ops)
    given = adapters, None, x, microbatch, slots, options
    return run_layers(one, weights["layers"], *given)[0]


_layer_output = jax.jit(_run_layer, static_argnums=0)


@partial(jax.jit, static_argnums=0)
def _layer_with_inputs(
    config: BackboneConfig, tensors: _Tensors, x: Float[Array, "N d"], microbatch: Microbatch
) -> tuple[Float[Array, "N d"], dict[str, Float[Array, "N k"]]]:
    shape = 1, *microbatch.tokens.shape
    seen = {
        module: {_SEEN: jnp.zeros((*shape, linear_sizes(config, module)[0]))}
        for module in dict.fromkeys(FIRST_READERS.values())
    }
    y, pull = jax.vjp(partial(_run_layer, config, tensors, x, microbatch), seen)
    (found,) = pull(jnp.zeros_like(y))
    return y, {module: own[_SEEN].reshape(len(x), -1) for module, own in found.items()}


@partial(jax.jit, static_argnums=0)
def _gradient_of_hidden(
    config: BackboneConfig, tensors: _Tensors, x: Float[Array, "N d"], microbatch: Microbatch
) -> Float[Array, "N d"]:
    """The gradient of the loss by the residual stream behind the last layer."""
    wanted = {
        name: own
        for name, own in abstract_weights(config).items()
        if name in ("norm", "embed_tokens" if config.tie_word_embeddings else "lm_head")
    }
    weights = weights_of_tensors(wanted, tensors.__getitem__)
    rows, row_len = microbatch.tokens.shape

    def loss(x: Float[Array, "N d"]) -> Float[Array, ""]:
        given = {LOW_RANK_KIND: {}}, None, x, jnp.ones(rows, bool), microbatch, _options(row_len)
        hidden, _, finite = finish(config, weights, *given)
        return microbatch_losses(weights, hidden, finite, microbatch).sum()

    return jax.grad(loss)(x)


@partial(jax.jit, static_argnums=(0, 1))
def _layer_gradients(
    config: BackboneConfig,
    modules: tuple[str, ...],
    tensors: _Tensors,
    x: Float[Array, "N d"],
    microbatch: Microbatch,
    dx: Float[Array, "N d"],
) -> tuple[Float[Array, "N d"], dict[str, Float[Array, "n k"]]]:
    """The gradients of the loss by the residual stream before a layer, and by weights of linears.

    Args:
      config, tensors, microbatch: as for `_run_layer`.
      modules: paths of the linears.
      x: the residual stream before the layer.
      dx: the gradient by the residual stream behind it.
    """
    names = {module: f"{_FIRST_LAYER}{module}.weight" for module in modules}

    def run(x: Array, weights: Mapping[str, Array]) -> Array:
        own = {names[module]: weight for module, weight in weights.items()}
        return _run_layer(config, {**tensors, **own}, x, microbatch)

    _, pull = jax.vjp(run, x, {module: tensors[name] for module, name in names.items()})
    return pull(dx)


def _refuse_non_finite(found: Mapping[str, np.ndarray], layer: int) -> None:
    for module, own in found.items():
        if not np.isfinite(own).all():
            raise ValueError(
                f"its training data lead to values of {module} in layer {layer} that are not finite"
            )
