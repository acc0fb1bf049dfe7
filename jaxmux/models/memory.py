"""What to keep for the backward pass in the memory that there is."""

import dataclasses
import logging
from collections.abc import Mapping
from itertools import groupby

import jax
from jax.extend.core import Var

from jaxmux.data.microbatch import Microbatch

from .base_op import Adapters
from .config import BackboneConfig
from .forward import ForwardOptions, SlotTable, hidden_states
from .loss import block_bytes
from .modules import Weights

_log = logging.getLogger("jaxmux")

# From least to most recomputation. "none" is not among them: it is no faster than "dots".
_PREFERENCE = ("dots", "lean", "full")


def choose_remat(
    config: BackboneConfig,
    options: ForwardOptions,
    weights: Weights,
    adapters: Adapters,
    microbatch: Microbatch,
    slots: SlotTable,
    room: int,
) -> tuple[str, ...]:
    """The remat policy of every layer that recomputes least in `room` bytes of memory.

    Args:
      options: those of the step; their `remat` is not read.
      microbatch: one of the run's; only shapes and dtypes are read, here and of all other arrays.
      room: bytes that the step may use besides weights and train state.
    """

    # What bears a name is the same in every implementation, and plain XLA is traced fastest.
    plain = options._replace(attention="xla", grouped_lora="xla", unroll=False)
    sizes = {
        policy: kept_bytes(
            config, plain._replace(remat=policy), weights, adapters, microbatch, slots
        )
        for policy in _PREFERENCE
    }
    # While one layer goes backward, all that it computed is there again, and its gradients.
    working = max(2 * sizes["dots"], block_bytes(config.vocab_size))
    policies = fill(sizes, config.num_layers, room - working)
    needed = working + sum(sizes[policy] for policy in policies)
    _log.info(
        "kept for the backward pass: %s; about %.1f of %.1f GiB",
        ", ".join(
            f"{policy!r} in {len(list(group))} layers" for policy, group in groupby(policies)
        ),
        needed / 2**30,
        room / 2**30,
    )
    return policies


def device_memory() -> int | None:
    """Bytes that JAX may use of the first device's memory; None where it does not tell."""
    return (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")


def fill(sizes: Mapping[str, int], layers: int, room: int) -> tuple[str, ...]:
    """As many layers under the first policy as there is room for, the others under the next.

    Args:
      sizes: bytes that a layer keeps under each policy, in order of preference and falling.
      room: bytes for all layers. Where even the last policy needs more, all layers get it.
    """
    names = list(sizes)
    for more, less in zip(names, names[1:], strict=False):
        if sizes[less] * layers <= room:
            count = layers
            if sizes[more] > sizes[less]:
                count = min(layers, (room - sizes[less] * layers) // (sizes[more] - sizes[less]))
            return (more,) * count + (less,) * (layers - count)
    return (names[-1],) * layers


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
