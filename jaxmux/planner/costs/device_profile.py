"""Measured times and peaks of a device: the data that the cost models are fitted to.

A profile is a JSON file, one measurement a line, written by `python -m jaxmux.profile`:

  {"version": 1,
   "device": "NVIDIA H200",       kind of the device, as JAX names it
   "memory_bytes": 150754820096,  memory of one device that JAX may use; null where it is unknown
   "dtype": "bfloat16",           dtype of the weights and the stream
   "software": {"jax": "0.11.2"}, versions of packages
   "backbone": {…},               the fields of `BackboneSize`
   "measurements": [{"operator": "layer", …, "seconds": 0.0131, "peak_bytes": 1234567}, …]}

A measurement has the fields of the measured point, whose class in `POINTS` "operator" names, the
median "seconds", and "peak_bytes" (null where unknown): the most memory that the measured program
needed besides weights, adapters and their accumulators.
"""

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from ..errors import PlanningError
from ..packing.shape_class import ShapeClass
from .attention_memory import PackedBytes

_VERSION = 1


class ProfileError(PlanningError):
    """A profile cannot be read or lacks a measurement; the message names the file or the key."""


@dataclasses.dataclass(frozen=True)
class BackboneSize:
    """Sizes of a backbone that costs depend on.

    Attributes:
      name: the architecture's Hugging Face class name.
      layers: L, number of layers.
      hidden_size: d, width of the stream.
      vocab_size: entries of the vocabulary.
      linears: by module path, input and output width (k, n) of each linear of a layer that can
        carry an adapter.
      layer_bytes: bytes of the weights of one layer.
      outside_bytes: bytes of the weights outside the layers: embedding, last norm, head.
      stream_bytes: bytes of a value of the stream, 2 in bfloat16.
      kept: by remat policy, from least to most recomputation, the bytes that a layer keeps for its
        backward pass: bytes per token, and bytes per token and rank.
      head_block_bytes: bytes of the logits of the loss that exist at once, and of their gradient.
      packed: bytes that attention takes in rows of several sequences, beyond those in rows of one.
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

    @property
    def adapter_width(self) -> int:
        """Adapter parameters of a layer per rank: Σ (k + n) over the linears."""
        return sum(k + n for k, n in self.linears.values())


@dataclasses.dataclass(frozen=True)
class LayerPoint:
    """One decoder layer over a microbatch, forward and backward.

    Attributes:
      layers: layers of the measured program; the measured seconds are those of one layer.
      tokens, row_len, chunk_len, max_sequences: the shape class.
      slots, rank: slots and rank of the pool; rank 0 is the frozen layer.
      tasks: number of tasks, which own equal parts of the microbatch.
      remat: remat policy.
      dropout: whether adapters drop input features.
      backward: False for the forward pass alone.
      padding: part of each row, in whole chunks, that belongs to no task.
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
    """Attention of one layer over all rows of a microbatch.

    Attributes:
      tokens, row_len, chunk_len, max_sequences: the shape class.
      backward: False for the forward pass alone.
    """

    operator: ClassVar[str] = "attention"
    tokens: int
    row_len: int
    chunk_len: int
    max_sequences: int
    backward: bool


@dataclasses.dataclass(frozen=True)
class HeadPoint:
    """Last norm, head and loss over a microbatch of `tokens`, forward and backward."""

    operator: ClassVar[str] = "head"
    tokens: int


@dataclasses.dataclass(frozen=True)
class UpdatePoint:
    """The update of all slots.

    Attributes:
      parameters: parameters of the whole pool, slots that are not due included.
      slots: slots of the pool.
      optimizer: kind of the optimizer, for example "adamw".
    """

    operator: ClassVar[str] = "update"
    parameters: int
    slots: int
    optimizer: str


@dataclasses.dataclass(frozen=True)
class RoundPoint:
    """A round of the engine with one microbatch and its update, as the host sees it.

    Attributes:
      layers: layers of the trained backbone; the other fields are those of a `LayerPoint`.
    """

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
    """A collective among devices.

    Attributes:
      collective: "psum", "all_gather" or "ppermute".
      axis: "inner" for neighbouring devices, "outer" for those that lie furthest apart.
      devices: number of devices along the axis.
      payload_bytes: bytes that each device puts in.
    """

    operator: ClassVar[str] = "collective"
    collective: str
    axis: str
    devices: int
    payload_bytes: int


Point = LayerPoint | AttentionPoint | HeadPoint | UpdatePoint | RoundPoint | CollectivePoint
POINTS: Mapping[str, type[Point]] = {
    kind.operator: kind
    for kind in (LayerPoint, AttentionPoint, HeadPoint, UpdatePoint, RoundPoint, CollectivePoint)
}


def shape_of(point: LayerPoint | AttentionPoint | RoundPoint) -> ShapeClass:
    """The shape class of a point."""
    rows = point.tokens // point.row_len
    return ShapeClass(rows, point.row_len, point.chunk_len, point.max_sequences)


class Measurement(NamedTuple):
    """The median seconds of a point, and its peak memory in bytes where it is known."""

    point: Point
    seconds: float
    peak_bytes: int | None = None


@dataclasses.dataclass(frozen=True)
class Profile:
    """Measurements of one backbone on one kind of device; the module's docstring describes the
    fields."""

    device: str
    memory_bytes: int | None
    dtype: str
    software: Mapping[str, str]
    backbone: BackboneSize
    measurements: tuple[Measurement, ...] = ()

    def of[P: Point](self, kind: type[P]) -> list[tuple[P, float]]:
        """The measured points of an operator, each with its seconds.

        Raises:
          ProfileError: there are none.
        """
        found = [(m.point, m.seconds) for m in self.measurements if isinstance(m.point, kind)]
        if not found:
            raise ProfileError(f"the profile of {self.device} measures no {kind.operator!r}")
        return found

    def with_measurements(self, *new: Measurement) -> "Profile":
        """The profile with these measurements added."""
        return dataclasses.replace(self, measurements=(*self.measurements, *new))


def write_profile(profile: Profile, path: Path) -> None:
    """Writes a profile's file whole or not at all."""
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
    partial = path.with_name(path.name + ".partial")
    partial.write_text(text)
    partial.replace(path)


def read_profile(path: Path) -> Profile:
    """Reads a file of `write_profile`.

    Raises:
      ProfileError: the file is missing or not JSON, or a key is missing, unknown or of a wrong
        type.
    """
    try:
        raw = json.loads(path.read_text())
    except FileNotFoundError:
        raise ProfileError(
            f"{path}: not found; `python -m jaxmux.profile --out={path}` makes one"
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
    """The dataclass of these values; errors name the key that is missing, unknown or mistyped."""
    fields = {field.name: field.type for field in dataclasses.fields(kind)}
    for name in (*fields, *raw):
        if name not in raw:
            raise ProfileError(f"{where}: {name} is missing")
        if name not in fields:
            raise ProfileError(f"{where}: unknown key {name}; known: {', '.join(fields)}")
        wanted = fields[name]
        if (
            isinstance(wanted, type)
            and type(raw[name]) is not wanted
            and wanted in (int, str, bool)
        ):
            raise ProfileError(
                f"{where}: {name} should be of type {wanted.__name__}, found {raw[name]!r}"
            )
    return kind(**raw)
