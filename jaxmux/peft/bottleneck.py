"""Bottleneck adapters: small networks in the residual stream (Houlsby et al. 2019)."""

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxmux.field_checks import Count, Number, checked_dataclass
from jaxmux.models import BackboneConfig
from jaxmux.models.adapter_ops import AdapterOp, matmul_of_chunks
from jaxmux.planner.costs.pool_spec import PointWork

from .kind import BaseTensors
from .leaves import LeafSpec
from .targets import LayerMask, refuse_size

# The sub-blocks of a layer.
ATTENTION, MLP = "self_attn", "mlp"
# Each function is 0 at 0, so that padding an adapter to a larger size does not change its output.
ACTIVATIONS = {
    "relu": jax.nn.relu,
    "swish": jax.nn.silu,
    "gelu": lambda x: jax.nn.gelu(x, approximate=False),
    "gelu_new": lambda x: jax.nn.gelu(x, approximate=True),
    "tanh": jnp.tanh,
    "leakyrelu": jax.nn.leaky_relu,
}


class Form(NamedTuple):
    """A way to put bottlenecks into a layer.

    Attributes:
      source: input of a bottleneck: 0 for the residual stream after the sub-block, 1 for the stream
        before the sub-block, 2 for the output of the sub-block.
      blocks: the sub-blocks that have a bottleneck.
      activation, scaling: the defaults of `Bottleneck`.
      up_is_random: whether the second matrix begins with random values; otherwise it begins at
        zero.
    """

    source: int
    blocks: tuple[str, ...]
    activation: str
    scaling: float
    up_is_random: bool


FORMS = {
    "pfeiffer": Form(0, (MLP,), "relu", 1.0, True),
    "parallel": Form(1, (MLP,), "relu", 4.0, False),
    "houlsby": Form(2, (ATTENTION, MLP), "swish", 1.0, True),
}


@checked_dataclass
class Bottleneck:
    """A network with a narrow middle, `f(z) = scaling · (act(z D + b) U + c)`. Its result is added
    to the residual stream. D is [d, m] and U is [m, d] for the model width d and the size m.

    Let x be the residual stream before a sub-block and h the sub-block's output. The stream after
    the sub-block becomes

    - "pfeiffer": x + h + f(x + h) behind the MLP (Pfeiffer et al. 2021; AdapterHub's seq_bn);
    - "houlsby": x + h + f(h) behind attention and behind the MLP (Houlsby et al. 2019;
      double_seq_bn);
    - "parallel": x + h + f(x) behind the MLP (He et al. 2022; par_bn).

    In the first two forms, D and U begin with normal values of standard deviation 0.02, so the
    adapter changes the backbone from the beginning, as in AdapterHub. In "parallel", U begins at
    zero.

    Attributes:
      form: "pfeiffer", "houlsby" or "parallel".
      size: m, the width of the middle.
      activation: the function between the two products: "relu", "swish", "gelu" (exact), "gelu_new"
        (its approximation by tanh), "tanh" or "leakyrelu". None takes "relu", for "houlsby"
        "swish".
      scaling: factor of the result. None takes 1, for "parallel" 4.

    Raises:
      ValueError: a value is outside its range.
    """

    form: Literal[*FORMS] = "pfeiffer"
    size: Count = 64
    activation: Literal[*ACTIVATIONS] | None = None
    scaling: Number | None = None

    @property
    def chosen_activation(self) -> str:
        """The activation; the default of the form if `activation` is None."""
        return self.activation or FORMS[self.form].activation

    @property
    def chosen_scaling(self) -> float:
        """The scaling; the default of the form if `scaling` is None."""
        return FORMS[self.form].scaling if self.scaling is None else self.scaling


