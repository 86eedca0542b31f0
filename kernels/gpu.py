"""What the GPU kernels share. They are Pallas kernels lowered through Triton.

Every kernel gets whole arrays and computes its own addresses: rows are gathered by number, and a program's work is
bounded by lengths that only the device knows. Triton wants tiles whose sides are powers of two, so tiles are rounded
up and masked.
"""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array

from clusterkv_jax.kernels.quantised import Quantised, StoredRows, as_array, in_codes, is_packed, kind, numbers
from clusterkv_jax.runtime.dispatch import device_kind, platform

# What the kernels can read; other dtypes go to XLA.
DTYPES = (jnp.float32, jnp.bfloat16, jnp.float16)
# Bytes of shared memory that a program may have, by kind of device, and elsewhere.
SHARED = {("H100", "H200", "H800", "B200", "B300"): 232448, ("A100", "A800"): 166912}
LEAST_SHARED = 101376
# Devices that cannot convert float8_e4m3: what came before Ada and Hopper.
WITHOUT_E4M3 = ("A100", "A800", "A10", "A30", "A40", "A16", "A2", "A4000", "A5000", "A6000", "RTX 30", "V100", "T4")


def differentiated_by(definition: Callable[[Any], Callable[..., Any]]) -> Callable[..., Any]:
    """Makes `run(options, *operands)` of a kernel have the derivative of `definition(options)`: it has none itself."""

    def decorated(run: Callable[..., Any]) -> Callable[..., Any]:
        function = jax.custom_jvp(run, nondiff_argnums=(0,))

        @function.defjvp
        def _(options, operands, tangents):
            return function(options, *operands), jax.jvp(definition(options), operands, tangents)[1]

        return function

    return decorated


def call(
    kernel: Callable[..., None],
    out_shape: Any,
    *args: Any,
    grid: tuple[int, ...],
    warps: int,
    stages: int = 2,
    aliases: Mapping[int, int] | None = None,
    interpret: bool = False,
    name: str | None = None,
) -> Any:
    """Run a kernel over whole arrays, or trees of them; `aliases` maps arguments to the outputs that take their place
    in memory.

    Profiles show it by its `name`, by default its op and its function: `select_rows_kernel` for one.
    """
    function = kernel.func if isinstance(kernel, partial) else kernel
    op = function.__module__.split(".")[-2:][0]
    whole = pl.BlockSpec()
    run = pl.pallas_call(
        kernel,
        out_shape=out_shape,
        grid=grid,
        in_specs=jax.tree.map(lambda _: whole, list(args)),
        out_specs=jax.tree.map(lambda _: whole, out_shape),
        input_output_aliases=dict(aliases or {}),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name=name or f"{op}_{function.__name__.lstrip('_')}",
    )
    return run(*args)


def check_dtypes(op: str, *rows: StoredRows) -> None:
    """Raise NotImplementedError for dtypes that the kernels do not read."""
    arrays = [x for x in rows if not isinstance(x, Quantised)]
    kinds = {kind(x) for x in rows if isinstance(x, Quantised)}
    for name in kinds:
        check_codes(op, name)
    for x in arrays:
        if x.dtype not in DTYPES:
            raise NotImplementedError(f"The GPU kernel of {op} reads float32, bfloat16 and float16, got {x.dtype}.")
    stored = [*kinds, *{str(x.dtype) for x in arrays}]
    if len(stored) > 1:
        raise NotImplementedError(f"The GPU kernel of {op} reads rows that are stored alike, got {', '.join(stored)}.")


def check_codes(op: str, name: str) -> None:
    """Raise NotImplementedError for codes that the device cannot convert."""
    if not converts(name):
        raise NotImplementedError(f"The GPU kernel of {op} reads no {name} on {device_kind()}.")


def converts(name: str) -> bool:
    """Whether the GPU that is compiled for has instructions for codes of this type."""
    return name != "float8_e4m3" or not any(part in device_kind() for part in WITHOUT_E4M3)


def shared_memory() -> int:
    """Bytes of shared memory that a program may have on the device that is compiled for."""
    kind = device_kind()
    return next((size for names, size in SHARED.items() if any(name in kind for name in names)), LEAST_SHARED)


