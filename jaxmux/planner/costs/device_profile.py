"""Measured times and peaks of a device: the data to which the cost models are fitted.

A profile is a JSON file with one measurement in each line. `jaxmux profile` writes it:

  {"version": 1,
   "device": "NVIDIA H200",       kind of the device, as JAX names it
   "memory_bytes": 150754820096,  memory of one device that JAX may use; null where it is unknown
   "dtype": "bfloat16",           dtype of the weights and the stream
   "software": {"jax": "0.11.2"}, versions of packages
   "backbone": {…},               the fields of `BackboneSize`
   "measurements": [{"operator": "layer", …, "seconds": 0.0131, "peak_bytes": 1234567}, …]}

"operator" is a key of `POINTS`; the measurement also has the fields of the class under that key.
"seconds" is the median time. "peak_bytes" is the peak memory of the measured program without
weights, adapters and accumulators; null where it is unknown.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, get_args

from ...atomic_files import write_atomically
from ..devices import Replica
from ..errors import PlanningError
from ..packing.rows import ShapeClass


class PackedBytes(NamedTuple):
    """Additional bytes of one layer's attention in rows that may hold several sequences. cuDNN's
    packed layout reserves the memory of a whole row for each sequence that a row may hold, even if
    it is absent.

    Attributes:
      kept: bytes per token that the layer keeps: the output of attention, padding included.
      kept_sequence: bytes kept per token and sequence: the statistics of the softmax.
      working_sequence: bytes per token and sequence that the backward pass needs: the gradients of
        q in float32, and gradients of keys and values for each query head, if heads share them.
    """

    kept: float
    kept_sequence: float
    working_sequence: float

    @classmethod
    def of(cls, heads: int, kv_heads: int, head_dim: int, itemsize: int) -> "PackedBytes":
        """Counts the bytes for heads of width `head_dim` whose values have `itemsize` bytes."""
        width = heads * head_dim
        of_each_head = 2 * itemsize * width if kv_heads < heads else 0
        return cls(itemsize * width, 4 * heads, 4 * width + of_each_head)

    def kept_by(self, tokens: int, max_sequences: int) -> float:
        of_token = self.kept + max_sequences * self.kept_sequence
        return tokens * of_token if max_sequences > 1 else 0.0

    def needed_by(self, tokens: int, max_sequences: int) -> float:
        """Returns the bytes that the backward pass of one layer needs while it runs."""
        return tokens * max_sequences * self.working_sequence if max_sequences > 1 else 0.0


_VERSION = 1


class ProfileError(PlanningError):
    """A profile cannot be read, belongs to another backbone, or lacks a measurement."""


@dataclasses.dataclass(frozen=True)
class BackboneSize:
    """Sizes of a frozen backbone, from which its time and memory are predicted. The *stream* is the
    sequence of hidden states between layers, one vector of width d for each token.

    Attributes:
      name: name of the architecture's Hugging Face class, for example "LlamaForCausalLM".
      linears: maps the module path of each linear of a layer that can carry an adapter, for example
        "self_attn.q_proj", to its input and output width (k, n).
      layer_bytes: bytes of the weights of one layer.
      outside_bytes: bytes of the weights outside the layers: embedding, last norm and output head.
      stream_bytes: bytes of one number in the stream, for example 2 in bfloat16.
      kept: for each remat policy, from least to most recomputation, a pair (a, b): a layer keeps a
        + b · r bytes per token for its backward pass, where r is the pool's rank. Filled in by
        profiles and estimates.
      head_block_bytes: bytes of one block of float32 logits and of its gradient. The loss is
        computed in blocks of tokens, and only one block exists at a time.
      backbone_format: format in which the weights of the linears are stored, for example "nf4";
        None means the dtype of the stream.
      divided_layer_bytes: `layer_bytes` if several devices divide the weights, because the scales
        may then take more bytes; None means that the bytes are the same.
    """

    name: str
    layers: int
    hidden_size: int
    vocab_size: int
    linears: Mapping[str, tuple[int, int]]
    layer_bytes: int
    outside_bytes: int
    stream_bytes: int
    kept: Mapping[str, tuple[float, float]]
    head_block_bytes: int
    packed: PackedBytes
    backbone_format: str | None = None
    divided_layer_bytes: int | None = None

    @property
    def decoded_bytes(self) -> int:
        """Bytes of the largest decoded or transposed weights that exist at a time: the weights of
        gate and up, through which one product takes the gradient."""
        if self.backbone_format is None:
            return 0
        of_weight = 1 if self.backbone_format == "float8" else self.stream_bytes
        return 2 * of_weight * max(k * n for k, n in self.linears.values())

    @property
    def head_layers(self) -> float:
        """Work of the output head in units of one layer: the ratio of their numbers of weights."""
        of_layer = sum(k * n for k, n in self.linears.values())
        return self.vocab_size * self.hidden_size / of_layer

    def stage_layers(self, replica: Replica) -> list[int]:
        return replica.stage_layers(self.layers, self.head_layers)

    def part_layers(self, replica: Replica) -> list[int]:
        return replica.part_layers(self.layers, self.head_layers)

    @property
    def adapter_width(self) -> int:
        """Adapter parameters of one layer per unit of rank: Σ (k + n) over the linears."""
        return sum(k + n for k, n in self.linears.values())


@dataclasses.dataclass(frozen=True)
class LayerPoint:
    """A measurement of one decoder layer over a microbatch in which all tasks have equal parts.

    Attributes:
      layers: number of layers of the measured program. The seconds are those of one layer; the peak
        bytes are those of the whole program.
      rank: R, rank of the pool; 0 for a layer without adapters.
      backward: whether the backward pass was measured together with the forward pass.
      padding: fraction of each row, in whole chunks, that belongs to no task.
    """

    operator: ClassVar[str] = "layer"
    layers: int
    tokens: int
    row_len: int
    chunk_len: int
    max_sequences: int
    slots: int
    rank: int
    tasks: int
    remat: str
    dropout: bool
    backward: bool
    padding: float = 0.0


@dataclasses.dataclass(frozen=True)
class AttentionPoint:
    """Attention of one layer over all rows of a microbatch, with fields as in `LayerPoint`."""

    operator: ClassVar[str] = "attention"
    tokens: int
    row_len: int
    chunk_len: int
    max_sequences: int
    backward: bool


@dataclasses.dataclass(frozen=True)
class HeadPoint:
    """Last norm, head and loss over a microbatch of `tokens` tokens, forward and backward."""

    operator: ClassVar[str] = "head"
    tokens: int


@dataclasses.dataclass(frozen=True)
class UpdatePoint:
    """The optimizer update of all slots. `parameters` is the number of parameters of the whole
    pool."""

    operator: ClassVar[str] = "update"
    parameters: int
    slots: int
    optimizer: str


@dataclasses.dataclass(frozen=True)
class RoundPoint:
    """One round of the engine, with one microbatch and its update, timed on the host."""

    operator: ClassVar[str] = "round"
    layers: int
    tokens: int
    row_len: int
    chunk_len: int
    max_sequences: int
    slots: int
    rank: int
    tasks: int


@dataclasses.dataclass(frozen=True)
class CollectivePoint:
    """A collective among several devices of one host.

    Attributes:
      collective: "psum" (sum over the devices), "all_gather" (concatenation of their values) or
        "ppermute" (each device sends to the next).
      axis: "inner" for neighbouring devices, "outer" for the devices that lie furthest apart.
      payload_bytes: bytes that each device contributes.
    """

    operator: ClassVar[str] = "collective"
    collective: str
    axis: str
    devices: int
    payload_bytes: int


Point = LayerPoint | AttentionPoint | HeadPoint | UpdatePoint | RoundPoint | CollectivePoint
POINTS: Mapping[str, type[Point]] = {kind.operator: kind for kind in get_args(Point)}


def shape_of(point: LayerPoint | AttentionPoint | RoundPoint) -> ShapeClass:
    rows = point.tokens // point.row_len
    return ShapeClass(rows, point.row_len, point.chunk_len, point.max_sequences)


class Measurement(NamedTuple):
    """A point with its median seconds and the peak memory of the measured program, which leaves out
    weights, adapters and accumulators; None if the peak is unknown."""

    point: Point
    seconds: float
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measurements of one backbone on one kind of device, to which cost models are fitted.

    Attributes:
      device: kind of the device, as JAX names it, for example "NVIDIA H200".
      memory_bytes: bytes of one device that JAX may use; None if they are unknown.
      software: version of each package that influences the times, for example {"jax": "0.11.2"}.
    """

    device: str
    memory_bytes: int | None
    dtype: str
    software: Mapping[str, str]
    backbone: BackboneSize
    measurements: tuple[Measurement, ...] = ()

    def of[P: Point](self, kind: type[P]) -> list[tuple[P, float]]:
        """Returns the measured points of the class `kind` with their median seconds. Raises
        ProfileError if there are none."""
        points = [(m.point, m.seconds) for m in self.measurements if isinstance(m.point, kind)]
        if not points:
            raise ProfileError(f"the profile of {self.device} measures no {kind.operator!r}")
        return points

    def with_measurements(self, *new: Measurement) -> "Profile":
        return dataclasses.replace(self, measurements=(*self.measurements, *new))


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile to a file. If writing fails, the file is unchanged."""
    header = {"version": _VERSION} | dataclasses.asdict(profile)
    del header["measurements"]
    rows = [
        json.dumps(
            {"operator": m.point.operator, **dataclasses.asdict(m.point)}
            | {"seconds": m.seconds, "peak_bytes": m.peak_bytes}
        )
        for m in profile.measurements
    ]
    listed = "[\n    " + ",\n    ".join(rows) + "\n  ]" if rows else "[]"
    text = json.dumps(header, indent=2).removesuffix("\n}") + f',\n  "measurements": {listed}\n}}\n'
    write_atomically(path, text)


def read_profile(path: Path) -> Profile:
    """Reads a profile that `write_profile` wrote. Raises ProfileError if the file is not valid."""
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ProfileError(
            f"{path}: not found; `jaxmux profile --backbone=FOLDER --out={path}` makes one"
        ) from None
    except json.JSONDecodeError as e:
        raise ProfileError(f"{path}: not valid JSON: {e}") from None
    if not isinstance(raw, dict) or raw.get("version") != _VERSION:
        raise ProfileError(f"{path}: version should be {_VERSION}")
    del raw["version"]
    rows = raw.pop("measurements", None)
    if not isinstance(rows, list):
        raise ProfileError(f"{path}: measurements should be a list")
    raw["backbone"] = _backbone(raw.get("backbone"), f"{path}: backbone")
    raw["measurements"] = tuple(
        _measurement(row, f"{path}: measurements[{i}]") for i, row in enumerate(rows)
    )
    return _make(Profile, raw, str(path))


def _backbone(raw: Any, where: str) -> BackboneSize:
    if not isinstance(raw, dict):
        raise ProfileError(f"{where} should be an object")
    for name in ("linears", "kept"):
        pairs = raw.get(name)
        if not isinstance(pairs, dict) or any(
            not isinstance(pair, list) or len(pair) != 2 for pair in pairs.values()
        ):
            raise ProfileError(f"{where}.{name} should map names to pairs of numbers")
        raw[name] = {key: tuple(pair) for key, pair in pairs.items()}
    packed, fields = raw.get("packed"), PackedBytes._fields
    numbers = packed if isinstance(packed, list) else []
    if len(numbers) != len(fields) or not all(isinstance(n, float | int) for n in numbers):
        raise ProfileError(
            f"{where}.packed should be a list of {len(fields)} numbers: {', '.join(fields)}; a "
            "profile without them is too old, measure it again"
        )
    raw["packed"] = PackedBytes(*numbers)
    return _make(BackboneSize, raw, where)


def _measurement(raw: Any, where: str) -> Measurement:
    if not isinstance(raw, dict) or raw.get("operator") not in POINTS:
        raise ProfileError(f"{where}.operator should be one of {', '.join(POINTS)}")
    kind = POINTS[raw.pop("operator")]
    seconds, peak_bytes = raw.pop("seconds", None), raw.pop("peak_bytes", None)
    if not isinstance(seconds, float | int) or not seconds >= 0:
        raise ProfileError(f"{where}.seconds should be a time, found {seconds!r}")
    if not isinstance(peak_bytes, int | None):
        raise ProfileError(f"{where}.peak_bytes should be an integer or null, found {peak_bytes!r}")
    return Measurement(_make(kind, raw, where), seconds, peak_bytes)


def _make(kind: type, raw: Mapping[str, Any], where: str) -> Any:
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    optional = {
        field.name for field in dataclasses.fields(kind) if field.default is not dataclasses.MISSING
    }
    for name in (*fields, *raw):
        if name not in raw:
            if name in optional:
                continue
            raise ProfileError(f"{where}: {name} is missing")
        if name not in fields:
            raise ProfileError(f"{where}: unknown key {name}; known: {', '.join(fields)}")
        wanted = fields[name]
        if wanted in (int, str, bool) and type(raw[name]) is not wanted:
            raise ProfileError(
                f"{where}: {name} should be of type {wanted.__name__}, found {raw[name]!r}"
            )
    return kind(**raw)
