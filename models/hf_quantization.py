"""`quantization_config` of a published configuration: how the codes and scales of quantised weights lie in the files.

A weight's rows and columns are the outputs and inputs of its linear layer. Layers that a file leaves as they were
(`ignore`, `modules_to_not_convert`) have no codes, and so need no list.
"""

from dataclasses import dataclass
from typing import Annotated, Any, NoReturn

from msgspec import Meta, Struct

from clusterkv_jax.storage.schema import checked, shown

_Count = Annotated[int, Meta(ge=1, le=2**24)]
_ALLOWED = "'fp8', 'mxfp4', 'gptq', 'awq', and 'compressed-tensors' of the format float-, int- or pack-quantized"


@dataclass(frozen=True)
class Quantization:
    """How the weight W of a layer is stored.

    Attributes:
        code: what a code stands for, a key of `clusterkv_jax.checkpoints.dequantize.TABLES`.
        type: what safetensors call the type of the tensor of codes.
        codes: that tensor is called W and this.
        scales: the tensor of scales is called W and one of these.
        block: the rows and columns that share a scale; None is all of them.
        symmetric: whether a code of zero stands for 0; otherwise W_zero_point has the code that does.
    """

    code: str
    type: str
    codes: str
    scales: tuple[str, ...]
    block: tuple[int | None, int | None]
    symmetric: bool = True

    @property
    def packed(self) -> bool:
        """Whether codes of several columns are one number in the file."""
        return self.type == "I32"


@dataclass(frozen=True)
class PackedWords:
    """How GPTQ and AWQ store weights; see `clusterkv_jax.checkpoints.packed_words`.

    Attributes:
        method: "gptq" or "awq".
        bits: of a code.
        below: how far below a zero the file has it.
    """

    method: str
    bits: int
    below: int


class _Words(Struct):
    bits: int
    checkpoint_format: str | None = None
    version: str | None = None


class _Fp8(Struct):
    fmt: str = "e4m3"
    weight_block_size: tuple[_Count, _Count] | None = None


class _Weights(Struct):
    num_bits: int = 8
    type: str = "int"
    symmetric: bool = True
    strategy: str | None = None
    group_size: int | None = None
    block_structure: tuple[_Count, _Count] | None = None
    actorder: str | bool | None = None


class _Group(Struct):
    weights: _Weights | None = None
    format: str | None = None


class _Compressed(Struct):
    format: str | None = None
    config_groups: dict[str, _Group] = {}
    transform_config: dict[str, Any] | None = None


def quantization(published: dict[str, Any], where: str) -> Quantization | PackedWords:
    """How the weights of a configuration are quantised; errors call the file `where`.

    Raises ValueError, in one sentence, for what is not dequantised.
    """
    method = published.get("quant_method")
    if method == "fp8":
        return _fp8(checked(published, _Fp8, where))
    if method == "mxfp4":
        return Quantization("e2m1", "U8", "_blocks", ("_scales",), (1, 32))
    if method == "compressed-tensors":
        return _compressed(checked(published, _Compressed, where))
    if method in ("gptq", "awq"):
        return _words(method, checked(published, _Words, where))
    return _refuse(shown(repr(method)))


def _words(method: str, file: _Words) -> PackedWords:
    form = file.checkpoint_format if method == "gptq" else file.version
    forms, bits = {"gptq": (("gptq", "gptq_v2"), (4, 8)), "awq": (("gemm",), (4,))}[method]
    if file.bits not in bits or (form or forms[0]).lower() not in forms:
        _refuse(f"{method!r} of {file.bits} bits in the format {shown(repr(form))}")
    return PackedWords(method, file.bits, int(method == "gptq" and form != "gptq_v2"))


def _fp8(file: _Fp8) -> Quantization:
    if file.fmt != "e4m3":
        _refuse(f"'fp8' of the format {shown(repr(file.fmt))}")
    return Quantization("e4m3", "F8_E4M3", "", ("_scale_inv", "_scale"), file.weight_block_size or (None, None))


def _compressed(file: _Compressed) -> Quantization:
    if file.transform_config:
        _refuse("'compressed-tensors' with transform_config, rotations of activations,")
    groups = list(file.config_groups.values())
    formats = {group.format or file.format for group in groups} or {file.format}
    weights = groups[0].weights if groups else None
    if weights is None or len(formats) > 1 or any(group.weights != weights for group in groups):
        _refuse("'compressed-tensors' with other than one way to store weights")
    found = next(iter(formats))
    kind, bits = weights.type, weights.num_bits
    described = f"'compressed-tensors' of the format {shown(repr(found))} with weights of {bits} bits ({shown(kind)})"
    if weights.actorder in ("group", "dynamic", True):
        _refuse(f"{described} in the order of activations")
    block, symmetric = _block(weights, described), weights.symmetric
    if (found, kind, bits) == ("float-quantized", "float", 8):
        return Quantization("e4m3", "F8_E4M3", "", ("_scale",), block, symmetric)
    if (found, kind, bits) == ("int-quantized", "int", 8):
        return Quantization("int8", "I8", "", ("_scale",), block, symmetric)
    if (found, kind) == ("pack-quantized", "int") and bits in (4, 8):
        return Quantization(f"offset{bits}", "I32", "_packed", ("_scale",), block, symmetric)
    return _refuse(described)


def _block(weights: _Weights, described: str) -> tuple[int | None, int | None]:
    """Rows and columns that share a scale."""
    size = weights.group_size
    if weights.strategy == "group" and size is not None and size > 0:
        return 1, size
    if weights.strategy == "block" and weights.block_structure:
        return weights.block_structure
    if weights.strategy == "channel" or (weights.strategy is None and size == -1):
        return 1, None
    if weights.strategy == "tensor" or (weights.strategy is None and size is None):
        return None, None
    if weights.strategy is None and size is not None and size > 0:
        return 1, size
    return _refuse(f"{described} by {shown(repr(weights.strategy))}")


def _refuse(what: str) -> NoReturn:
    raise ValueError(f"Quantization {what} is not supported; allowed: {_ALLOWED}, and weights that are not quantised.")