def power_of_two(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least n and `least`."""
    return max(least, 1 << math.ceil(math.log2(max(n, 1))))


def whole_block(most: int, size: int) -> int:
    """The largest power of two, up to `most`, of which `size` is a multiple."""
    return min(most, size & -size)


def only_row(values: Array) -> Array:
    """A tile of 16 rows, as the matrix unit wants, of which these are the first and the others are zeros."""
    first = arange(16) == 0
    return jnp.where(first[:, None], values[None, :], jnp.zeros((), values.dtype))


def arange(n: int, start: Any = 0) -> Array:
    """start, start + 1, ... as i32 [n]."""
    return jax.lax.iota(jnp.int32, n) + start


def load_rows(ref: Any, head: Any, rows: Array, columns: Array, mask: Array, width: int) -> Array:
    """The tile ref[head, rows, columns], zero where `mask` is false and in columns at or beyond `width`.

    A head may have several numbers.
    """
    head = head if isinstance(head, tuple) else (head,)
    inside = mask[:, None] if width % columns.shape[0] == 0 else mask[:, None] & (columns < width)[None, :]
    zero = jnp.zeros((), ref.dtype)
    return plgpu.load(ref.at[(*head, rows[:, None], columns[None, :])], mask=inside, other=zero)


def load_codes(rows: Any, head: Any, at: Array, columns: Array, mask: Array, dtype: Any) -> list[Array]:
    """What the codes of a tile stand for in units of their scales, in parts of their columns, 0 where no column is."""
    width = rows.codes.shape[2]
    parts = numbers(load_rows(rows.codes, head, at, columns, mask, width), dtype)
    if not is_packed(rows) or width % columns.shape[0] == 0:
        return parts
    return [jnp.where((columns < width)[None, :], part, jnp.zeros((), dtype)) for part in parts]


def load_scales(rows: Any, head: Any, at: Array, mask: Array) -> Array:
    """The scales of a tile's rows, 0 where `mask` is false."""
    return plgpu.load(rows.scales.at[head, at], mask=mask, other=0.0)


def load_numbers(rows: Any, head: Any, at: Array, columns: Array, mask: Array) -> list[Array]:
    """A tile of rows in float32, stored as they may be, in parts of their columns."""
    if not isinstance(rows, Quantised):
        return [load_rows(rows, head, at, columns, mask, rows.shape[2]).astype(jnp.float32)]
    scale = load_scales(rows, head, at, mask)[:, None]
    return [part * scale for part in load_codes(rows, head, at, columns, mask, jnp.float32)]


def store_numbers(rows: Any, head: Any, at: Array, columns: Array, parts: list[Array], mask: Array) -> list[Array]:
    """Write what `load_numbers` loads, as the rows are stored; rows where `mask` is false must point nowhere.

    Returns what `load_numbers` then loads.
    """
    ref: Any = as_array(rows)
    real = (columns < ref.shape[2])[None, :]
    if isinstance(rows, Quantised):
        new, scales = in_codes(parts, kind(rows), _nearest), rows.scales
        plgpu.store(scales.at[head, at], new.scales, mask=mask)  # pyright: ignore[reportArgumentType]
        tile = new.codes
        # A code of 4 bits stands for no zero.
        parts = [jnp.where(real, part * new.scales[:, None], 0.0) for part in numbers(tile, jnp.float32)]
    else:
        tile = parts[0].astype(ref.dtype)
        parts = [tile.astype(jnp.float32)]
    inside = mask[:, None] & real
    plgpu.store(ref.at[head, at[:, None], columns[None, :]], tile, mask=inside)
    return parts


def _nearest(x: Array) -> Array:
    """The nearest whole number, of two the even one, as `jnp.round`."""
    if platform() == "cpu":
        return jnp.round(x)
    return plgpu.elementwise_inline_asm(
        "cvt.rni.f32.f32 $0, $1;",
        args=[x],
        constraints="=f,f",
        pack=1,
        result_shape_dtypes=[jax.ShapeDtypeStruct(x.shape, x.dtype)],
    )[0]


def dot(a: Array, b: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """a . b in float32: operands of 8 or 16 bits as they are, float32 as three tf32 products (error about 2^-21)."""
    precision, total = None, jnp.int32 if a.dtype == jnp.int8 else jnp.float32
    if a.dtype == jnp.float32:
        precision = jax.lax.DotAlgorithmPreset.TF32_TF32_F32_X3
    if platform() == "cpu":  # which has no mixed products; those of float32 are exact enough
        a, b, precision, total = *(x.astype(jnp.float32) for x in (a, b)), jax.lax.Precision.HIGHEST, jnp.float32
    product = jax.lax.dot_general(
        a, b, (((contract[0],), (contract[1],)), ((), ())), precision=precision, preferred_element_type=total
    )
    return product.astype(jnp.float32)


def bfloat16_parts(x: Array, count: int) -> list[Array]:
    """`count` bf16 arrays that sum to x up to 2^(-8 count): x cut off after 8, 16 ... bits of its mantissa."""
    parts = []
    for _ in range(count):
        bits = jax.lax.bitcast_convert_type(x, jnp.int32)
        head = jax.lax.bitcast_convert_type(bits & jnp.int32(-65536), jnp.float32)
        parts.append(head.astype(jnp.bfloat16))
        x = x - head
    return parts