class BottleneckOp(AdapterOp):
    """Adds the bottleneck of each chunk's task to the output of a sub-block."""

    def block_output(self, own, before, h):
        source = own["source"][:, None, None]
        z = jnp.where(source == 0, before + h, jnp.where(source == 1, before, h))
        middle = matmul_of_chunks(z, own["down"]) + own["down_bias"][:, None]
        chosen = own["activation"][:, None, None]
        activated = sum(
            jnp.where(chosen == i, act(middle), 0) for i, act in enumerate(ACTIVATIONS.values())
        )
        up = matmul_of_chunks(activated.astype(h.dtype), own["up"]) + own["up_bias"][:, None]
        return h + own["scaling"][:, None, None] * up


def bottleneck_targets(spec: Bottleneck, config: BackboneConfig) -> dict[str, LayerMask]:
    refuse_size("size", spec.size, config)
    return {block: np.ones(config.num_layers, bool) for block in FORMS[spec.form].blocks}


def bottleneck_work(config: BackboneConfig, point: str, rank: int) -> PointWork:
    layers, d = config.num_layers, config.hidden_size
    # Layers keep the output of the sub-block for the backward pass.
    return PointWork(2 * layers * ((2 * d + 1) * rank + d), 3 * layers * d, layers * d)


def bottleneck_leaves(
    config: BackboneConfig, points: Sequence[str], slots: int, rank: int
) -> dict[str, Any]:
    layers, d = config.num_layers, config.hidden_size
    both, sizes = ("layer", "slot"), (layers, slots)

    def number_of_slot(dtype: str) -> LeafSpec:
        return LeafSpec(sizes, both, trained=False, dtype=dtype)

    return {
        point: {
            "down": LeafSpec((*sizes, d, rank), (*both, "input", "rank")),
            "down_bias": LeafSpec((*sizes, rank), (*both, "rank")),
            "up": LeafSpec((*sizes, rank, d), (*both, "rank", "output")),
            "up_bias": LeafSpec((*sizes, d), (*both, "output")),
            "scaling": number_of_slot("float32"),
            "source": number_of_slot("int32"),
            "activation": number_of_slot("int32"),
        }
        for point in points
    }


def initial_bottleneck(
    spec: Bottleneck,
    targets: Mapping[str, LayerMask],
    config: BackboneConfig,
    seed: int,
    base: BaseTensors | None,
) -> dict[str, Any]:
    form, layers = FORMS[spec.form], config.num_layers
    d, m = config.hidden_size, spec.size
    adapter = {}
    for point in targets:
        down, up = np.zeros((layers, d, m), np.float32), np.zeros((layers, m, d), np.float32)
        for layer in range(layers):
            rng = np.random.default_rng([seed, zlib.crc32(point.encode()), layer])
            if form.up_is_random:
                down[layer] = 0.02 * rng.standard_normal((d, m))
                up[layer] = 0.02 * rng.standard_normal((m, d))
            else:
                down[layer] = rng.uniform(-1, 1, (d, m)) / math.sqrt(d)
        adapter[point] = with_numbers(
            spec,
            {
                "down": down,
                "down_bias": np.zeros((layers, m), np.float32),
                "up": up,
                "up_bias": np.zeros((layers, d), np.float32),
            },
        )
    return adapter


def with_numbers(spec: Bottleneck, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Adds arrays with the scaling, source and activation of a bottleneck to its trained arrays."""
    layers = len(arrays["down"])
    numbers = {
        "scaling": np.float32(spec.chosen_scaling),
        "source": np.int32(FORMS[spec.form].source),
        "activation": np.int32(list(ACTIVATIONS).index(spec.chosen_activation)),
    }
    return {**arrays, **{name: np.full(layers, value) for name, value in numbers.items()}}


def bottleneck_rates(
    spec: Bottleneck, targets: Mapping[str, LayerMask]
) -> dict[str, dict[str, np.ndarray]]:
    trained = ("down", "down_bias", "up", "up_bias")
    return {
        point: {name: mask.astype(np.float32) for name in trained}
        for point, mask in targets.items()
    }
