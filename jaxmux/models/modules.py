"""The backbone as Flax NNX modules: they hold the parameters and their names, and nothing else.

Names are Hugging Face's, so a parameter's path here is its path in a checkpoint:
`layers.self_attn.q_proj`. The parameters of all layers are stacked on a leading axis. `nnx.split`
is called once; from then on the functions of this package take the nested dict of arrays
(`Weights`).
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxmux.pallas_kernels.frozen_weight import FrozenWeight

from .architectures import BackboneConfig

Weights = dict[str, Any]


class Linear(nnx.Module):
    """`y = x kernel + bias`, stacked over layers: kernel [L, k, n], bias [L, n]."""

    def __init__(self, layers: int, k: int, n: int, bias: bool, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(FrozenWeight.of(_normal(rngs, (layers, k, n), dtype)))
        if bias:
            self.bias = nnx.Param(jnp.zeros((layers, n), dtype))


class RMSNorm(nnx.Module):
    """Scale of a root-mean-square norm: weight [*stack, size]."""

    def __init__(self, shape: tuple[int, ...], dtype: jnp.dtype):
        self.weight = nnx.Param(jnp.ones(shape, dtype))


class Embedding(nnx.Module):
    """weight [vocab, d]."""

    def __init__(self, vocab: int, size: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.weight = nnx.Param(_normal(rngs, (vocab, size), dtype))


class Head(nnx.Module):
    """kernel [d, vocab]."""

    def __init__(self, size: int, vocab: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.kernel = nnx.Param(FrozenWeight.of(_normal(rngs, (size, vocab), dtype)))


class Attention(nnx.Module):
    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        layers, d, bias = c.num_layers, c.hidden_size, c.attention_bias
        self.q_proj = Linear(layers, d, c.query_size, bias, dtype, rngs)
        self.k_proj = Linear(layers, d, c.kv_size, bias, dtype, rngs)
        self.v_proj = Linear(layers, d, c.kv_size, bias, dtype, rngs)
        self.o_proj = Linear(layers, c.query_size, d, c.output_bias, dtype, rngs)
        if c.qk_norm:
            self.q_norm = RMSNorm((layers, c.head_dim), dtype)
            self.k_norm = RMSNorm((layers, c.head_dim), dtype)


class MLP(nnx.Module):
    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        layers, d, wide = c.num_layers, c.hidden_size, c.intermediate_size
        self.gate_proj = Linear(layers, d, wide, c.mlp_bias, dtype, rngs)
        self.up_proj = Linear(layers, d, wide, c.mlp_bias, dtype, rngs)
        self.down_proj = Linear(layers, wide, d, c.mlp_bias, dtype, rngs)


class DecoderLayers(nnx.Module):
    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.self_attn = Attention(c, dtype, rngs)
        self.mlp = MLP(c, dtype, rngs)
        self.input_layernorm = RMSNorm((c.num_layers, c.hidden_size), dtype)
        self.post_attention_layernorm = RMSNorm((c.num_layers, c.hidden_size), dtype)


class Decoder(nnx.Module):
    """A Llama-family decoder with its language-model head (absent where it is the tied
    embedding)."""

    def __init__(self, c: BackboneConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        self.embed_tokens = Embedding(c.vocab_size, c.hidden_size, dtype, rngs)
        self.layers = DecoderLayers(c, dtype, rngs)
        self.norm = RMSNorm((c.hidden_size,), dtype)
        if not c.tie_word_embeddings:
            self.lm_head = Head(c.hidden_size, c.vocab_size, dtype, rngs)


def random_weights(
    config: BackboneConfig, seed: int = 0, dtype: jnp.dtype = jnp.float32
) -> Weights:
    """A random backbone (normal, standard deviation 0.02), made on the default device in one
    program."""

    @jax.jit
    def make(key: jax.Array) -> Weights:
        return split(Decoder(config, dtype, nnx.Rngs(key)))

    return make(jax.random.key(seed))


def abstract_weights(config: BackboneConfig, dtype: jnp.dtype = jnp.float32) -> Weights:
    """Shapes and dtypes of a backbone's weights; allocates nothing."""
    return jax.eval_shape(lambda: split(Decoder(config, dtype, nnx.Rngs(0))))


def compute_dtype(weights: Weights) -> jnp.dtype:
    """The dtype of the residual stream, of all activations and of their gradients: the embedding's,
    whatever the formats of the linears."""
    return weights["embed_tokens"]["weight"].dtype


def cast_weights(weights: Weights, dtype: jnp.dtype | str) -> Weights:
    """All parameters in another dtype, and frozen weights in the format of the same name."""
    return jax.tree.map(
        lambda leaf: leaf.astype(dtype),
        weights,
        is_leaf=lambda node: isinstance(node, FrozenWeight),
    )


def split(decoder: Decoder) -> Weights:
    """The nested dict of arrays of a module."""
    return nnx.to_pure_dict(nnx.split(decoder)[1])


def _normal(rngs: nnx.Rngs, shape: tuple[int, ...], dtype: jnp.dtype) -> jax.Array:
    return (0.02 * jax.random.normal(rngs.params(), shape, jnp.float32)).astype(dtype)
