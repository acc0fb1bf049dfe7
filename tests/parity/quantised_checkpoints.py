"""Checkpoints that the libraries of several number formats have quantised, and the weights that
these libraries decode from them."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from backbones import VOCABULARY, random_model
from bitsandbytes import functional, nn
from bitsandbytes.backends.default.ops import _dequantize_4bit_compute
from compressed_tensors.compressors import BaseCompressor, decompress_module
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, LlamaConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize

# By name of a linear, its weight in float32.
Decoded = dict[str, torch.Tensor]

_SHAPE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
}
# One linear of one layer is not quantised.
_EXCEPT = "model.layers.0.mlp.down_proj"


def make_model(folder: Path, dtype: torch.dtype, **sizes: int) -> None:
    random_model(LlamaConfig(**_SHAPE | sizes)).to(dtype).save_pretrained(folder)


def with_bitsandbytes(
    folder: Path, dtype: torch.dtype, sizes: dict[str, int], **options: Any
) -> Decoded:
    """Loads a model in 4 or 8 bits and saves it."""
    make_model(folder, dtype, **sizes)
    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=dtype, device_map="cpu", quantization_config=BitsAndBytesConfig(**options)
    )
    for file in folder.iterdir():
        file.unlink()
    model.save_pretrained(folder)
    return decoded_linears(model)


def decoded_linears(model: torch.nn.Module) -> Decoded:
    """The weights that the library decodes, of a model that transformers has loaded."""
    found = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear4bit):
            found[name] = decoded_4_bits(module.weight.data, module.weight.quant_state)
        elif isinstance(module, nn.Linear8bitLt):
            found[name] = functional.int8_vectorwise_dequant(module.weight.data, module.weight.SCB)
        elif hasattr(module, "quantization_scheme"):
            decompress_module(module)
            found[name] = module.weight.data
    return {name: weight.float() for name, weight in found.items()}


def decoded_4_bits(values: torch.Tensor, state: functional.QuantState) -> torch.Tensor:
    if state.shape[-1] % state.blocksize == 0:
        return functional.dequantize_4bit(values, state)
    # The function for the CPU takes blocks to end with a row, unlike what encodes them, and unlike
    # all other devices.
    absmax = state.absmax
    if state.nested:
        absmax = functional.dequantize_blockwise(absmax, state.state2) + state.offset
    return _dequantize_4bit_compute(
        values.reshape(-1), absmax, state.code, state.blocksize, state.shape, state.dtype
    )


def with_compressed_tensors(
    folder: Path, dtype: torch.dtype, format: str, **arguments: Any
) -> Decoded:
    """Compresses every linear of the layers."""
    args = QuantizationArgs(**arguments)
    scheme = QuantizationScheme(
        targets=["Linear"],
        weights=args,
        input_activations=QuantizationArgs(num_bits=8, type=args.type, dynamic=True)
        if format != "pack-quantized"
        else None,
    )
    config = QuantizationConfig(
        config_groups={"group_0": scheme}, format=format, ignore=["lm_head"]
    )
    compressor = BaseCompressor.get_value_from_registry(format)
    found = {}

    def of_linear(name: str, weight: torch.Tensor) -> Decoded:
        scale, zero = calculate_qparams(*extremes(weight, args), args)
        state = {"weight": weight, "weight_scale": scale.to(dtype), "weight_zero_point": zero}
        if args.symmetric and format != "pack-quantized":
            del state["weight_zero_point"]
        compressed = compressor.compress(state, scheme)
        found[name] = compressor.decompress(compressed, scheme)["weight"].float()
        return compressed

    rewrite(folder, dtype, of_linear, config.model_dump(mode="json"))
    return found


def extremes(weight: torch.Tensor, args: QuantizationArgs) -> tuple[torch.Tensor, torch.Tensor]:
    """The smallest and largest weights that share a scale."""
    n, k = weight.shape
    if args.strategy == "tensor":
        return weight.min()[None], weight.max()[None]
    rows, columns = args.block_structure or (1, args.group_size or k)
    if args.strategy == "channel":
        columns = k
    padded = torch.nn.functional.pad(weight, (0, -k % columns, 0, -n % rows))
    blocks = padded.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def with_fp8_blocks(folder: Path, block: tuple[int, int], scale_dtype: torch.dtype) -> Decoded:
    """e4m3 with a scale for a block, as DeepSeek's and Qwen's checkpoints have it."""
    found = {}

    def of_linear(name: str, weight: torch.Tensor) -> Decoded:
        rows, columns = block
        blocks = weight.unflatten(0, (-1, rows)).unflatten(-1, (-1, columns))
        scale = blocks.abs().amax((1, 3)) / 448
        if scale_dtype == torch.float8_e8m0fnu:
            scale = scale.log2().ceil().exp2()
        codes = (blocks / scale[:, None, :, None]).clamp(-448, 448).to(torch.float8_e4m3fn)
        codes = codes.reshape(weight.shape)
        scale = scale.to(scale_dtype)
        found[name] = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.float32)
        return {"weight": codes, "weight_scale_inv": scale}

    settings = {"quant_method": "fp8", "weight_block_size": block}
    rewrite(folder, torch.float32, of_linear, settings)
    return found


def with_fbgemm(folder: Path) -> Decoded:
    """e4m3 with a scale for an output channel, as Meta's fp8 checkpoints have it."""
    found = {}

    def of_linear(name: str, weight: torch.Tensor) -> Decoded:
        scale = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        found[name] = codes.float() * scale
        return {"weight": codes, "weight_scale": scale}

    settings = {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}
    rewrite(folder, torch.float32, of_linear, settings)
    return found


