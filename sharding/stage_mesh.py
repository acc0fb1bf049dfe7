"""The devices of a pipeline stage as a mesh, and how arrays are divided among them.

Within `only_compiling`, a thread can do the work of an engine on shapes with shardings in place of
arrays. It then compiles the programs that the meshes would run, while the engine itself trains.
"""

import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cached_property, partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from jaxmux.models import MODULES, BackboneConfig, Weights, linear_sizes
from jaxmux.models.modules import divisible_weights, is_weight
from jaxmux.models.weight_sharding import FSDP, ROW_PARALLEL, TP, UNDIVIDED, WeightSharding
from jaxmux.pallas_kernels.collectives import blocks_of_sums
from jaxmux.pallas_kernels.compilation import compiled
from jaxmux.pallas_kernels.frozen_weight import FrozenWeight
from jaxmux.peft import LeafSpec
from jaxmux.planner.devices import ONE_DEVICE, Replica, Stage

from .transfers import is_local, move, put, share

DP = "dp"
# If there are more devices than key heads, every device has the whole outputs of these linears.
KEY_MODULES = ("self_attn.k_proj", "self_attn.v_proj")
# The axes along which devices train different samples.
DATA = (DP, FSDP)
# All axes of a mesh. Devices that are neighbours along the last axis communicate most.
AXES = (*DATA, TP)

_only_compiling: ContextVar[bool] = ContextVar("only_compiling", default=False)


@contextmanager
def only_compiling() -> Iterator[None]:
    """Within this context, meshes run and copy nothing: `StageMesh.run` only compiles the program,
    and every array is a `jax.ShapeDtypeStruct` with a sharding. Other threads are not affected."""
    token = _only_compiling.set(True)
    try:
        yield
    finally:
        _only_compiling.reset(token)


def compiles_only() -> bool:
    return _only_compiling.get()


def compiled_results(program: Callable[..., Any], *arguments: Any) -> Any:
    """Compiles a function from `jax.jit` for these arguments, arrays or their shapes. Returns the
    shapes, dtypes and shardings of its results."""
    lowered = program.lower(*arguments)
    shardings = compiled(lowered).output_shardings
    return jax.tree.map(_shape, lowered.out_info, shardings)


def shapes_of(tree: Any, sharding: Any = None) -> Any:
    """Shapes, dtypes and shardings of arrays. `sharding` is one for all of the arrays, or a tree
    like `tree`; None takes the sharding that each array has."""
    if sharding is None:
        return jax.tree.map(lambda x: _shape(x, x.sharding), tree)
    if isinstance(sharding, jax.sharding.Sharding):
        return jax.tree.map(lambda x: _shape(x, sharding), tree)
    return jax.tree.map(_shape, tree, sharding)


def in_threads(function: Callable[[Any], Any], values: Iterable[Any]) -> list[Any]:
    """The function's result for each value. Each is computed in a thread, which is within
    `only_compiling` if the caller is. Raises the first exception of the function."""
    values = list(values)
    if len(values) < 2:
        return [function(value) for value in values]
    with ThreadPoolExecutor() as threads:
        results = [threads.submit(copy_context().run, function, value) for value in values]
        return [result.result() for result in results]


