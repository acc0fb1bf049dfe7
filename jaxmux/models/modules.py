"""The backbone as Flax NNX modules, which only hold the parameters and their names.

Names are Hugging Face's, so a parameter's path here is its path in a checkpoint, without the index
of the layer: `layers.self_attn.q_proj`. The parameters of all layers are stacked along a leading
axis. `nnx.split` turns the modules into a nested dict of parameters (`Weights`), which all other
functions of this package take.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .architectures import MODULES, BackboneConfig, has_bias, linear_sizes
from .errors import BackboneError

# Arrays, and a `FrozenWeight` under every key "kernel".
Weights = dict[str, Any]


class Linear(nnx.Module):
    """The linears `y = x kernel + bias` of one name, in all layers: a `FrozenWeight` [L, k, n] and
    biases [L, n]."""

    def __init__(self, c: BackboneConfig, name: str, dtype: jnp.dtype, rngs: nnx.Rngs):
        shape = (c.num_layers, *linear_sizes(c, name))
        try:
            self.kernel = nnx.Param(_random_stack(rngs, shape, dtype, c.backbone_format))
        except ValueError as e:
            raise BackboneError(f"{name}: {e}") from None
        if has_bias(c, name):
            self.bias = nnx.Param(jnp.zeros((shape[0], shape[2]), dtype))


class RMSNorm(nnx.Module):
    """The weight of root-mean-square norms: [d], or [L, size] for the norms of all layers."""

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones(shape, dtype))


class Embedding(nnx.Module):
    """The embedding of tokens: weight [vocab, d]."""

    def __init__(self, vocab: int, size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs, (vocab, size), dtype))


class Head(nnx.Module):
    """The language-model head: a `FrozenWeight` [d, vocab]."""

    def __init__(self, size: int, vocab: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(FrozenWeight.of(_normal(rngs, (size, vocab), dtype)))


class Attention(nnx.Module):
    """Projections of attention, and norms of queries and keys if the architecture has them."""

    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.q_proj = Linear(c, "q_proj", dtype, rngs)
        self.k_proj = Linear(c, "k_proj", dtype, rngs)
        self.v_proj = Linear(c, "v_proj", dtype, rngs)
        self.o_proj = Linear(c, "o_proj", dtype, rngs)
        if c.qk_norm:
            self.q_norm = RMSNorm((c.num_layers, c.head_dim), dtype)
            self.k_norm = RMSNorm((c.num_layers, c.head_dim), dtype)


class MLP(nnx.Module):
    """The three linears of a gated MLP."""

    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.gate_proj = Linear(c, "gate_proj", dtype, rngs)
        self.up_proj = Linear(c, "up_proj", dtype, rngs)
        self.down_proj = Linear(c, "down_proj", dtype, rngs)


class DecoderLayers(nnx.Module):
    """All layers, stacked."""

    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.self_attn = Attention(c, dtype, rngs)
        self.mlp = MLP(c, dtype, rngs)
        self.input_layernorm = RMSNorm((c.num_layers, c.hidden_size), dtype)
        self.post_attention_layernorm = RMSNorm((c.num_layers, c.hidden_size), dtype)


class Decoder(nnx.Module):
    """A Llama-family decoder with its language-model head. There is no head if it is tied to the
    embedding."""

    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype, rngs)
        self.layers = DecoderLayers(c, dtype, rngs)
        self.norm = RMSNorm((c.hidden_size,), dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Head(c.hidden_size, c.vocab_size, dtype, rngs)


def random_weights(
    config: BackboneConfig, seed: int = 0, dtype: jnp.dtype = jnp.float32
) -> Weights:
    """The weights of a random backbone, made on the default device in one program. Matrices are
    normal with standard deviation 0.02, weights of norms are 1, and biases are 0. All have `dtype`,
    except linears with a `config.backbone_format`. Raises BackboneError if these cannot be stored
    in this format."""

    @jax.jit
    def make(key: jax.Array) -> Weights:
        return split(Decoder(config, dtype, nnx.Rngs(key)))

    return make(jax.random.key(seed))


def abstract_weights(config: BackboneConfig, dtype: jnp.dtype = jnp.float32) -> Weights:
    """The weights with a `jax.ShapeDtypeStruct` for each array; nothing is allocated. All have
    `dtype`, except linears with a `config.backbone_format` and linears in `config.kept`. Raises
    BackboneError if a linear cannot be stored in `config.backbone_format`."""
    # Copy the dicts, because callers may change them.
    return jax.tree.map(lambda leaf: leaf, _abstract_weights(config, jnp.dtype(dtype)))


# Making the modules takes 10 ms, and callers often ask for the same ones.
@functools.lru_cache(16)
def _abstract_weights(config: BackboneConfig, dtype: jnp.dtype) -> Weights:
    weights = jax.eval_shape(lambda: split(Decoder(config, dtype, nnx.Rngs(0))))
    for module, kept in config.kept:
        block, linear = module.split(".")
        weights["layers"][block][linear]["kernel"] = jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((config.num_layers, *leaf.shape), leaf.dtype), kept
        )
    return weights


def compute_dtype(weights: Weights) -> jnp.dtype:
    """The dtype of the residual stream, of all activations and of their gradients. It is the dtype
    of the embedding; the weights of linears may be stored in other dtypes."""
    return weights["embed_tokens"]["weight"].dtype


def is_weight(node: Any) -> bool:
    return isinstance(node, FrozenWeight)


def layer_linears(weights: Weights) -> dict[str, FrozenWeight]:
    """The weights of the layers' linears, by their names in `MODULES`."""
    paths = {module: module.split(".") for module in MODULES}
    return {
        module: weights["layers"][block][linear]["kernel"]
        for module, (block, linear) in paths.items()
    }


def divisible_weights(weights: Weights) -> Weights:
    """The weights in formats that can be divided among the devices of a mesh (see
    `FrozenWeight.divisible`)."""

    def divisible(node: Any) -> Any:
        return node.divisible() if is_weight(node) else node

    return jax.tree.map(divisible, weights, is_leaf=is_weight)


def split(decoder: Decoder) -> Weights:
    return nnx.to_pure_dict(nnx.split(decoder)[1])


def _random_stack(
    rngs: nnx.Rngs, shape: tuple[int, int, int], dtype: jnp.dtype, format: str | None
) -> FrozenWeight:
    """Random weights of all layers. In a format that is not a dtype, the weights of each layer are
    made and encoded separately, so that the whole stack never exists in `dtype`."""
    if format is None:
        return FrozenWeight.of(_normal(rngs, shape, dtype))

    def of_layer(key: jax.Array) -> FrozenWeight:
        weights = 0.02 * jax.random.normal(key, shape[1:], jnp.float32)
        return FrozenWeight.encoded(weights.astype(dtype), format)

    return jax.lax.map(of_layer, jax.random.split(rngs.params(), shape[0]))


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
