"""A token behind attention through a layer of experts on Hopper: one launch, where there were five.

    grid (programs,)   one for each multiprocessor, all of them at once

A program has its part of every step, and waits for the others by counters in memory where a step needs what all of them
made: the splits combined, the output projection, the norm with the router's logits, gate and up, down. Between launches
the memory would rest while one ends and the next one begins. Here copies run ahead of the products, through a ring of
tiles in shared memory: the output projection's while splits are combined, those of down while gate and up go on.

A product of one token has 64 outputs of a tile for rows of the matrix unit, and the token as the first of eight columns.

Bytes: the weights of the projection and of the chosen experts, once. Bound: reads, and four times of waiting.
"""

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith
from jaxlib.mlir.dialects import vector as vectors

from clusterkv_jax.kernels.dispatch import device_kind, multiprocessors
from clusterkv_jax.kernels.expert_block import reference
from clusterkv_jax.kernels.splits import COUNTERS

HOPPER = ("H100", "H200", "H800")  # in the kinds of its devices, in "GH200" too
ROWS, COLUMNS = 256, 64  # of a tile of weights: inputs and outputs
TILED = (plgpu.TilingTransform((8, COLUMNS)), plgpu.SwizzleTransform(2 * COLUMNS))
PROGRAMS, SLOTS = 128, 4  # and tiles of a program's ring
MOST_SPLITS = 512
# The counters: programs that are done with a step, and for each place among the best experts those done with its gate.
COMBINED, PROJECTED, ROUTED, GATED = range(4)
FULL = plgpu.Layout.WGMMA  # how 64 rows lie in registers, and vectors along them and along their columns
ALONG_ROWS, ALONG_COLUMNS = FULL.reduce(1), FULL.reduce(0)


def expert_block(
    splits, hidden, projection, scale, router, gate, up, down, *, per_token, normalize, eps, offset
):  # fmt: skip
    """See `clusterkv_jax.kernels.expert_block.expert_block`."""
    if reason := refusal(splits.parts.shape, projection.shape, gate.shape, per_token, gate.dtype):
        raise NotImplementedError(f"The GPU kernel of expert_block {reason}.")
    options = per_token, normalize, eps, offset
    return _run(options, splits, hidden, projection, scale, router, gate, up, down)


def refusal(
    parts: tuple[int, ...], projection: tuple[int, ...], gate: tuple[int, ...], per_token: int, dtype: Any
) -> str | None:
    """Why the kernel does not take these shapes, of this type, on the device that is compiled for; None if it does."""
    if not any(name in device_kind() for name in HOPPER) or multiprocessors() < PROGRAMS:
        return f"needs a Hopper GPU of {PROGRAMS} multiprocessors, got {device_kind()} of {multiprocessors()}"
    if dtype != jnp.bfloat16:
        return f"takes bfloat16, got {dtype}"
    plan = _Plan.of(parts, projection, gate, per_token)
    if not plan.is_whole:
        return f"shares heads, inputs, experts and units equally among {PROGRAMS} programs, got {plan}"
    return None


