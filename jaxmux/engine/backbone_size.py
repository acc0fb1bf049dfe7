"""A backbone's sizes for the planner, from its configuration alone."""

import math

import jax
import jax.numpy as jnp

from jaxmux.models import MODULES, BackboneConfig, linear_sizes
from jaxmux.models.loss import block_bytes
from jaxmux.models.modules import abstract_weights, divisible_weights, layer_linears
from jaxmux.models.weight_sharding import FSDP, TP, WeightSharding
from jaxmux.planner.costs.device_profile import BackboneSize, PackedBytes
from jaxmux.planner.devices import FSDP_BLOCKS, KEY_BLOCKS, TP_BLOCKS
from jaxmux.sharding.stage_mesh import KEY_MODULES

# Any mesh that divides linears by both axes.
_DIVIDED = WeightSharding(tp=2, fsdp=2)


def size_of(config: BackboneConfig, dtype: jnp.dtype) -> BackboneSize:
    """A backbone's sizes for the cost models; no weights are allocated.

    Args:
      config: configuration of the backbone.
      dtype: dtype of the weights and of the activations between layers.

    Returns:
      The sizes. The field `kept` is empty.
    """
    weights = abstract_weights(config, dtype)
    divided = jax.eval_shape(divisible_weights, weights)
    itemsize = jnp.dtype(dtype).itemsize
    return BackboneSize(
        name=config.architecture,
        layers=config.num_layers,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        linears={module: linear_sizes(config, module) for module in MODULES},
        layer_bytes=_nbytes(weights["layers"]) // config.num_layers,
        divided_layer_bytes=_nbytes(divided["layers"]) // config.num_layers,
        outside_bytes=_nbytes({name: w for name, w in weights.items() if name != "layers"}),
        stream_bytes=itemsize,
        kept={},
        head_block_bytes=block_bytes(config.vocab_size),
        packed=PackedBytes.of(config.num_heads, config.num_kv_heads, config.head_dim, itemsize),
        backbone_format=config.linear_format,
    )


def mesh_sizes(config: BackboneConfig) -> dict[str, int]:
    """The sizes of a backbone that a mesh has to divide, by their key in config.json, for
    `planner.devices.Replica.require`.

    Args:
      config: configuration of the backbone.
    """
    return {
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "intermediate_size": config.intermediate_size,
        "hidden_size": config.hidden_size,
        **_scale_blocks(config),
    }


def _scale_blocks(config: BackboneConfig) -> dict[str, int]:
    """The largest numbers that divide all blocks with a scale along the axes of a mesh."""
    found: dict[str, list[int]] = {}
    weights = jax.eval_shape(divisible_weights, abstract_weights(config))
    for module, weight in layer_linears(weights).items():
        keys = {TP: KEY_BLOCKS if module in KEY_MODULES else TP_BLOCKS, FSDP: FSDP_BLOCKS}
        axes = {role: keys[axis] for role, axis in _DIVIDED.mesh_axes(module).items()}

        def note(leaf: jax.ShapeDtypeStruct, names: tuple[str | None, ...], axes=axes) -> None:
            for name, size in zip(names, leaf.shape[leaf.ndim - len(names) :], strict=True):
                if name in axes:
                    found.setdefault(axes[name], []).append(size)

        if not weight.is_plain:
            weight.map_axes(note)
    return {key: math.gcd(*sizes) for key, sizes in found.items()}


def _nbytes(tree) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
