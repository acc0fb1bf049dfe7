"""How much memory there is, and how much a layer keeps for its backward pass."""

import dataclasses

import jax
from jax.extend.core import Var

from jaxmux.data.microbatch import Microbatch

from .adapted_linears import Adapters
from .architectures import BackboneConfig
from .forward import ForwardOptions, SlotTable, hidden_states
from .modules import Weights


def device_memory() -> int | None:
    """Bytes that JAX may use of the first device's memory; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def device_peak() -> int | None:
    """Bytes of the first device that were in use at once at most; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")


def kept_bytes(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Adapters,
    microbatch: Microbatch,
    slots: SlotTable,
) -> int:
    """Bytes that one layer keeps from its forward to its backward pass."""

    def residuals(layers: int) -> int:
        part = dataclasses.replace(config, num_layers=layers)

        def forward(weights, adapters, sums, microbatch, slots):
            def of_sums(sums):
                return hidden_states(part, weights, adapters, sums, microbatch, slots, options)

            return jax.tree.leaves(jax.vjp(of_sums, sums)[1])

        arguments = (weights, adapters, adapters, microbatch, slots)
        closed = jax.make_jaxpr(forward)(*jax.tree.map(jax.typeof, arguments))
        variables = {v for v in closed.jaxpr.outvars if isinstance(v, Var)}
        made = variables.difference(closed.jaxpr.invars, closed.jaxpr.constvars)
        return sum(v.aval.size * v.aval.dtype.itemsize for v in made)

    return residuals(2) - residuals(1)
