"""Weights that are divided among the devices of a mesh, as one of these devices computes with them.

The code of the model runs inside `jax.shard_map`, where a device sees its own part of each weight.
With tensor parallelism (mesh axis "tp"; Megatron-LM, Shoeybi et al. 2019), the devices train the
same samples. A *column-parallel* linear (q, k, v, gate, up) is divided along its output columns, a
*row-parallel* linear (o, down) along its input columns. A device's part of o or down thus reads the
outputs of this device's parts of the linears before it: each device has some heads and some
features of the MLP. The outputs of a row-parallel linear are summed over the devices.

LoRA factors are divided like their linear. A column-parallel linear has the whole A and some
columns of B, a row-parallel linear some rows of A and the whole B. A row-parallel low-rank product
is linear in the rank-r values x A, so each device adds its partial x A B to its partial x W, and
one sum over the devices adds up both. The gradient of a whole factor is partial on each device; it
is summed once for an update.

With fully sharded data parallelism (mesh axis "fsdp"; Zhao et al. 2023, ZeRO-3), the devices train
different samples, and gather the weights of a layer when they need them. The weights are frozen, so
no gradients of weights are ever summed.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxmux.pallas_kernels.collectives import TP as TP

from .modules import Weights

FSDP = "fsdp"
# Last components of the paths of the row-parallel linears. All other linears are column-parallel.
ROW_PARALLEL = ("o_proj", "down_proj")
_KEYS = ("k_proj", "v_proj")


class WeightSharding(NamedTuple):
    """How weights are divided among the devices of a mesh. `WeightSharding()` means one device.

    Attributes:
      tp: number of tensor-parallel devices. It divides the number of attention heads and the width
        of the MLP.
      fsdp: number of devices of fully sharded data parallelism. It divides the model width.
      whole_keys: whether `tp` exceeds the number of key heads; it is then a multiple of this
        number. Every device has the whole k and v, and computes with the one key head that belongs
        to its query heads.
      split_vocabulary: whether the tensor-parallel devices divide the embedding and the head by
        tokens of the vocabulary. Otherwise each of them has all tokens.
    """

    tp: int = 1
    fsdp: int = 1
    whole_keys: bool = False
    split_vocabulary: bool = False

    def divided_axis(self, module: str) -> str | None:
        """The axis along which tensor parallelism divides a linear: "input", "output", or None if
        every device has the whole linear. `module` is the linear's path or the path's last
        component."""
        name = module.split(".")[-1]
        if self.tp == 1 or (self.whole_keys and name in _KEYS):
            return None
        return "input" if _is_row_parallel(name) else "output"

    def mesh_axes(self, module: str) -> dict[str, str | None]:
        """The mesh axes that divide the "input" and the "output" of a linear. One of these is the
        model width, which "fsdp" divides; "tp" divides the other. `module` is as in
        `divided_axis`."""
        width, other = ("output", "input") if _is_row_parallel(module) else ("input", "output")
        return {width: FSDP, other: TP if self.divided_axis(module) else None}


def _is_row_parallel(module: str) -> bool:
    return module.split(".")[-1] in ROW_PARALLEL


# Every device has all weights.
UNDIVIDED = WeightSharding()


def enter(x: Float[Array, "N d"], sharding: WeightSharding) -> Float[Array, "N d"]:
    """The input of column-parallel linears. Its gradient is summed over the tensor-parallel devices
    (the function f of Megatron-LM)."""
    return x if sharding.tp == 1 else _enter(x)


def leave(x: Float[Array, "N d"], sharding: WeightSharding) -> Float[Array, "N d"]:
    """The sum of the outputs of a row-parallel linear over the tensor-parallel devices. Its
    gradient is the same on all devices (the function g of Megatron-LM)."""
    return x if sharding.tp == 1 else _leave(x)


@jax.custom_vjp
def _enter(x):
    return x


_enter.defvjp(lambda x: (x, None), lambda _, gradient: (lax.psum(gradient, TP),))


@jax.custom_vjp
def _leave(x):
    return lax.psum(x, TP)


_leave.defvjp(lambda x: (lax.psum(x, TP), None), lambda _, gradient: (gradient,))


def first_column(width: int, sharding: WeightSharding, module: str) -> Int[Array, ""] | int:
    """The index, in a linear's whole input, of the first of the `width` columns that this device
    has."""
    return lax.axis_index(TP) * width if sharding.divided_axis(module) == "input" else 0


def own_key_heads(
    k: Float[Array, "rows row_len K D"], query_heads: int, sharding: WeightSharding
) -> Float[Array, "rows row_len device_K D"]:
    """The key or value heads for this device's query heads. `k` has all heads if
    `sharding.whole_keys`; otherwise it has only the heads of this device and is returned as it
    is."""
    if not sharding.whole_keys:
        return k
    per_key = sharding.tp * query_heads // k.shape[2]
    head = lax.axis_index(TP) * query_heads // per_key
    return lax.dynamic_slice_in_dim(k, head, 1, axis=2)


def layer_weights(
    layers: Weights,
    layer: Int[Array, ""] | int,
    sharding: WeightSharding,
    behind: Any = None,
) -> Weights:
    """The weights with which this device computes a layer, from its part of the stacked weights.
    With fully sharded data parallelism, divided linears are replaced by gathered stacks of one
    layer (`FrozenWeight.stack_index`), which are gathered only after the arrays `behind` are
    computed."""
    if sharding.fsdp == 1:
        return layers
    parts = {
        (block, name): linear["kernel"].at_layer(layer)
        for block in ("self_attn", "mlp")
        for name, linear in layers[block].items()
        if "kernel" in linear
    }
    parts, _ = lax.optimization_barrier((parts, behind))
    gathered_layers = {block: dict(linears) for block, linears in layers.items()}
    for (block, name), part in parts.items():
        whole = partial(_whole, axes=sharding.mesh_axes(name))
        gathered_layers[block][name] = layers[block][name] | {"kernel": part.map_axes(whole)}
    return gathered_layers


def embedded(
    weight: Float[Array, "vocab d"], tokens: Int[Array, " N"], sharding: WeightSharding
) -> Float[Array, "N D"]:
    """The whole embeddings of this device's tokens, with the width D = d · `sharding.fsdp`, from
    this device's part of the embedding table."""
    if sharding.fsdp == 1:
        return _look_up(weight, tokens, sharding)
    # Tokens are smaller than weights, so each device looks up the tokens of all devices in its
    # columns.
    columns = _look_up(weight, lax.all_gather(tokens, FSDP), sharding)
    return lax.all_to_all(columns, FSDP, split_axis=0, concat_axis=2, tiled=True)[0]


