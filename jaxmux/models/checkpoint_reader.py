"""Reads the weights of a backbone from a Hugging Face checkpoint folder, whole or in parts."""

import dataclasses
import logging
import math
import os
import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from functools import cache, partial
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from jaxmux.pallas_kernels.frozen_weight import PLAIN_FORMATS, FrozenWeight

from .architectures import MODULES, BackboneConfig, linear_sizes
from .checkpoint_files import HEAD_TENSOR, CheckpointTensors
from .errors import BackboneError
from .modules import Weights, abstract_weights, is_weight, layer_linears
from .quantised.linears import layer_name, quantised_tensors, stored_linear, weights_of
from .quantised.settings import WHAT_TO_DO
from .quantised.stored_linear import StoredLinear
from .tensor_names import HEAD, hf_name, module_path, tensor_shapes

# Dtypes, as safetensors names them, of tensors that need no decoding.
_FLOATING = ("BF16", "F16", "F32", "F64")
# Endings of the names of scales that only inference needs: of activations, and of keys and values.
_UNUSED = ("_scale", "_scale_ub", "_zero_point")
# At most this many bytes of a tensor are read by a thread and copied to a device at a time.
_PIECE_BYTES = 64 * 2**20
# One thread copies 2 GB/s to an H200, eight copy 8 GB/s, and sixteen are not faster.
_THREADS = 8
# See `_short_turns`.
_TURN_SECONDS = 0.0005

# Called with the number of bytes of weights that have just arrived on the devices.
Progress = Callable[[int], None]


class _Part(NamedTuple):
    """The part of a parameter that one device keeps, in the layout of the file.

    Attributes:
      device: the device; None means the default device.
      rows: indices of the tensor's first axis.
      columns: the slice of the tensor's second axis, if there is one.
      shape: shape of the array on the device, including the axis of layers.
    """

    device: jax.Device | None
    rows: range
    columns: tuple[slice, ...]
    shape: tuple[int, ...]


