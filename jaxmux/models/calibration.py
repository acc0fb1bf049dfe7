"""Inputs of linears and gradients of their weights, computed from a task's own samples with the
frozen backbone, for adapters whose initial values depend on the data.

The samples go through the backbone on the host, in float32 and layer by layer. The tensors of a
layer are read when they are needed. The result is therefore the same on every mesh, needs no memory
of the devices, and can be computed while devices train.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from jaxmux.data.batches import Microbatch, fill_microbatch
from jaxmux.data.stored_samples import Sample
from jaxmux.objectives.token_losses import TokenRule

from .adapter_ops import EMBEDDING_TENSOR, LOW_RANK_KIND, AdapterOp
from .architectures import MODULES, BackboneConfig, linear_sizes
from .checkpoint_reader import on_host
from .forward import ForwardOptions, SlotTable, finish, run_layers
from .head import microbatch_losses
from .modules import abstract_weights
from .tensor_names import tensor_names, weights_of_tensors

# For each linear, the first linear of its layer that reads the same input.
FIRST_READERS: Mapping[str, str] = {module: module for module in MODULES} | {
    "self_attn.k_proj": "self_attn.q_proj",
    "self_attn.v_proj": "self_attn.q_proj",
    "mlp.up_proj": "mlp.gate_proj",
}
# The length of a row is a power of two times this, so that few different programs are compiled.
_SHORTEST_ROW = 64
# The host holds all attention scores of a row, so memory grows with the square of this length.
_LONGEST_SAMPLE = 2048
_LAYER, _FIRST_LAYER = "model.layers.{}.", "model.layers.0."

# Tensors by their names in Hugging Face's checkpoint. Tensors of every layer are named as in layer
# 0.
_Tensors = Mapping[str, Float[Array, "..."]]


class Calibration(NamedTuple):
    """A backbone, and samples that go through it, from `calibration_of`.

    Attributes:
      tensors: returns the values of a tensor in Hugging Face's checkpoint by its name.
      microbatch: the samples. Every row is one chunk, and belongs to a separate slot.
      labelled: bool [N], whether the token at a position of the stream counts in the loss.
    """

    config: BackboneConfig
    tensors: Callable[[str], np.ndarray]
    microbatch: Microbatch
    labelled: Bool[np.ndarray, " N"]

    def linear_inputs(self) -> Iterator[dict[str, Float[np.ndarray, "labelled k"]]]:
        """Yields, layer by layer, the float32 inputs of the layer's linears at the labelled tokens,
        by path of the linear within the layer. If linears have the same input, only the first is
        included (see `FIRST_READERS`). Raises ValueError if a value is not finite."""
        x = self._embedded()
        for layer in range(self.config.num_layers):
            x, inputs = on_host(
                _layer_with_inputs, self.config, self._layer(layer), x, self.microbatch
            )
            labelled = {module: np.asarray(y)[self.labelled] for module, y in inputs.items()}
            _refuse_non_finite(labelled, layer)
            yield labelled

    def weight_gradients(
        self, modules: Sequence[str]
    ) -> Iterator[tuple[int, dict[str, Float[np.ndarray, "n k"]]]]:
        """Yields, for every layer from the last to the first, its index and the float32 gradients
        of the labelled tokens' mean loss with respect to the weights of linears: by path of a
        linear, in the layout of Hugging Face, [n, k] for output width n and input width k. Raises
        ValueError if a value is not finite."""
        inputs = [self._embedded()]
        for layer in range(self.config.num_layers):
            inputs.append(
                on_host(_layer_output, self.config, self._layer(layer), inputs[-1], self.microbatch)
            )
        names = [name for name in tensor_names(self.config) if ".layers." not in name]
        if not self.config.tie_word_embeddings:
            names.remove(EMBEDDING_TENSOR)
        outside = {name: self.tensors(name) for name in names}
        dx = on_host(_gradient_of_hidden, self.config, outside, inputs.pop(), self.microbatch)
        for layer in reversed(range(self.config.num_layers)):
            dx, gradients = on_host(
                _layer_gradients,
                self.config,
                tuple(modules),
                self._layer(layer),
                inputs.pop(),
                self.microbatch,
                dx,
            )
            gradients = {module: np.asarray(gradient) for module, gradient in gradients.items()}
            _refuse_non_finite(gradients, layer)
            yield layer, gradients

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
    """A backbone with the first `tokens` tokens of a task's samples, and at most 2048 tokens of
    each sample. Only as many samples are taken as are needed; the last one is cut. `tensors`
    returns the float32 values of a tensor by its name in the backbone's Hugging Face checkpoint.
    Raises ValueError if none of the tokens counts in the loss."""
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
    # A labelled token is predicted at the position before it. The first token of a sample is not
    # predicted.
    labelled = np.roll(microbatch.loss_weight.reshape(-1) > 0, 1)
    slots = np.arange(rows, dtype=np.int32)
    return Calibration(config, tensors, microbatch._replace(chunk_slot=slots), labelled)


def _first_tokens(samples: Iterable[Sample], tokens: int) -> list[Sample]:
    """The first samples, cut to a total number of tokens, and each cut to its first 2048 tokens.
    Each sample gets one additional token, which does not count in the loss, because the model does
    not read the last token."""
    cut = []
    for sample in samples:
        most = min(tokens, _LONGEST_SAMPLE)
        ids, mask = sample.input_ids[:most], sample.target_mask[:most]
        cut.append(Sample(np.append(ids, ids[-1:]), np.append(mask, False), sample.sample_id))
        tokens -= len(ids)
        if tokens == 0:
            break
    return cut


class _Seen(AdapterOp):
    """Changes nothing. The gradient of its array is the input of the linear."""

    def linear_output(self, own, x, y, first_column):
        return _with_gradient(y, own["seen"], x)


@jax.custom_vjp
def _with_gradient(y: Array, seen: Array, x: Array) -> Array:
    """Returns `y`; the gradient of `seen` is `x`."""
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
    x, _, _ = run_layers(one, weights["layers"], adapters, None, x, microbatch, slots, options)
    return x


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
    (inputs,) = pull(jnp.zeros_like(y))
    return y, {module: of_linear[_SEEN].reshape(len(x), -1) for module, of_linear in inputs.items()}


@partial(jax.jit, static_argnums=0)
def _gradient_of_hidden(
    config: BackboneConfig, tensors: _Tensors, x: Float[Array, "N d"], microbatch: Microbatch
) -> Float[Array, "N d"]:
    """The gradient of the loss with respect to the residual stream after the last layer."""
    wanted = {
        name: shapes
        for name, shapes in abstract_weights(config).items()
        if name in ("norm", "embed_tokens" if config.tie_word_embeddings else "lm_head")
    }
    weights = weights_of_tensors(wanted, tensors.__getitem__)
    rows, row_len = microbatch.tokens.shape

    def loss(x: Float[Array, "N d"]) -> Float[Array, ""]:
        hidden, _, finite = finish(
            config,
            weights,
            adapters={LOW_RANK_KIND: {}},
            accumulators=None,
            x=x,
            finite=jnp.ones(rows, bool),
            microbatch=microbatch,
            options=_options(row_len),
        )
        sums = microbatch_losses(
            weights,
            hidden,
            finite,
            microbatch,
            rules=jax.tree.map(jnp.asarray, TokenRule.table({}, rows)),
        )
        return sums[:, 0].sum()

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
    """The gradients of the loss with respect to the residual stream `x` before a layer, and with
    respect to weights of its linears. `dx` is the gradient with respect to the residual stream
    after the layer."""
    names = {module: f"{_FIRST_LAYER}{module}.weight" for module in modules}

    def run(x: Array, weights: Mapping[str, Array]) -> Array:
        changed = {names[module]: weight for module, weight in weights.items()}
        return _run_layer(config, {**tensors, **changed}, x, microbatch)

    _, pull = jax.vjp(run, x, {module: tensors[name] for module, name in names.items()})
    return pull(dx)


def _refuse_non_finite(values: Mapping[str, np.ndarray], layer: int) -> None:
    for module, x in values.items():
        if not np.isfinite(x).all():
            raise ValueError(
                f"its training data lead to values of {module} in layer {layer} that are not finite"
            )