def gathered(weight: Any, axis: int, sharding: WeightSharding) -> Any:
    """A weight that fully sharded data parallelism divides along `axis`, gathered from all devices.
    `weight` is this device's part, an array or a `FrozenWeight`."""
    return weight if sharding.fsdp == 1 else jax.tree.map(partial(_gather, axis=axis), weight)


def _whole(leaf: Array, names: tuple[str | None, ...], axes: dict[str, str | None]) -> Array:
    """The whole array of a layer's values or scales, as a stack of one layer. `leaf` is this
    device's part, `names` is from `FrozenWeight.map_axes`, and `axes` from
    `WeightSharding.mesh_axes`."""
    divided = [i for i, name in enumerate(names) if axes.get(name) == FSDP]
    return _gather(leaf, *divided)[None] if divided else leaf[None]


def _gather(leaf: Array, axis: int) -> Array:
    return lax.all_gather(lax.stop_gradient(leaf), FSDP, axis=axis, tiled=True)


def _look_up(weight: Array, tokens: Array, sharding: WeightSharding) -> Array:
    if not sharding.split_vocabulary:
        return weight[tokens]
    index = tokens - lax.axis_index(TP) * len(weight)
    is_here = (index >= 0) & (index < len(weight))
    return lax.psum(jnp.where(is_here[..., None], weight[jnp.where(is_here, index, 0)], 0), TP)