def rewrite(
    folder: Path,
    dtype: torch.dtype,
    of_linear: Callable[[str, torch.Tensor], Decoded],
    settings: dict[str, Any],
) -> None:
    """Makes a model, and replaces the weights of its layers' linears by other tensors."""
    make_model(folder, dtype)
    path, tensors = folder / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        module = name.removesuffix(".weight")
        if module.endswith("_proj") and module != _EXCEPT:
            own = of_linear(module, tensor)
            tensors |= {f"{module}.{part}": t.contiguous() for part, t in own.items()}
        else:
            tensors[name] = tensor
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = settings
    (folder / "config.json").write_text(json.dumps(config))


def decoded_model(folder: Path, decoded: Decoded) -> torch.nn.Module:
    """The model of transformers, in float32, with the decoded weights."""
    config = LlamaConfig.from_pretrained(folder)
    del config.quantization_config
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stored = dict(tensors_of(folder))
    for name, parameter in model.named_parameters():
        weight = decoded.get(name.removesuffix(".weight"))
        parameter.data = stored[name].float() if weight is None else weight
    return model


def tensors_of(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    for path in folder.glob("*.safetensors"):
        yield from load_file(path).items()


_4_BITS = {"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
_FLOAT = {"num_bits": 8, "type": "float", "format": "float-quantized"}
_INT = {"num_bits": 8, "format": "int-quantized"}
_PACKED = {"num_bits": 4, "format": "pack-quantized"}

# By case, what makes a checkpoint in a folder, and the formats in which jaxmux keeps q and down.
CASES: dict[str, tuple[Callable[[Path], Decoded], tuple[str, str]]] = {
    "nf4": (
        lambda folder: with_bitsandbytes(
            folder, torch.bfloat16, {}, **_4_BITS, bnb_4bit_use_double_quant=True
        ),
        ("nf4", "nf4"),
    ),
    "nf4, scales in float32": (
        lambda folder: with_bitsandbytes(
            folder, torch.float32, {}, **_4_BITS, llm_int8_skip_modules=["lm_head", _EXCEPT]
        ),
        ("nf4", "float32"),
    ),
    "nf4, blocks across rows": (
        lambda folder: with_bitsandbytes(
            folder,
            torch.float16,
            {"intermediate_size": 80},
            **_4_BITS,
            bnb_4bit_use_double_quant=True,
        ),
        ("nf4", "nf4"),
    ),
    "nf4, blocks across rows, scales in float32": (
        lambda folder: with_bitsandbytes(
            folder,
            torch.float32,
            {"hidden_size": 100, "intermediate_size": 352, "head_dim": 24},
            **_4_BITS,
        ),
        ("nf4", "nf4"),
    ),
    "fp4": (
        lambda folder: with_bitsandbytes(
            folder, torch.bfloat16, {}, load_in_4bit=True, bnb_4bit_quant_type="fp4"
        ),
        ("float32", "float32"),
    ),
    "int8": (
        lambda folder: with_bitsandbytes(folder, torch.float16, {}, load_in_8bit=True),
        ("int8", "int8"),
    ),
    "float8 by channel": (
        lambda folder: with_compressed_tensors(
            folder, torch.bfloat16, **_FLOAT, strategy="channel"
        ),
        ("scaled", "float32"),
    ),
    "float8 by tensor": (
        lambda folder: with_compressed_tensors(folder, torch.float32, **_FLOAT, strategy="tensor"),
        ("scaled", "float32"),
    ),
    "float8 by uneven blocks": (
        lambda folder: with_compressed_tensors(
            folder, torch.bfloat16, **_FLOAT, strategy="block", block_structure=[24, 48]
        ),
        ("scaled", "float32"),
    ),
    "int8 by channel": (
        lambda folder: with_compressed_tensors(folder, torch.bfloat16, **_INT, strategy="channel"),
        ("scaled", "float32"),
    ),
    "int8 by channel, asymmetric": (
        lambda folder: with_compressed_tensors(
            folder, torch.float32, **_INT, strategy="channel", symmetric=False
        ),
        ("scaled", "float32"),
    ),
    "int4 by group": (
        lambda folder: with_compressed_tensors(
            folder, torch.bfloat16, **_PACKED, strategy="group", group_size=32
        ),
        ("scaled", "float32"),
    ),
    "int4 by group, asymmetric": (
        lambda folder: with_compressed_tensors(
            folder, torch.float16, **_PACKED, strategy="group", group_size=32, symmetric=False
        ),
        ("scaled", "float32"),
    ),
    "packed int8 by channel": (
        lambda folder: with_compressed_tensors(
            folder, torch.bfloat16, **_PACKED | {"num_bits": 8}, strategy="channel"
        ),
        ("scaled", "float32"),
    ),
    "fp8": (
        lambda folder: with_fp8_blocks(folder, (32, 16), torch.float32),
        ("scaled", "float32"),
    ),
    "fp8, powers of two": (
        lambda folder: with_fp8_blocks(folder, (32, 16), torch.float8_e8m0fnu),
        ("scaled", "float32"),
    ),
    "fbgemm": (with_fbgemm, ("scaled", "float32")),
}
