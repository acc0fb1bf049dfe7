"""Counts the memory that a layer keeps for its backward pass, in its traced program."""

import dataclasses

import jax
import jax.numpy as jnp
from jax.extend.core import Var

from jaxmux.data.microbatch import Microbatch

from .adapter_ops import AllAdapters
from .architectures import BackboneConfig
from .forward import ForwardOptions, SlotTable, hidden_states
from .modules import Weights


def kept_bytes(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: AllAdapters,
    microbatch: Microbatch,
    slots: SlotTable,
) -> int:
    """Bytes that one decoder layer keeps from its forward to its backward pass, under a remat
    policy.

    The function traces `hidden_states` and computes nothing: it reads only shapes and dtypes, so
    arrays may be `jax.ShapeDtypeStruct`s. The gradient is that of training, with respect to the
    adapters only. The result is the difference between a model of two layers and a model of one.

    `options.remat` is one policy for all layers. Only the shape of the microbatch counts.
    """

    def residual_bytes(layers: int) -> int:
        part = dataclasses.replace(config, num_layers=layers)

        def residuals(weights, adapters, accumulators, microbatch, slots):
            def forward(accumulators):
                return hidden_states(
                    part, weights, adapters, accumulators, microbatch, slots, options
                )

            return jax.tree.leaves(jax.vjp(forward, accumulators)[1])

        # Arrays of integers have no gradients.
        trained = jax.tree.map(
            lambda x: x if jnp.issubdtype(x.dtype, jnp.floating) else None, adapters
        )
        arguments = (weights, adapters, trained, microbatch, slots)
        closed = jax.make_jaxpr(residuals)(*jax.tree.map(jax.typeof, arguments))
        variables = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
        made = variables.difference(closed.jaxpr.invars, closed.jaxpr.constvars)
        return sum(v.aval.size * v.aval.dtype.itemsize for v in made)

    return residual_bytes(2) - residual_bytes(1)
