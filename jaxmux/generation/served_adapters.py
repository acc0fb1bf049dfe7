"""The adapters of all requests, stacked in pools layer by layer, as the programs read them."""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import LOW_RANK_KIND, OUTSIDE
from jaxmux.peft import KINDS, LeafSpec, kind_of, pad, scale_of
from jaxmux.peft.leaves import Layout, named_leaves

from .requests import Request


class ServedAdapters(NamedTuple):
    """The adapters of T slots.

    Attributes:
      outside: the arrays at points outside the layers, by kind.
      of_layers: for each layer, the arrays [1, T, ...] by kind.
      scale: float32, the scales of the low-rank products, see `SlotTable`.
    """

    outside: dict[str, Any]
    of_layers: tuple[dict[str, Any], ...]
    scale: Float[Array, " T"]


def served_adapters(
    requests: Sequence[Request], config: BackboneConfig, dtype: jnp.dtype
) -> tuple[ServedAdapters, Layout]:
    """Puts the adapter of request i into slot i; slots of requests without an adapter change
    nothing. Low-rank factors get the compute dtype `dtype`.

    Returns:
      The adapters, and the axes of their arrays by kind and point.
    """
    outside: dict[str, Any] = {}
    of_layers: list[dict[str, Any]] = [{} for _ in range(config.num_layers)]
    axes: dict[str, Any] = {}
    for name, pool in stacked_pools(requests, config):
        in_dtype = partial(jnp.asarray, dtype=dtype if name == LOW_RANK_KIND else None)
        for tree in (outside, axes, *of_layers):
            tree[name] = {}
        for point, specs, arrays in pool:
            axes[name][point] = specs
            if point in OUTSIDE:
                outside[name][point] = jax.tree.map(in_dtype, arrays)
                continue
            # Arrays that belong to no layer are held once for all layers.
            arrays = jax.tree.map(
                lambda spec, x: x if "layer" in spec.axes else jnp.asarray(x), specs, arrays
            )
            for i, layer in enumerate(of_layers):
                cut = jax.tree.map(lambda spec, x, i=i: spec.cut(x, i, 1, True), specs, arrays)
                layer[name][point] = jax.tree.map(in_dtype, cut)
    scale = [scale_of(r.spec) if r.spec else 0.0 for r in requests]
    served = ServedAdapters(outside, tuple(of_layers), jnp.asarray(scale, jnp.float32))
    return served, Layout(axes)


@partial(jax.jit, static_argnums=(0,))
def adapters_of_chunks(
    layout: Layout, adapters: ServedAdapters, chunk_slot: Int[Array, " chunks"]
) -> ServedAdapters:
    """Gathers the adapters of T slots so that the adapter of chunk i is in slot i. A step then
    reads factors without copying them."""

    def gathered(pools: dict[str, Any]) -> dict[str, Any]:
        return {
            name: {
                point: jax.tree.map(
                    lambda spec, x: jnp.take(x, chunk_slot, spec.slot_axis),
                    layout.tree[name][point],
                    arrays,
                )
                for point, arrays in pool.items()
            }
            for name, pool in pools.items()
        }

    outside, of_layers, scale = adapters
    return ServedAdapters(gathered(outside), tuple(map(gathered, of_layers)), scale[chunk_slot])


def stacked_pools(
    requests: Sequence[Request], config: BackboneConfig
) -> Iterator[tuple[str, Iterator[tuple[str, Any, Any]]]]:
    """Yields the name of every kind in use, with an iterator over the points of its pool. For each
    point, this yields the point's name, its `LeafSpec`s, and NumPy arrays with the adapter of
    request i in slot i. The low-rank kind is always included."""
    trees = [kind_of(r.spec).in_pools(r.adapter) if r.spec else {} for r in requests]
    for name in sorted({LOW_RANK_KIND, *(name for tree in trees for name in tree)}):
        specifications = [r.spec for r, tree in zip(requests, trees, strict=True) if name in tree]
        points = sorted({p for spec in specifications for p in kind_of(spec).targets(spec, config)})
        rank = max((kind_of(spec).rank_in(name, spec) for spec in specifications), default=1)
        specs = KINDS[name].leaves(config, points, 1, rank)
        yield (
            name,
            ((point, specs[point], _stacked(point, specs[point], name, trees)) for point in specs),
        )


def _stacked(point: str, specs: Any, name: str, trees: Sequence[Any]) -> Any:
    of_slot = jax.tree.map(LeafSpec.of_slot, specs)
    padded = [pad(named_leaves(tree.get(name, {}).get(point, {})), of_slot) for tree in trees]
    return jax.tree.map(lambda spec, *leaves: np.stack(leaves, spec.slot_axis), specs, *padded)
