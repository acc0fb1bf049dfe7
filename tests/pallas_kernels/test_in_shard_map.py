"""The Hopper kernels inside `shard_map`, where tensor-parallel devices run them."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from grouped_lora_cases import (
    MIXED_RATES,
    Case,
    Results,
    assert_close,
    differentiate,
    in_float32,
    interpreted_on_hopper,
    make_case,
)
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxmux.pallas_kernels.collectives import TP
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.pallas_kernels.grouped_lora import Factors, Projection, Routing

LAYER = 1


def on_a_mesh(mesh: Mesh | AbstractMesh, case: Case, by_rows: bool):
    """`differentiate` on a mesh whose devices have some rows of the linears, or some columns."""
    rows, columns, whole = P(None, None, TP), P(None, None, None, TP), P()
    factors = Factors(rows, whole) if by_rows else Factors(whole, columns)
    x, outputs, weight = (
        (P(None, TP), whole, P(None, TP)) if by_rows else (whole, P(None, TP), P(None, None, TP))
    )
    projections = tuple(
        Projection(jax.tree.map(lambda _: weight, own.weight), factors) for own in case.projections
    )
    count = len(projections)
    specs = jax.tree.map(lambda _: whole, case)._replace(
        x=x,
        projections=projections,
        accumulators=(factors,) * count,
        cotangents=(outputs,) * count,
    )
    results = Results((outputs,) * count, x, None, (factors,) * count)

    def on_device(own: Case) -> Results:
        if own.dropout is not None:
            first = jax.lax.axis_index(TP) * own.x.shape[1]
            own = own._replace(dropout=own.dropout._replace(first_column=first))
        found = differentiate(own, LAYER, implementation="mosaic_gpu")
        if by_rows:
            return found._replace(outputs=jax.lax.psum(found.outputs, TP))
        return found._replace(dx=jax.lax.psum(found.dx, TP))

    return jax.jit(
        jax.shard_map(on_device, mesh=mesh, in_specs=(specs,), out_specs=results, check_vma=False)
    )


@pytest.mark.long
def test_interpreted_kernels_follow_the_formula():
    """The mesh has one device: the interpreter does not tell the barriers of two devices apart."""
    case = make_case(
        k=256,
        widths=(256,),
        rank=16,
        chunk_slot=(2, -1, 2),
        chunk_len=128,
        dtype=jnp.bfloat16,
        rates=MIXED_RATES,
        deviation=0.1,
    )
    mesh = Mesh(jax.devices()[:1], (TP,))
    with interpreted_on_hopper():
        found = jax.block_until_ready(on_a_mesh(mesh, case, by_rows=True)(case))
    reference = jax.jit(partial(differentiate, layer=LAYER, implementation="xla"))
    assert_close(found, reference(in_float32(case)))


@pytest.mark.long
@pytest.mark.parametrize(
    ("k", "widths", "by_rows"),
    [
        pytest.param(4096, (4096, 1024, 1024), False, id="8B, q, k and v"),
        pytest.param(8192, (8192,), True, id="70B, o", marks=pytest.mark.slow),
    ],
)
def test_linears_that_four_devices_share_lower(k, widths, by_rows, h200):
    auto, device = (AxisType.Auto,), h200.abstract_device
    mesh = AbstractMesh((4,), (TP,), auto, abstract_device=device)

    def shape(*sizes: int, dtype=jnp.bfloat16) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(sizes, dtype)

    def factors(n: int) -> Factors:
        given = {"dtype": jnp.float32}
        return Factors(shape(2, 4, k, 16, **given), shape(2, 4, 16, n, **given))

    projections = tuple(
        Projection(jax.eval_shape(FrozenWeight.of, shape(2, k, n)), factors(n)) for n in widths
    )
    case = Case(
        shape(8192, k),
        projections,
        tuple(map(factors, widths)),
        Routing(shape(64, dtype=jnp.int32), shape(4, dtype=jnp.float32)),
        None,
        tuple(shape(8192, n) for n in widths),
    )
    with jax.sharding.use_abstract_mesh(mesh):
        traced = on_a_mesh(mesh, case, by_rows).trace(case)
        text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert "mosaic_gpu" in text and "all_reduce" in text