class CheckpointReader:
    """A context manager that opens the files when it is entered. `read` calls `progress` in its own
    thread."""

    def __init__(self, folder: Path, config: BackboneConfig, progress: Progress | None = None):
        self._files = CheckpointTensors(folder, config.tie_word_embeddings)
        self._config = config
        self._progress = progress or (lambda count: None)
        self._threads = ThreadPoolExecutor(min(_THREADS, os.cpu_count() or 1))
        # The linears that are not stored as floating-point numbers, by name.
        self._stored: dict[str, StoredLinear] = {}
        self._stack = ExitStack()

    def __enter__(self) -> "CheckpointReader":
        """Opens the files. Raises BackboneError if a file cannot be read, or if a tensor is
        missing, has another shape than config.json implies, or belongs to no parameter."""
        with ExitStack() as stack:
            stack.enter_context(self._files)
            # Threads must stop reading before the files are closed.
            stack.callback(self._threads.shutdown, cancel_futures=True)
            self._stored = dict(_stored_linears(self._files, self._config))
            self._check()
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def _check(self) -> None:
        folder, names = self._files.folder, set(self._files.names)
        if self._config.quantisation is None and (parts := quantised_tensors(self._files)):
            raise BackboneError(
                f"{folder}: tensor {parts[0]} shows that weights are quantised, but config.json "
                f"has no quantization_config; restore it, or {WHAT_TO_DO}"
            )
        shapes = tensor_shapes(self._config)
        for name in self._stored:
            names -= set(self._files.of_module(name)) - {f"{name}.bias"}
            del shapes[f"{name}.weight"]
        if shapes.get(HEAD_TENSOR) and HEAD_TENSOR not in names:
            raise BackboneError(
                f"{folder}: tensor {HEAD_TENSOR} is missing, and config.json says "
                "tie_word_embeddings=false; if the head is the embedding, say true there, else a "
                "part of the download is missing"
            )
        for name, shape in shapes.items():
            if (stored := self._files.shape(name)) != shape:
                raise BackboneError(
                    f"{folder}: tensor {name} has shape {list(stored)}, "
                    f"config.json implies {list(shape)}"
                )
            if (dtype := self._files.dtype(name)) not in _FLOATING:
                raise BackboneError(
                    f"{folder}: tensor {name}: the dtype {dtype} needs scales, and none of the "
                    f"forms in which quantised checkpoints have them was found; {WHAT_TO_DO}"
                )
        # Old checkpoints have this constant, and checkpoints with a tied head may also have the
        # head.
        ignored = {name for name in names if name.endswith("rotary_emb.inv_freq")}
        if self._config.quantisation:
            ignored |= {name for name in names if name.endswith(_UNUSED)}
        if extra := sorted(names - shapes.keys() - ignored - {HEAD_TENSOR}):
            shown = ", ".join(extra[:3]) + (f" and {len(extra) - 3} more" if len(extra) > 3 else "")
            raise BackboneError(f"{folder}: tensors that config.json does not account for: {shown}")

    def read(
        self, wanted: Weights, first_layer: int = 0, shardings: Weights | None = None
    ) -> Weights:
        """Reads weights, one parameter after another, and only the parts that devices keep.

        Threads read and copy pieces of a parameter ahead. Linears that must be encoded or decoded
        are read as a whole, one layer after another. `wanted` are shapes, dtypes and formats of the
        weights; its layers are those of the model from `first_layer` on. `shardings` is a tree like
        `wanted`; None puts all weights on the default device.
        """
        decoded = set()

        def load(
            key_path: jax.tree_util.KeyPath, leaf: Any, sharding: Any = None
        ) -> jax.Array | FrozenWeight:
            path = module_path(key_path)
            if not is_weight(leaf):
                return self._array(path, leaf, first_layer, sharding)
            is_stack = path[0] == "layers"
            layers = range(first_layer, first_layer + leaf.shape[0]) if is_stack else (None,)
            names = [hf_name(path, layer).removesuffix(".weight") for layer in layers]
            if leaf.is_plain and self._stored.keys().isdisjoint(names):
                of_values = None if sharding is None else sharding.values
                return FrozenWeight.of(self._array(path, leaf.values, first_layer, of_values))
            if leaf.is_plain and is_stack:
                decoded.add(".".join(path[1:-1]))
            one = _in_one_layer(leaf) if is_stack else leaf

            def linear(name: str) -> FrozenWeight:
                return _linear_weight(self._files, name, self._stored.get(name), one)

            linears = self._ahead(linear, names, _nbytes(leaf))
            if is_stack:
                return _stacked(linears, sharding)
            (weight,) = linears
            return _placed(weight, sharding)

        trees = (wanted,) if shardings is None else (wanted, shardings)
        with _short_turns():
            weights = jax.tree.map_with_path(load, *trees, is_leaf=is_weight)
        if decoded:
            _warn_of_decoded(self._files.folder, tuple(sorted(decoded)))
        return weights

    def tensor(self, name: str, dtype: jnp.dtype) -> np.ndarray | FrozenWeight:
        """The tensor of this name in a checkpoint that is not quantised, in `dtype`. If it is the
        weight of a linear in a format that is not a dtype, the weight [k, n] in this format."""
        stored = self._stored.get(name.removesuffix(".weight"))
        linears = _linears_of_layer(self._config, dtype)
        return _tensor(self._files, name, stored, linears, dtype)

    def _array(
        self, path: tuple[str, ...], leaf: jax.ShapeDtypeStruct, first_layer: int, sharding: Any
    ) -> jax.Array:
        """A parameter that needs no decoding, in all its layers. Files store a kernel [k, n] as [n,
        k]. Devices transpose it, because on the host this would take most of the time."""
        is_kernel, in_layers = path[-1] == "kernel", path[0] == "layers"
        layers = range(leaf.shape[0]) if in_layers else (None,)
        names = [hf_name(path, first_layer + layer if in_layers else None) for layer in layers]
        parts = _parts_of_devices(leaf.shape, is_kernel, in_layers, sharding)
        arrays = [jnp.zeros(part.shape, leaf.dtype, device=part.device) for part in parts]
        row_bytes = math.prod(self._files.shape(names[0])[1:]) * leaf.dtype.itemsize
        pieces = [
            (layer, rows)
            for rows_of_devices in dict.fromkeys(part.rows for part in parts)
            for layer in layers
            for rows in _cut(rows_of_devices, row_bytes)
        ]

        def read(piece: tuple[int | None, range]) -> dict[int, jax.Array]:
            layer, rows = piece
            values = self._files.read(names[layer or 0], slice(rows.start, rows.stop))
            if values.dtype.itemsize > 4:
                # JAX has no numbers of 8 bytes.
                values = values.astype(leaf.dtype)
            copies = {
                number: jax.device_put(values[:, *part.columns], part.device)
                for number, part in enumerate(parts)
                if rows.start in part.rows
            }
            return {n: _as_kept(copy, leaf.dtype, is_kernel) for n, copy in copies.items()}

        copies = self._ahead(read, pieces, _nbytes(leaf))
        for (layer, rows), of_devices in zip(pieces, copies, strict=True):
            for number, values in of_devices.items():
                part = parts[number]
                start = [rows.start - part.rows.start, *(0 for _ in part.columns)]
                start = ([layer] if in_layers else []) + (start[::-1] if is_kernel else start)
                arrays[number] = _written(arrays[number], values, start)
        if sharding is None:
            return arrays[0]
        return jax.make_array_from_single_device_arrays(leaf.shape, sharding, arrays)

    def _ahead(
        self, function: Callable[[Any], Any], items: Sequence[Any], size: int
    ) -> Iterator[Any]:
        """Yields the function's result for each item. Threads compute a few results ahead, but only
        after the first result is there, so that programs are compiled once. `size` is the number of
        bytes of all results together on the devices, for `progress`."""
        # Threads do not inherit this setting.
        device, waiting, left = jax.config.jax_default_device, deque(), iter(items)

        def compute(item: Any) -> Any:
            with jax.default_device(device):
                return function(item)

        ahead = 1
        while True:
            waiting.extend(
                self._threads.submit(compute, item) for item in islice(left, ahead - len(waiting))
            )
            if not waiting:
                return
            yield waiting.popleft().result()
            ahead = _THREADS
            self._progress(size // len(items))


def checkpoint_tensors(
    folder: str | Path, dtype: np.dtype, backbone_format: str | None = None
) -> Callable[[str], np.ndarray]:
    """A function that reads a tensor of a checkpoint folder by its name: the float32 values with
    which a backbone in this dtype and format computes. The function reads the folder when it is
    called, and raises BackboneError if there is no such tensor. A `backbone_format` of None means
    the format of the checkpoint."""
    folder = Path(folder)

    @cache
    def read_config() -> BackboneConfig:
        return BackboneConfig.from_folder(folder, backbone_format)

    def read(name: str) -> np.ndarray:
        config = read_config()
        with CheckpointTensors(folder, config.tie_word_embeddings) as files:
            stored, module = None, _module_of(name)
            linear = name.removesuffix(".weight")
            if config.quantisation and (module or linear == HEAD):
                stored = stored_linear(files, linear, _size(config, module), config.quantisation)
            linears = _linears_of_layer(config, dtype)
            tensor = on_host(_tensor, files, name, stored, linears, dtype)
            if is_weight(tensor):
                tensor = np.asarray(on_host(_decoded, tensor)).T.astype(dtype)
            return tensor.astype(np.float32)

    return read


def on_host(function: Callable[..., Any], *args: Any) -> Any:
    """The result of a function of arrays, computed on the CPU. If JAX must not use the CPU, it is
    computed on the default device, and a warning is logged once."""
    with jax.default_device(_host()):
        return function(*args)


@cache
def _host() -> jax.Device | None:
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError as e:
        logging.getLogger(__name__).warning(
            "values of the backbone from which adapters begin are computed on %s: JAX has no CPU "
            "(%s)",
            jax.local_devices()[0],
            e,
        )
        return None


@contextmanager
def _short_turns() -> Iterator[None]:
    """Within this context, threads take turns more often. Otherwise each of hundreds of pieces
    would wait several times for 5 ms while another thread compiles."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(min(before, _TURN_SECONDS))
    try:
        yield
    finally:
        sys.setswitchinterval(before)


def _nbytes(tree: Any) -> int:
    return sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def _cut(rows: range, row_bytes: int) -> Iterator[range]:
    pieces = min(len(rows), -(-len(rows) * row_bytes // _PIECE_BYTES)) or 1
    for start, stop in pairwise(len(rows) * i // pieces for i in range(pieces + 1)):
        yield rows[start:stop]


def _parts_of_devices(
    shape: tuple[int, ...], is_kernel: bool, in_layers: bool, sharding: Any
) -> list[_Part]:
    """The part of a parameter that each device of this process keeps. In files, the last two axes
    of a kernel are transposed. A first axis of layers is not divided. If `sharding` is None, the
    default device keeps everything."""
    if sharding is None:
        indices = {None: tuple(slice(size) for size in shape)}
    else:
        indices = sharding.addressable_devices_indices_map(shape)
    parts = []
    for device, index in indices.items():
        kept = [range(size)[selected] for size, selected in zip(shape, index, strict=True)]
        of_tensor = kept[1:] if in_layers else kept
        rows, *columns = of_tensor[::-1] if is_kernel else of_tensor
        columns = tuple(slice(each.start, each.stop) for each in columns)
        parts.append(_Part(device, rows, columns, tuple(map(len, kept))))
    return parts


@partial(jax.jit, static_argnames=("dtype", "is_kernel"))
def _as_kept(values: Array, dtype: jnp.dtype, is_kernel: bool) -> Array:
    """Rows of a tensor in the layout on devices: [rows, k] of a kernel become [k, rows]."""
    return (values.T if is_kernel else values).astype(dtype)


@partial(jax.jit, donate_argnums=0)
def _written(array: Array, values: Array, start: Sequence[Array]) -> Array:
    """Writes values at the index `start` of an array, which may have an additional leading axis of
    layers. This is separate from `_as_kept`, because on a CPU XLA takes nine times as long if it
    transposes while it writes."""
    values = values.reshape((1,) * (array.ndim - values.ndim) + values.shape)
    return jax.lax.dynamic_update_slice(array, values, start)


def _size(config: BackboneConfig, module: str | None) -> tuple[int, int]:
    """Output and input width of a linear of a layer, or of the head if `module` is None."""
    if module is None:
        return config.vocab_size, config.hidden_size
    return linear_sizes(config, module)[::-1]


def _stored_linears(
    files: CheckpointTensors, config: BackboneConfig
) -> Iterator[tuple[str, StoredLinear]]:
    if config.quantisation is None:
        return
    names = {layer_name(m, layer): m for m in MODULES for layer in range(config.num_layers)}
    for name, module in (names | ({} if config.tie_word_embeddings else {HEAD: None})).items():
        stored = stored_linear(files, name, _size(config, module), config.quantisation)
        if stored is not None:
            yield name, stored


def _module_of(name: str) -> str | None:
    """The linear of a layer to which a weight tensor belongs; None for other tensors."""
    return next((module for module in MODULES if name.endswith(f".{module}.weight")), None)


@cache
def _linears_of_layer(config: BackboneConfig, dtype: jnp.dtype) -> dict[str, FrozenWeight]:
    stacks = layer_linears(abstract_weights(config, dtype))
    return {module: _in_one_layer(stack) for module, stack in stacks.items()}


def _tensor(
    files: CheckpointTensors,
    name: str,
    stored: StoredLinear | None,
    linears: Mapping[str, FrozenWeight],
    dtype: jnp.dtype,
) -> np.ndarray | FrozenWeight:
    plain = FrozenWeight(None, None, np.dtype(dtype).name)
    wanted = linears.get(_module_of(name), plain)
    if stored is None and wanted.is_plain:
        return files.read(name).astype(dtype)
    weight = _linear_weight(files, name.removesuffix(".weight"), stored, wanted)
    return np.asarray(weight.values).T if wanted.is_plain else weight


def _linear_weight(
    files: CheckpointTensors, name: str, stored: StoredLinear | None, wanted: FrozenWeight
) -> FrozenWeight:
    """The weight of one linear, in the shapes, dtypes and format of `wanted`. It keeps its stored
    form if possible. `stored` is None for a tensor of floating-point numbers."""
    if stored is None:
        forms = (FrozenWeight.of(jnp.asarray(files.read(f"{name}.weight")).T),)
    else:
        forms = weights_of(files, name, stored)
    for weight in forms:
        for same in (weight, weight.divisible()):
            if wanted.rounding is None and wanted.format == same.format:
                # The codes are in the format that the user asks for; leave out the rounding that
                # the checkpoint's own decoder applies.
                same = dataclasses.replace(same, rounding=None)
            if jax.tree.structure(same) == jax.tree.structure(wanted):
                return same
    return _converted(forms[0], wanted.format, wanted.is_divisible)


@partial(jax.jit, static_argnames=("format", "divisible"))
def _converted(weight: FrozenWeight, format: str, divisible: bool) -> FrozenWeight:
    if format in PLAIN_FORMATS:
        return weight.astype(format)
    encoded = FrozenWeight.encoded(weight.decoded(), format)
    return encoded.divisible() if divisible else encoded


@jax.jit
def _decoded(weight: FrozenWeight) -> Array:
    return weight.decoded()


def _in_one_layer(stack: FrozenWeight) -> FrozenWeight:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stack)


def _placed(weight: FrozenWeight, shardings: FrozenWeight | None) -> FrozenWeight:
    if shardings is None:
        return weight
    return jax.tree.map(
        lambda x, sharding: jax.make_array_from_callback(x.shape, sharding, x.__getitem__),
        weight,
        shardings,
    )


def _stacked(layers: Iterator[FrozenWeight], shardings: FrozenWeight | None) -> FrozenWeight:
    """The stacked weights of layers. Each layer is divided among the devices before the next layer
    is read."""
    if shardings is None:
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)

    shapes, parts = None, []
    for weight in layers:
        leaves, tree = jax.tree.flatten(weight)
        shapes = [leaf.shape for leaf in leaves]
        parts.append(
            [_parts(*each) for each in zip(leaves, jax.tree.leaves(shardings), strict=True)]
        )
    stacks = []
    for shape, sharding, *of_layers in zip(shapes, jax.tree.leaves(shardings), *parts, strict=True):
        arrays = [jnp.stack(of_device) for of_device in zip(*of_layers, strict=True)]
        whole = (len(parts), *shape)
        stacks.append(jax.make_array_from_single_device_arrays(whole, sharding, arrays))
    return jax.tree.unflatten(tree, stacks)


def _parts(leaf: Array, sharding: jax.sharding.Sharding) -> list[Array]:
    indices = sharding.addressable_devices_indices_map((1, *leaf.shape))
    return [jax.device_put(leaf[index[1:]], device) for device, index in indices.items()]


@cache
def _warn_of_decoded(folder: Path, modules: tuple[str, ...]) -> None:
    logging.getLogger(__name__).warning(
        "%s: %s: quantised in ways that cannot stay as they are, or not alike in all layers; "
        "decoded when loaded, to 2 or 4 bytes for a weight; fine_tune.backbone_format would "
        "store them in less",
        folder,
        ", ".join(modules),
    )