def _shape(x: Any, sharding: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


@dataclasses.dataclass(frozen=True)
class StageMesh:
    """The mesh of a pipeline stage, with the axes "dp", "fsdp" and "tp".

    A *data shard* is the group of devices that holds one microbatch: the tp devices that have the
    same index on the axes dp and fsdp. Every data shard trains its own samples. Gradients and
    losses stay where they were computed until an update. Their arrays have a leading axis "copy",
    and the value of such an array is its sum over this axis.
    """

    mesh: Mesh
    weights: WeightSharding

    @classmethod
    def of(cls, stage: Stage, devices: Sequence[jax.Device], config: BackboneConfig) -> "StageMesh":
        sizes = (stage.dp, stage.fsdp, stage.tp)
        weights = WeightSharding(
            tp=stage.tp,
            fsdp=stage.fsdp,
            whole_keys=stage.tp > config.num_kv_heads,
            split_vocabulary=stage.tp > 1 and config.vocab_size % stage.tp == 0,
        )
        return cls(Mesh(np.asarray(devices).reshape(sizes), AXES), weights)

    def device_config(self, config: BackboneConfig, layers: int) -> BackboneConfig:
        """The configuration of a model that is as large as one device's share. If every device has
        all keys, the model has one key head: the one to which the device's queries attend."""
        tp = self.weights.tp
        return dataclasses.replace(
            config,
            num_layers=layers,
            num_heads=config.num_heads // tp,
            num_kv_heads=max(1, config.num_kv_heads // tp),
            intermediate_size=config.intermediate_size // tp,
            vocab_size=config.vocab_size // (tp if self.weights.split_vocabulary else 1),
        )

    def device_adapters(self, adapters: Any, specs: Any, config: BackboneConfig) -> Any:
        """The shapes of one device's adapters, changed to suit `device_config`. `adapters` has the
        shapes by kind, and `specs` is a tree of `LeafSpec` like it, in which names of linears are
        keys."""

        def shape_of(path: tuple[Any, ...], spec: LeafSpec, leaf: Any) -> jax.ShapeDtypeStruct:
            module = _module(path)
            if module not in KEY_MODULES or "output" not in spec.axes:
                return leaf
            shape = list(leaf.shape)
            shape[spec.axes.index("output")] = linear_sizes(config, module)[1]
            return jax.ShapeDtypeStruct(tuple(shape), leaf.dtype)

        if not self.weights.whole_keys:
            return adapters
        return jax.tree.map_with_path(shape_of, specs, adapters)

    @property
    def shards(self) -> int:
        """Number of data shards: dp · fsdp."""
        return self.mesh.shape[DP] * self.mesh.shape[FSDP]

    @cached_property
    def is_local(self) -> bool:
        return is_local(self.mesh)

    def put(self, tree: Any, specs: Any) -> Any:
        """Copies arrays of the host, or arrays that lie on these devices already, to the devices.
        `specs` is a tree of `PartitionSpec`, or one for all arrays."""
        if compiles_only():
            return shapes_of(tree, self.shardings(specs))
        if jax.process_count() == 1:
            return jax.device_put(tree, self.shardings(specs))
        return put(tree, self.shardings(specs))

    def move(self, tree: Any, target: "StageMesh", spec: P) -> Any:
        """Copies arrays from this mesh to `target`, which is this mesh itself or has other devices
        only. On both meshes all arrays are divided by `spec`: P(), or P(DATA) for an axis of data
        shards."""
        if compiles_only():
            return shapes_of(tree, target.shardings(spec))
        return move(tree, self.mesh, target.mesh, spec)

    def share(self, tree: Any) -> Any:
        """Lets every process read arrays of this mesh; see `transfers.share`."""
        return tree if jax.process_count() == 1 else share(tree, self.mesh)

    def read(self, array: Any) -> np.ndarray | jax.Array:
        """An array of this mesh, for every process. If there are several processes, each waits for
        the array, so that a device never holds more than one array as a whole."""
        shared = self.share(array)
        return shared if jax.process_count() == 1 else np.asarray(shared)

    def run(self, program: Callable[..., Any], *arguments: Any) -> Any:
        """Dispatches a function from `jax.jit` if this process has devices of the mesh; its
        arguments are arrays of this mesh or of the host. In other processes, the result has shapes
        and dtypes (`jax.ShapeDtypeStruct`) in place of arrays. Within `only_compiling` the program
        is only compiled."""
        if compiles_only():
            return compiled_results(program, *arguments)
        return program(*arguments) if self.is_local else program.eval_shape(*arguments)

    def shardings(self, specs: Any) -> Any:
        """The `NamedSharding` of a `PartitionSpec`, or of each one in a tree."""
        return jax.tree.map(lambda spec: NamedSharding(self.mesh, spec), specs)

    def of_one_device(self, tree: Any, specs: Any) -> Any:
        """Shapes and dtypes of the parts of arrays that one device holds. `specs` is a tree like
        `tree` with the `PartitionSpec` of every array."""

        def part(x: Any, sharding: NamedSharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(sharding.shard_shape(x.shape), x.dtype)

        return jax.tree.map(part, tree, self.shardings(specs))

    def weight_specs(self, weights: Weights) -> Weights:
        """A tree like `weights` with the `PartitionSpec` of every array.

        Tensor parallelism divides a linear along its output or its input (see `WeightSharding`).
        Fully sharded data parallelism divides it along the other one, which is the model width.
        If the mesh divides any weights, they must come from `divisible_weights`.
        """

        vocabulary = TP if self.weights.split_vocabulary else None

        def spec(path: tuple[Any, ...], leaf: Any) -> P | FrozenWeight:
            *_, module, name = (key.key for key in path if isinstance(key, jax.tree_util.DictKey))
            axes = self.weights.mesh_axes(module)
            if module == "embed_tokens":
                return P(vocabulary, FSDP)
            if module == "lm_head":
                axes = {"input": FSDP, "output": vocabulary}
            if name == "kernel":
                return leaf.map_axes(partial(of_kernel, axes))
            if name == "bias" and module not in ROW_PARALLEL:
                return P(None, axes["output"])
            return P()

        def of_kernel(axes: dict[str, str | None], leaf: Any, names: tuple[str | None, ...]) -> P:
            layers = (None,) * (leaf.ndim - len(names))
            return P(*layers, *(axes.get(name) for name in names))

        return jax.tree.map_with_path(spec, weights, is_leaf=is_weight)

    def divisible_weights(self, weights: Weights) -> Weights:
        """The weights in formats that can be divided among devices, if the mesh divides any."""
        is_whole = self.weights.tp == self.weights.fsdp == 1
        return weights if is_whole else divisible_weights(weights)

    def leaf_specs(self, leaves: Any) -> Any:
        """A tree with the `PartitionSpec` of every array of the adapters or their training state,
        from a tree of `LeafSpec` in which the names of linears are keys."""

        def spec(path: tuple[Any, ...], leaf: LeafSpec) -> P:
            divided, partial_sums = self._of_leaf(path, leaf)
            axes = {"copy": AXES if partial_sums else DATA, divided: TP}
            return P(*(axes.get(axis) for axis in leaf.axes))

        return jax.tree.map_with_path(spec, leaves)

    def with_copies(self, leaves: Any) -> Any:
        """The tree of `LeafSpec` with a leading axis "copy" added to every array: devices compute
        summands of the array, which are summed at an update."""

        def copied(path: tuple[Any, ...], leaf: LeafSpec) -> LeafSpec:
            _, partial_sums = self._of_leaf(path, leaf)
            copies = self.mesh.size if partial_sums else self.shards
            return dataclasses.replace(leaf, shape=(copies, *leaf.shape), axes=("copy", *leaf.axes))

        return jax.tree.map_with_path(copied, leaves)

    def _of_leaf(self, path: tuple[Any, ...], leaf: LeafSpec) -> tuple[str | None, bool]:
        """The axis by which tensor parallelism divides an array, and whether a device computes
        only a summand of the array's gradient."""
        module = _module(path)
        if module is None or self.weights.tp == 1:
            return None, False
        divided = self.weights.divided_axis(module)
        return (divided, False) if divided in leaf.axes else (None, True)


def _module(path: tuple[Any, ...]) -> str | None:
    """The linear to which an array of adapters belongs; None if it belongs to none."""
    keys = (getattr(key, "key", None) for key in path)
    return next((key for key in keys if key in MODULES), None)


@dataclasses.dataclass(frozen=True)
class OneDevice(StageMesh):
    """The device of a backbone that is neither divided nor part of a pipeline. Its arrays have no
    axes of copies or data shards, so its programs are those of a single device, without
    `jax.shard_map`."""

    @classmethod
    def of_device(cls, device: jax.Device) -> "OneDevice":
        return cls(Mesh(np.asarray([[[device]]]), AXES), UNDIVIDED)

    @property
    def device(self) -> jax.Device:
        return self.mesh.devices.item()

    def shardings(self, specs: Any) -> Any:
        return jax.tree.map(lambda _: SingleDeviceSharding(self.device), specs)

    def with_copies(self, leaves: Any) -> Any:
        return leaves


def stage_meshes(
    replica: Replica, devices: Sequence[jax.Device], config: BackboneConfig
) -> list[StageMesh]:
    """The meshes of a replica's stages, which take the devices in their order."""
    if replica == ONE_DEVICE:
        return [OneDevice.of_device(devices[0])]
    left = iter(devices)
    if blocks := max(blocks_of_sums(stage.tp) for stage in replica.stages):
        # NCCL reads this when devices first communicate.
        os.environ.setdefault("NCCL_MAX_CTAS", str(blocks))
    return [
        StageMesh.of(stage, [next(left) for _ in range(stage.devices)], config)
        for stage in replica.stages
    ]
