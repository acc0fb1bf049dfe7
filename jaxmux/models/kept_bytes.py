"""The memory that a layer keeps from its forward to its backward pass, counted in its traced
program."""

import dataclasses

import jax
from jax.extend.core import Var

from jaxmux.data.microbatch import Microbatch

from .adapted_linears import Adapters
from .architectures import BackboneConfig
from .forward import ForwardOptions, SlotTable, hidden_states
from .modules import Weights


def kept_bytes(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Adapters,
    microbatch: Microbatch,
    slots: SlotTable,
) -> int:
    """Bytes that one layer keeps from its forward to its backward pass.

    The gradient is taken with respect to the accumulators, as in training. The bytes of one layer
    are the difference between a model of two layers and a model of one. Nothing is computed: only
    shapes and dtypes of the arrays are read, so they may be `jax.ShapeDtypeStruct`s.

    Args:
      config: configuration of the backbone.
      options: static choices of the forward pass, with its remat policy.
      weights: weights of the backbone.
      adapters: adapters of all layers and slots.
      microbatch: a microbatch of the training run's shape class.
      slots: per-slot data.
    """

    def residual_bytes(layers: int) -> int:
        part = dataclasses.replace(config, num_layers=layers)

        def residuals(weights, adapters, accumulators, microbatch, slots):
            def forward(accumulators):
                arguments = (weights, adapters, accumulators, microbatch, slots)
                return hidden_states(part, *arguments, options)

            return jax.tree.leaves(jax.vjp(forward, accumulators)[1])

        arguments = (weights, adapters, adapters, microbatch, slots)
        closed = jax.make_jaxpr(residuals)(*jax.tree.map(jax.typeof, arguments))
        variables = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
        made = variables.difference(closed.jaxpr.invars, closed.jaxpr.constvars)
        return sum(v.aval.size * v.aval.dtype.itemsize for v in made)

    return residual_bytes(2) - residual_bytes(1)