@dataclass(frozen=True)
class _Plan:
    """Who makes what: numbers of a program, if it is one of `PROGRAMS`."""

    kv_heads: int
    splits: int
    queries: int
    dim: int
    inputs: int
    width: int
    experts: int
    units: int
    per_token: int

    @classmethod
    def of(cls, parts: tuple[int, ...], projection: tuple[int, ...], gate: tuple[int, ...], per_token: int) -> "_Plan":
        """By the shapes of operands."""
        return cls(*parts, *projection, gate[0], gate[2], per_token)

    @property
    def columns(self) -> int:
        """Of a query head's output, that a program combines."""
        return self.inputs // PROGRAMS

    @property
    def parts(self) -> int:
        """Of the output projection's inputs; a program has a block of its outputs by one part."""
        return PROGRAMS * COLUMNS // self.width

    @property
    def each(self) -> int:
        """Programs of a chosen expert."""
        return PROGRAMS // self.per_token

    @property
    def shares(self) -> int:
        """Of the inputs of gate and up: as few as give all programs of an expert equally many blocks of units."""
        return self.each // math.gcd(self.each, self.units // COLUMNS)

    @property
    def project_tiles(self) -> int:
        """Of the output projection."""
        return self.inputs // self.parts // ROWS

    @property
    def share_tiles(self) -> int:
        """Of gate, for one share of a block."""
        return self.width // self.shares // ROWS

    @property
    def gate_blocks(self) -> int:
        """Shares of blocks of units of a program."""
        return self.units // COLUMNS * self.shares // self.each

    @property
    def gate_tiles(self) -> int:
        """Of gate and up, one after the other."""
        return 2 * self.gate_blocks * self.share_tiles

    @property
    def down_blocks(self) -> int:
        """Blocks of outputs of a program."""
        return self.width // COLUMNS // self.each

    @property
    def down_tiles(self) -> int:
        """Of a block of outputs."""
        return self.units // ROWS

    @property
    def is_whole(self) -> bool:
        """Whether nothing is left over."""
        heads = self.kv_heads * self.queries
        return (
            PROGRAMS % self.per_token == 0
            and GATED + self.per_token <= COUNTERS
            and heads * self.dim == self.inputs
            and PROGRAMS % heads == 0
            and self.splits % 128 == 0
            and self.splits <= MOST_SPLITS
            and self.columns % 8 == 0
            and self.parts * self.width == PROGRAMS * COLUMNS
            and self.inputs % (self.parts * ROWS) == 0
            and self.project_tiles <= SLOTS
            and self.width % (self.shares * ROWS) == 0
            and self.width % (COLUMNS * self.each) == 0
            and self.units % ROWS == 0
            and self.experts % 128 == 0
            and max(self.inputs // self.parts, self.width, self.units) <= 16 * ROWS
        )


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run(options, splits, hidden, projection, scale, router, gate, up, down):
    per_token, normalize, eps, offset = options
    plan = _Plan.of(splits.parts.shape, projection.shape, gate.shape, per_token)
    shapes = [
        ((plan.inputs,), jnp.float32),
        ((plan.parts, plan.width), jnp.float32),
        ((plan.width,), hidden.dtype),
        ((plan.experts,), jnp.float32),
        ((per_token, plan.shares, 2, plan.units), jnp.float32),
        ((per_token, plan.width), jnp.float32),
    ]
    run = plgpu.kernel(
        partial(_program, plan=plan, normalize=normalize, eps=eps, offset=offset),
        out_type=[jax.ShapeDtypeStruct(*one) for one in shapes],
        grid=(PROGRAMS,),
        grid_names=("program",),
        kernel_name="expert_block",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )

    def results(counters):
        operands = splits.parts, splits.lses, splits.filled, counters
        _, _, total, _, _, rows = run(*operands, hidden, projection, scale, router, gate, up, down)
        return total, rows

    def counted(state):
        # Counters change where they lie: an array that is only read might be shared.
        counters, total, rows = state
        total[...], rows[...] = results(counters)

    if jax.__version_info__ >= (0, 11):
        initial = splits.counters, jnp.zeros(*shapes[2]), jnp.zeros(*shapes[5])
        _, total, rows = pl.run_state(counted)(initial)
    else:  # whose launches cannot say that they change an argument; nobody else has these counters
        total, rows = results(splits.counters)
    return total + jnp.sum(rows, axis=0).astype(total.dtype)


@_run.defjvp
def _run_jvp(options, operands, tangents):
    """A kernel cannot be differentiated, the reference can."""
    names = ("per_token", "normalize", "eps", "offset")
    definition = partial(reference.expert_block, **dict(zip(names, options, strict=True)))
    return _run(options, *operands), jax.jvp(definition, operands, tangents)[1]


def _program(*refs, plan, **settings):
    """Allocates: a ring of tiles, the token's inputs of a product, room for a vector, and a barrier for each tile."""
    dtype, most = refs[4].dtype, max(plan.inputs // plan.parts, plan.width, plan.units)
    pl.run_scoped(
        partial(_steps, refs[:11], refs[11:], plan=plan, **settings),
        plgpu.SMEM((SLOTS, ROWS, COLUMNS), dtype, transforms=TILED),
        plgpu.SMEM((most // ROWS, 8, ROWS), dtype, transforms=TILED),
        plgpu.SMEM((max(plan.experts, plan.splits),), jnp.float32),
        plgpu.Barrier(num_arrivals=1, num_barriers=SLOTS),
    )


def _steps(refs, outs, ring, inputs, room, arrived, *, plan, normalize, eps, offset):
    """All steps of a program. What comes from other programs is read behind `_wait`."""
    parts, lses, filled, counters, hidden, projection, scale, router, gate, up, down = refs
    attended, projected, total, logits, halves, rows = outs
    number = jax.lax.axis_index("program")
    tiles = partial(_products, ring, inputs, arrived)

    # Before the copies, behind which they would wait.
    splits = _load_splits(parts, lses, filled, number, plan)
    y, factor = _vector(hidden), offset + _vector(scale)
    own = [_vector(router.at[jax.lax.rem(number + i, plan.experts)]) for i in range(0, plan.experts, PROGRAMS)]
    blocks, rows_of_part = plan.width // COLUMNS, plan.inputs // plan.parts
    part, columns = jax.lax.div(number, blocks), pl.ds(jax.lax.rem(number, blocks) * COLUMNS, COLUMNS)
    for i in range(plan.project_tiles):
        at = pl.ds(part * rows_of_part + i * ROWS, ROWS), columns
        plgpu.copy_gmem_to_smem(projection.at[at], ring.at[i], arrived.at[i])
    attended[pl.ds(number * plan.columns, plan.columns)] = _combine(splits, room, plan)
    _signal(counters, COMBINED)

    _wait(counters, COMBINED, PROGRAMS)
    _put(_vector(attended.at[pl.ds(part * rows_of_part, rows_of_part)]), inputs)
    (sums,) = tiles(1, plan.project_tiles, lambda i, _: (i, i, None))
    projected[part, columns] = sums
    _signal(counters, PROJECTED)

    _wait(counters, PROJECTED, PROGRAMS)
    more = _vector(projected.at[0])
    for i in range(1, plan.parts):
        more += _vector(projected.at[i])
    y = (y + more.astype(total.dtype).astype(jnp.float32)).astype(total.dtype)

    @pl.when(number == 0)
    def _():
        total[...] = y

    y = y.astype(jnp.float32)
    y = (y * jax.lax.rsqrt(jnp.sum(y * y) / plan.width + eps) * factor).astype(total.dtype)
    for i, weights in enumerate(own):
        logits[jax.lax.rem(number + i * PROGRAMS, plan.experts)] = jnp.sum(weights * y.astype(jnp.float32))
    _signal(counters, ROUTED)
    _put(y, inputs)

    _wait(counters, ROUTED, PROGRAMS)
    place, mine = jax.lax.div(number, plan.each), jax.lax.rem(number, plan.each)
    expert = _chosen(logits, room, place)
    fetch = partial(_fetch, (gate, up, down), ring, arrived, expert, mine, plan)
    for t in range(SLOTS):
        fetch(jnp.int32(t))
    share = _share(logits, room, place, plan.per_token, normalize)

    @pl.loop(0, plan.gate_blocks)
    def _(u):
        columns, part = _gate_block(mine, u, plan)

        def tile(i, which):
            t = 2 * (u * plan.share_tiles + i) + which
            return _slot(t), part * plan.share_tiles + i, lambda: fetch(t + SLOTS)

        for which, sums in enumerate(tiles(2, plan.share_tiles, tile)):
            halves[place, part, which, columns] = sums

    _signal(counters, GATED + place)

    _wait(counters, GATED + place, plan.each)
    gates, ups = (_sum(halves.at[place, i, which] for i in range(plan.shares)) for which in range(2))
    _put(gates / (1 + jnp.exp(-gates)) * ups, inputs)

    @pl.loop(0, plan.down_blocks)
    def _(u):
        def tile(i, _):
            t = plan.gate_tiles + u * plan.down_tiles + i
            return _slot(t), i, lambda: fetch(t + SLOTS)

        (sums,) = tiles(1, plan.down_tiles, tile)
        rows[place, pl.ds((mine * plan.down_blocks + u) * COLUMNS, COLUMNS)] = sums * share


# --- tiles ---


def _slot(t):
    """Where tile t of the experts is: the ring is as long as a power of two."""
    return jax.lax.rem(t, SLOTS)


def _gate_block(mine, u, plan):
    """Units and the share of the inputs that are block u of a program."""
    u = mine * plan.gate_blocks + u
    return pl.ds(jax.lax.div(u, plan.shares) * COLUMNS, COLUMNS), jax.lax.rem(u, plan.shares)


def _fetch(weights, ring, arrived, expert, mine, plan, t):
    """Begin to copy tile t of an expert: gate and up in turns, then down; none behind the last."""
    slot = _slot(t)

    def copy(source, rows, columns):
        plgpu.copy_gmem_to_smem(source.at[expert, rows, columns], ring.at[slot], arrived.at[slot])

    i = jax.lax.div(t, 2)
    columns, part = _gate_block(mine, jax.lax.div(i, plan.share_tiles), plan)
    rows = pl.ds((part * plan.share_tiles + jax.lax.rem(i, plan.share_tiles)) * ROWS, ROWS)
    for which in range(2):
        pl.when((t < plan.gate_tiles) & (jax.lax.rem(t, 2) == which))(partial(copy, weights[which], rows, columns))
    i = t - plan.gate_tiles
    block = mine * plan.down_blocks + jax.lax.div(i, plan.down_tiles)
    rows = pl.ds(jax.lax.rem(i, plan.down_tiles) * ROWS, ROWS)
    there = (i >= 0) & (i < plan.down_blocks * plan.down_tiles)
    pl.when(there)(partial(copy, weights[2], rows, pl.ds(block * COLUMNS, COLUMNS)))


def _products(ring, inputs, arrived, sums, count, tile):
    """The token's products with `sums` blocks of outputs, of `count` tiles each, which lie in turns.

    `tile(i, which)` says where tile i of a block is, with which inputs it is multiplied, and what to do once it has
    been.
    """

    def program(*accumulators):
        @pl.loop(0, count)
        def _(i):
            for which, total in enumerate(accumulators):
                slot, chunk, then = tile(i, which)
                plgpu.barrier_wait(arrived.at[slot])
                plgpu.wgmma(total, ring.at[slot].transpose((1, 0)), inputs.at[chunk].transpose((1, 0)))
                plgpu.wgmma_wait(0)
                if then is not None:
                    plgpu.commit_smem()  # all have read the tile
                    then()

        # The other columns are whatever was in memory.
        column = plgpu.broadcasted_iota(jnp.int32, (COLUMNS, 8), 1, layout=FULL)
        return tuple(jnp.sum(jnp.where(column == 0, total[...], 0.0), axis=1) for total in accumulators)

    accumulator = plgpu.ACC((COLUMNS, 8), jnp.float32)  # pyright: ignore[reportPrivateImportUsage]
    return pl.run_scoped(program, *[accumulator] * sums)


def _put(values, inputs):
    """Write a vector where products read it: the first row of eight, which swizzling leaves as it is."""

    @plgpu.inline_mgpu(arg_types=(_spread(len(values)), plgpu.RefType(TILED)))
    def write(context, values, target):
        del context
        number = lambda n: arith.constant(ir.IndexType.get(), n)  # noqa: E731
        thread = arith.index_cast(ir.IndexType.get(), mgpu.utils.thread_idx())
        for i, register in enumerate(values.registers.flat):
            place = arith.muli(arith.addi(thread, number(128 * i)), number(values.layout.vec_size))
            chunk, place = arith.divui(place, number(ROWS)), arith.remui(place, number(ROWS))
            block, column = arith.divui(place, number(COLUMNS)), arith.remui(place, number(COLUMNS))
            vectors.store(register, target, [chunk, number(0), block, number(0), column])

    write(values.astype(inputs.dtype), inputs)
    plgpu.commit_smem()


# --- between programs ---


def _signal(counters, which):
    """One program more is done with a step: others see what its threads have written."""
    plgpu.commit_smem()

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(context, counter):
        del context
        mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter)).signal(1, memory_scope="gpu")

    add(counters.at[which])


def _wait(counters, which, count):
    """Until so many programs are done with a step."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(context, counter):
        del context
        semaphore = mgpu.utils.SemaphoreRef(mgpu.utils.memref_ptr(counter))
        semaphore.wait(count, decrement=False, memory_scope="gpu")

    wait(counters.at[which])


# --- vectors ---


def _spread(size):
    """How a vector lies in the registers of all threads."""
    return plgpu.Layout.WG_STRIDED((size,), min(4, (size // 128) & -(size // 128)))


def _load(ref, layout, **options):
    index = () if jax.__version_info__ >= (0, 11) else (...,)  # what JAX 0.10 asks for
    return plgpu.load(ref, *index, layout=layout, **options)


def _vector(ref, size=None):
    """A vector in float32, or its first numbers."""
    size = ref.shape[-1] if size is None else size
    return _load(ref, _spread(size)).astype(jnp.float32)


def _sum(refs):
    first, *others = map(_vector, refs)
    return sum(others, first)


# --- splits and experts ---


def _load_splits(parts, lses, filled, number, plan):
    """Some columns of a query head, of all of its splits: values, logarithms, and how many there are."""
    programs = PROGRAMS // (plan.kv_heads * plan.queries)
    head, columns = jax.lax.div(number, programs), jax.lax.rem(number, programs) * plan.columns
    kv_head, query = jax.lax.div(head, plan.queries), jax.lax.rem(head, plan.queries)
    starts = [pl.ds(i, 64) for i in range(0, plan.splits, 64)]
    at = [parts.at[kv_head, rows, query, pl.ds(columns, plan.columns)] for rows in starts]
    values = [_load(ref, FULL, optimized=False) for ref in at]
    logarithms = [_load(lses.at[kv_head, rows, query], ALONG_ROWS, optimized=False) for rows in starts]
    return values, logarithms, filled[kv_head]


def _combine(splits, room, plan):
    """The splits by their shares of the whole sum. What an empty split has is never multiplied: it may be NaN."""
    values, logarithms, count = splits
    for i, logarithm in enumerate(logarithms):
        number = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=ALONG_ROWS) + 64 * i
        room[pl.ds(64 * i, 64)] = jnp.where(number < count, logarithm, -jnp.inf)
    logarithm = _vector(room.at[pl.ds(0, plan.splits)], plan.splits)
    peak = jnp.max(logarithm)
    weight = jnp.exp((logarithm - jnp.where(peak == -jnp.inf, 0.0, peak)) * math.log(2))
    whole = jnp.sum(weight)
    room[pl.ds(0, plan.splits)] = weight / jnp.where(whole > 0, whole, 1.0)
    total = None
    for i, value in enumerate(values):
        share = _load(room.at[pl.ds(64 * i, 64)], ALONG_ROWS, optimized=False)
        share = jax.lax.broadcast_in_dim(share, value.shape, (0,))
        mixed = jnp.where(share > 0, value, 0.0) * share
        total = mixed if total is None else total + mixed
    return jnp.sum(total, axis=0)


def _chosen(logits, ranks, place):
    """The expert at this place among the best, of equal ones the first; leaves the places of all."""
    count = logits.shape[0]
    for start in range(0, count, 64):
        mine = _load(logits.at[pl.ds(start, 64)], ALONG_ROWS, optimized=False)
        mine = jax.lax.broadcast_in_dim(mine, (64, count), (0,))
        rival = jax.lax.broadcast_in_dim(_load(logits, ALONG_COLUMNS, optimized=False), (64, count), (1,))
        number = plgpu.broadcasted_iota(jnp.int32, (64, count), 0, layout=FULL) + start
        other = plgpu.broadcasted_iota(jnp.int32, (64, count), 1, layout=FULL)
        equal = jnp.where(rival == mine, jnp.where(other < number, 1.0, 0.0), 0.0)
        ranks[pl.ds(start, 64)] = jnp.sum(jnp.where(rival > mine, 1.0, equal), axis=1)
    rank = _vector(ranks.at[pl.ds(0, count)], count)
    number = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=_spread(count)).astype(jnp.float32)
    return jnp.sum(jnp.where(rank == place.astype(jnp.float32), number, 0.0)).astype(jnp.int32)


def _share(logits, ranks, place, per_token, normalize):
    """The share of the expert at this place."""
    rank, value = _vector(ranks.at[pl.ds(0, logits.shape[0])], logits.shape[0]), _vector(logits)
    part = jnp.exp(value - jnp.max(value))
    share = jnp.sum(jnp.where(rank == place.astype(jnp.float32), part, 0.0))
    return share / jnp.sum(jnp.where(rank < per_token, part, 0.0) if normalize else part)
