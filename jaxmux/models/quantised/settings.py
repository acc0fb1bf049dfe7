"""The settings of a quantised checkpoint in its config.json."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import BackboneError

# Supported values of quant_method in config.json.
METHODS = ("bitsandbytes", "compressed-tensors", "fbgemm_fp8", "fp8")
# Supported values of format in config.json, for compressed-tensors.
COMPRESSIONS = (
    "dense",
    "float-quantized",
    "int-quantized",
    "mixed-precision",
    "naive-quantized",
    "pack-quantized",
)
WHAT_TO_DO = (
    "use the original checkpoint with fine_tune.backbone_format, or let transformers decode this "
    "one and save it (model.dequantize(), model.save_pretrained())"
)
# The keys of config.json that `quantisation_of` reads.
SETTINGS = ("quantization_config", "compression_config")


class Quantisation(NamedTuple):
    """The settings of a quantised checkpoint: its method, one of `METHODS`; and the numbers of rows
    and columns of a weight that share a scale, or None if the shapes of scales determine them."""

    method: str
    block: tuple[int, int] | None = None


def quantisation_of(raw: Mapping[str, Any], where: str) -> Quantisation | None:
    """Reads how a checkpoint is quantised from `raw`, the contents of the config.json called
    `where`; None if the checkpoint is not quantised. Raises BackboneError if jaxmux cannot read the
    checkpoint; the message says what to do instead."""
    settings: dict[str, Any] = {}
    for key in SETTINGS:
        settings = settings or _section(raw, key, where)
    if not settings:
        return None
    method = settings.get("quant_method") or _method_without_name(settings)
    if method not in METHODS:
        raise BackboneError(
            f"{where}: quant_method={method!r} is not supported; known: {', '.join(METHODS)}; "
            f"{WHAT_TO_DO}"
        )
    block = settings.get("weight_block_size", (128, 128) if method == "fp8" else None)
    if method == "compressed-tensors":
        block = _block_of_compressed(settings, where)
    return Quantisation(method, _block(block, where))


def _method_without_name(settings: Mapping[str, Any]) -> str | None:
    """The library that wrote an old file, which does not name its library."""
    if settings.get("load_in_8bit") or settings.get("load_in_4bit"):
        return "bitsandbytes"
    return "compressed-tensors" if "format" in settings else None


def _block_of_compressed(settings: Mapping[str, Any], where: str) -> Any:
    sparsity = _section(settings, "sparsity_config", where)
    for format in (settings.get("format", "dense"), sparsity.get("format", "dense")):
        if format not in COMPRESSIONS:
            raise BackboneError(
                f"{where}: compressed-tensors in the format {format!r} is not supported; "
                f"known: {', '.join(COMPRESSIONS)}; {WHAT_TO_DO}"
            )
    if settings.get("transform_config"):
        raise BackboneError(f"{where}: transform_config is not supported; {WHAT_TO_DO}")
    groups = _section(settings, "config_groups", where)
    weights = [_section(_section(groups, name, where), "weights", where) for name in groups]
    structures = (section.get("block_structure") for section in weights)
    return next((structure for structure in structures if structure), None)


def _section(settings: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    section = settings.get(key) or {}
    if not isinstance(section, dict):
        raise BackboneError(f"{where}: {key} should be an object, found {section!r}")
    return section


def _block(setting: Any, where: str) -> tuple[int, int] | None:
    if setting is None:
        return None
    sizes = setting
    if isinstance(setting, str):
        sizes = [int(size) if size.isdecimal() else size for size in setting.split("x")]
    if (
        not isinstance(sizes, list | tuple)
        or len(sizes) != 2
        or any(type(size) is not int or size < 1 for size in sizes)
    ):
        raise BackboneError(
            f"{where}: blocks of weights should be given as rows and columns, such as [128, 128], "
            f"found {setting!r}"
        )
    rows, columns = sizes
    return rows, columns
