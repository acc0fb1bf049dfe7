"""Random inputs for the tests of the grouped LoRA kernels, and how results are computed and
compared.

Slot 3 of a `Case` owns no chunk in the routings of the test files.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Bool, Float

from jaxmux.pallas_kernels.counter_dropout import Dropout
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import (
    Factors,
    Projection,
    Routing,
    grouped_lora_linear,
    mosaic_gpu,
)

SLOTS, IDLE_SLOT = 4, 3
# Dropout rate of each slot.
MIXED_RATES = (0.5, 0.0, 0.25, 0.9)
# Owners of four chunks among three slots.
ROUTINGS = {
    "one task": (1, 1, 1, 1),
    "owners alternate": (0, 2, 0, 2),
    "empty in the middle": (2, -1, 2, 0),
    "empty at the ends": (-1, 0, 1, -1),
    "all empty": (-1, -1, -1, -1),
}


class Case(NamedTuple):
    """Arguments of the op, and the cotangents of its outputs.

    Attributes:
      x: the stream.
      projections: the linears that read it; gate, up and down for a gated MLP.
      accumulators: gradient accumulators of the projections' factors.
      routing: owners of chunks and scales of slots.
      dropout: None for none.
      cotangents: one for each output.
      residual: added to the output of a single projection or of the MLP; None for none.
    """

    x: Float[Array, "N k"]
    projections: tuple[Projection, ...]
    accumulators: tuple[Factors, ...]
    routing: Routing
    dropout: Dropout | None
    cotangents: tuple[Float[Array, "N n"], ...]
    residual: Float[Array, "N n"] | None = None

    def is_owned_by(self, slot: int) -> Bool[np.ndarray, " N"]:
        """Which tokens lie in the slot's chunks; those of slot -1 lie in empty chunks."""
        chunk_slot = np.asarray(self.routing.chunk_slot)
        return np.repeat(chunk_slot == slot, len(self.x) // len(chunk_slot))


def make_case(
    *,
    k: int,
    widths: Sequence[int],
    rank: int,
    chunk_slot: Sequence[int],
    chunk_len: int,
    layers: int = 2,
    slots: int = SLOTS,
    dtype: Any = jnp.float32,
    rates: Sequence[float] | None = None,
    deviation: float = 1.0,
    seed: int = 0,
) -> Case:
    """A case of normally distributed values.

    Args:
      k: width of the stream.
      widths: output width of each projection.
      rank: pool rank.
      chunk_slot: owner of each chunk, -1 for an empty one.
      chunk_len: tokens of a chunk.
      dtype: of the stream, weights and cotangents; factors and accumulators are float32.
      rates: dropout rate of each slot; None for no dropout.
      deviation: standard deviation of all values.
    """
    rng = np.random.default_rng(seed)
    tokens = chunk_len * len(chunk_slot)
    shapes = [(k, n) for n in widths]
    return Case(
        normals(rng, tokens, k, dtype=dtype, deviation=deviation),
        _projections(rng, shapes, layers, slots, rank, dtype, deviation),
        tuple(_factors(rng, shape, layers, slots, rank, deviation) for shape in shapes),
        _routing(chunk_slot, slots),
        None if rates is None else random_dropout(rng, rates, tokens),
        tuple(normals(rng, tokens, n, dtype=dtype, deviation=deviation) for n in widths),
    )


def make_mlp_case(
    *,
    d: int,
    wide: int,
    rank: int,
    chunk_slot: Sequence[int],
    chunk_len: int,
    layers: int = 2,
    slots: int = SLOTS,
    dtype: Any = jnp.bfloat16,
    deviation: float = 0.3,
) -> Case:
    """A case for a gated MLP of widths d and `wide`; see `make_case` for the other arguments."""
    rng = np.random.default_rng(0)
    tokens = chunk_len * len(chunk_slot)
    shapes = [(d, wide), (d, wide), (wide, d)]
    x, cotangent, residual = (
        normals(rng, tokens, d, dtype=dtype, deviation=deviation) for _ in range(3)
    )
    return Case(
        x,
        _projections(rng, shapes, layers, slots, rank, dtype, deviation),
        tuple(_factors(rng, shape, layers, slots, rank, deviation) for shape in shapes),
        # Larger scales make the rounding errors of the low-rank part exceed those of the MLP.
        _routing(chunk_slot, slots, scales=(0.75, 0.5, 0.9, 0.6)),
        None,
        (cotangent,),
        residual,
    )


def _projections(rng, shapes, layers, slots, rank, dtype, deviation) -> tuple[Projection, ...]:
    def projection(shape: tuple[int, int]) -> Projection:
        weight = normals(rng, layers, *shape, dtype=dtype, deviation=deviation)
        factors = _factors(rng, shape, layers, slots, rank, deviation)
        return Projection(FrozenWeight.of(weight), factors)

    return tuple(map(projection, shapes))


def _factors(rng, shape, layers, slots, rank, deviation) -> Factors:
    k, n = shape
    options = {"dtype": jnp.float32, "deviation": deviation}
    return Factors(
        normals(rng, layers, slots, k, rank, **options),
        normals(rng, layers, slots, rank, n, **options),
    )


def _routing(
    chunk_slot: Sequence[int], slots: int, scales: Sequence[float] = (2.0, 0.5, 1.0, 4.0)
) -> Routing:
    scale = np.resize(scales, slots)
    return Routing(jnp.asarray(chunk_slot, jnp.int32), jnp.asarray(scale, jnp.float32))


def random_dropout(rng: np.random.Generator, rates: Sequence[float], tokens: int) -> Dropout:
    """Dropout with random keys and samples."""
    return Dropout(
        rate=jnp.asarray(rates, jnp.float32),
        key=jnp.asarray(rng.integers(2**32, size=len(rates)), jnp.uint32),
        sample_id=jnp.asarray(rng.integers(5, size=tokens), jnp.uint32),
        position=jnp.asarray(np.arange(tokens) % 11, jnp.int32),
    )


def with_residual(case: Case) -> Case:
    """The first projection alone, whose output is added to a residual."""
    return case._replace(
        projections=case.projections[:1],
        accumulators=case.accumulators[:1],
        cotangents=case.cotangents[:1],
        residual=case.cotangents[0][::-1],
    )


def in_float32(case: Case) -> Case:
    """The same case with stream, weights and cotangents in float32."""
    x, projections, cotangents, residual = jax.tree.map(
        lambda leaf: leaf.astype(jnp.float32),
        (case.x, case.projections, case.cotangents, case.residual),
        is_leaf=lambda node: isinstance(node, FrozenWeight),
    )
    return case._replace(x=x, projections=projections, cotangents=cotangents, residual=residual)


def poisoned(case: Case, where: str, slot: int, value: float) -> Case:
    """The case with something of one slot overwritten by `value`.

    Args:
      where: "x" or "cotangents" for the slot's tokens; "scale"; "a", "b" or, for both, "factors".
    """
    if where in ("x", "cotangents"):
        owned = case.is_owned_by(slot)[:, None]
        arrays = jax.tree.map(
            lambda array: jnp.where(owned, value, array).astype(array.dtype), getattr(case, where)
        )
        return case._replace(**{where: arrays})
    if where == "scale":
        scale = case.routing.scale.at[slot].set(value)
        return case._replace(routing=case.routing._replace(scale=scale))
    names = ("a", "b") if where == "factors" else (where,)

    def poison(p: Projection) -> Projection:
        factors = {name: getattr(p.factors, name).at[:, slot].set(value) for name in names}
        return p._replace(factors=p.factors._replace(**factors))

    return case._replace(projections=tuple(map(poison, case.projections)))


def of_columns(case: Case, columns: slice) -> Case:
    """The case of a device that has only these columns of the stream, and the rows of the weights
    and factors that multiply them."""

    def rows(factors: Factors) -> Factors:
        return factors._replace(a=factors.a[:, :, columns])

    def projection(p: Projection) -> Projection:
        weight = jax.tree.map(lambda leaf: leaf[:, columns], p.weight)
        return Projection(weight, rows(p.factors))

    return case._replace(
        x=case.x[:, columns],
        projections=tuple(map(projection, case.projections)),
        accumulators=tuple(map(rows, case.accumulators)),
        dropout=case.dropout._replace(first_column=columns.start),
    )


class Results(NamedTuple):
    """Outputs, gradients and new accumulators of a case.

    Attributes:
      outputs: of each projection.
      dx: gradient of the stream.
      d_residual: gradient of the residual; None where there is none.
      accumulators: the accumulators with the gradients of the factors added.
    """

    outputs: tuple[Float[Array, "N n"], ...]
    dx: Float[Array, "N k"]
    d_residual: Float[Array, "N n"] | None
    accumulators: tuple[Factors, ...]


def differentiate(
    case: Case, layer: int, modules: tuple[int, ...] | None = None, implementation=None
) -> Results:
    """Runs `grouped_lora_linear` forward and backward; `modules` are 0, 1, … unless given."""
    modules = modules or tuple(range(len(case.projections)))

    def linear(x, residual, accumulators):
        return grouped_lora_linear(
            x,
            case.projections,
            accumulators,
            case.routing,
            case.dropout,
            layer,
            modules,
            implementation,
            residual,
        )

    (outputs, _), vjp = jax.vjp(linear, case.x, case.residual, case.accumulators)
    return Results(outputs, *vjp((case.cotangents, case.accumulators)))


def joined(case: Case, parts: Sequence[Results]) -> Results:
    """The results of a case, float32, from those of its columns (`of_columns`), part by part: the
    outputs and the gradients of B are sums over the parts."""
    parts = jax.tree.map(lambda leaf: leaf.astype(jnp.float32), parts)

    def factors(before: Factors, *after: Factors) -> Factors:
        added = sum(each.b - before.b for each in after)
        return Factors(jnp.concatenate([each.a for each in after], axis=2), before.b + added)

    return Results(
        outputs=jax.tree.map(lambda *each: sum(each), *(part.outputs for part in parts)),
        dx=jnp.concatenate([part.dx for part in parts], axis=1),
        d_residual=None,
        accumulators=tuple(map(factors, case.accumulators, *(part.accumulators for part in parts))),
    )


@contextmanager
def interpreted_on_hopper() -> Iterator[None]:
    """Lets the Hopper implementation serve calls on CPU, its kernels in interpret mode; fails if a
    kernel has a data race. Results must be complete when the context ends."""
    params = plgpu.InterpretGPUParams(detect_races=True)
    with pytest.MonkeyPatch.context() as patch, plgpu.force_gpu_interpret_mode(params):
        patch.setattr(mosaic_gpu, "is_hopper", lambda: True)
        yield
    assert not gpu_callbacks.get_races().races_found


def pairs(one: Any, other: Any) -> Iterator[tuple[Array, Array]]:
    """The leaves of two trees of the same structure, side by side."""
    return zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)


