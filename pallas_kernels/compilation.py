"""Makes programs with many Mosaic GPU kernels compile quickly.

Python takes about 0.2 s to lower a kernel and XLA about 0.5 s to compile it, one kernel at a time.
The layers of a model call few different kernels many times. `traced_once` lets equal calls share
one trace, so that each kernel is lowered and compiled once; `compiled` compiles different kernels
in parallel.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir
from jaxtyping import Array, Float

# Name of the custom call to which Pallas lowers a Mosaic GPU kernel.
_TARGET = "mosaic_gpu_v2"

# Attributes of a kernel's custom call; one of them is the kernel's code.
Kernel = tuple[tuple[str, bytes | bool], ...]


def traced_once(*static: str) -> Callable[[Callable], Callable]:
    """Decorator for a function that calls a kernel: calls with equal shapes share one trace.

    JAX lowers equal traces once. Without the decorator, every call would be a different kernel for
    the compiler, because Pallas numbers the kernels that it lowers. `static` names the arguments
    that are not arrays; their values must be hashable.
    """
    # Inlined, so that the caller's program is the same as without the decorator.
    return partial(jax.jit, static_argnames=static, inline=True)


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """Compiles a lowered function as `lowered.compile()` does, but its kernels in parallel.

    Within the process, XLA caches compiled kernels by their hash. So each kernel is first compiled
    in a program with nothing else; when the whole program is compiled, its kernels are in the
    cache. Later calls of the lowered function with the same shapes are not compiled again.
    """
    if kernels := kernels_of(lowered):
        # One thread for each kernel: a thread is blocked while XLA waits for its kernel, so fewer
        # threads would compile fewer kernels at a time.
        with ThreadPoolExecutor(len(kernels)) as executor:
            list(executor.map(lambda kernel: alone.lower(kernel).compile(), kernels))
    return lowered.compile()


def kernels_of(lowered: jax.stages.Lowered) -> list[Kernel]:
    kernels: dict[Kernel, None] = {}

    def visit(operation: ir.Operation) -> ir.WalkResult:
        if (
            operation.name == "stablehlo.custom_call"
            and operation.attributes["call_target_name"].value == _TARGET
        ):
            attributes = operation.attributes["mhlo.backend_config"]
            kernels[tuple((each.name, _value(each.attr)) for each in attributes)] = None
        return ir.WalkResult.ADVANCE

    lowered.compiler_ir().operation.walk(visit)
    return list(kernels)


def _value(attribute: ir.Attribute) -> bytes | bool:
    return attribute.value_bytes if isinstance(attribute, ir.StringAttr) else attribute.value


@partial(jax.jit, static_argnums=0)
def alone(kernel: Kernel) -> Float[Array, ""]:
    """A program that consists of one kernel. It has no operands: it is compiled, never run."""
    return jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32))(**dict(kernel))
