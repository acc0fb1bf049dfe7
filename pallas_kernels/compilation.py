"""What keeps programs of many Mosaic GPU kernels quick to compile.

Python lowers a kernel in about a fifth of a second, and XLA compiles it in half a second, one after
the other. A model's layers call few kernels often: each is traced, lowered and compiled once, and
all are compiled side by side.
"""

from concurrent.futures import ThreadPoolExecutor
from functools import partial

import jax
import jax.numpy as jnp
from jax.extend.mlir import ir

# What Pallas lowers a kernel to.
_TARGET = "mosaic_gpu_v2"

# The attributes of a kernel's custom call, its code among them.
Kernel = tuple[tuple[str, bytes | bool], ...]


def traced_once(*static: str):
    """Decorates the function of a kernel: its calls with arrays of the same shapes share one trace,
    by which JAX knows them for the same when it lowers a program.

    Without it, each is another kernel, for the compiler too: Pallas numbers what it lowers.

    Args:
      static: names of the arguments that are no arrays.
    """
    # Inlined, so that the caller's program is the same as without it.
    return partial(jax.jit, static_argnames=static, inline=True)


def compiled(lowered: jax.stages.Lowered) -> jax.stages.Compiled:
    """`lowered.compile()`, sooner: the program's kernels are compiled side by side.

    XLA knows a kernel by its hash wherever in the process it was compiled. So every kernel first
    gets a program of its own, and the program itself finds them done. A call of the function that
    was lowered, with the same shapes, is not compiled again.
    """
    if kernels := kernels_of(lowered):
        # As many threads as kernels: XLA's own part of a compilation waits for the kernels that are
        # being compiled, and would keep a thread from its next.
        with ThreadPoolExecutor(len(kernels)) as executor:
            list(executor.map(lambda kernel: alone.lower(kernel).compile(), kernels))
    return lowered.compile()


def kernels_of(lowered: jax.stages.Lowered) -> list[Kernel]:
    """The Mosaic GPU kernels of a program, each once."""
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
def alone(kernel: Kernel) -> jax.Array:
    """A program that holds a kernel. It is there to be compiled, not run, and has no operands."""
    return jax.ffi.ffi_call(_TARGET, jax.ShapeDtypeStruct((), jnp.float32))(**dict(kernel))
