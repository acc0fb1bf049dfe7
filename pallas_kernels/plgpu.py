"""`jax.experimental.pallas.mosaic_gpu`, imported when a kernel first uses it.

The import takes 0.3 s, and only GPUs run these kernels.
"""

from typing import Any


def __getattr__(name: str) -> Any:
    from jax.experimental.pallas import mosaic_gpu

    return getattr(mosaic_gpu, name)