def relative_error(found: Any, wanted: Any) -> float:
    """Norm of the difference over the norm of `wanted`."""
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def assert_close(found: Any, wanted: Any) -> None:
    """Every array lies within 1e-2 of the reference in norm, which bfloat16 allows."""
    for one, other in pairs(found, wanted):
        one, other = (np.asarray(x, np.float32) for x in (one, other))
        assert np.linalg.norm(one - other) <= 1e-2 * np.linalg.norm(other)


def assert_same_bits(one: Any, other: Any) -> None:
    for x, y in pairs(one, other):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def owned_chunks(chunk_slot: Sequence[int], tokens: int) -> list[tuple[int, slice]]:
    """Owner and rows of every chunk that has an owner."""
    size = tokens // len(chunk_slot)
    return [(s, slice(i * size, (i + 1) * size)) for i, s in enumerate(chunk_slot) if s >= 0]


def normals(
    rng: np.random.Generator, *shape: int, dtype: Any = jnp.bfloat16, deviation: float = 1.0
) -> Array:
    return jnp.asarray(np.float32(deviation) * rng.standard_normal(shape, np.float32), dtype)


def abstract(*shape: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def fill_free_memory_with_nan() -> None:
    """Writes NaN to 8 GiB of the device's free memory, so that elements of a result that a kernel
    leaves unwritten are noticed."""
    jax.block_until_ready([jnp.full(1 << 28, jnp.nan, jnp.float32) for _ in range(8)])
