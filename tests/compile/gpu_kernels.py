"""Every op of a GPU at real shapes, for `gpu_programs.py`."""

from functools import partial

import jax.numpy as jnp
from described import BATCH, BF16, DIM, F32, HEADS, I32, PROMPT, QUERY_HEADS, RECALLED

from clusterkv_jax.kernels.accumulated_attention import accumulated_attention
from clusterkv_jax.kernels.append_rows import append_rows
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.group_rows import group_rows
from clusterkv_jax.kernels.head_products import head_products
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.kmeans import lloyd
from clusterkv_jax.kernels.quantised import CODES, Quantised, row_bytes
from clusterkv_jax.kernels.quantised_linear import quantised_linear
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.kernels.row_merge import row_merge
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.select_rows import select_rows
from clusterkv_jax.kernels.step_in_groups import step_in_groups
from clusterkv_jax.kernels.top_rows import top_rows
from clusterkv_jax.kernels.weight_codes import PACKED, QuantisedWeights

SLOTS, CENTROIDS = 13312, 400
CACHE, ROWS = (BATCH, HEADS, SLOTS, DIM), (BATCH, HEADS, SLOTS)


def programs(array):
    """Every op by name: the function, its arguments as `array(shape, dtype)` describes them, what it donates."""
    parts = attention, appending, stepping, matching, clustering, recalling, products
    return {name: program for part in parts for name, program in part(array).items()}


def of_little_memory(array):
    """What fills the shared memory of an H100."""
    most = clustering(array) | matching(array)
    names = [name for name in most if name == "kmeans" or name.startswith("matching of wide keys")]
    return {f"{name}, little shared memory": most[name] for name in names}


def codes(array, name, slots=SLOTS, heads=HEADS):
    """Rows of heads in codes."""
    scales = array((BATCH, heads, slots), F32)
    return Quantised(array((*scales.shape, row_bytes(name, DIM) - 4), CODES[name]), scales)


def attention(array):
    """Of a token and of a question, to rows of each type; and summed over a prompt."""

    def to(rows, tokens=1, dtype=BF16, **options):
        q = array((BATCH, tokens, QUERY_HEADS, DIM), dtype)
        run = partial(biased_attention, return_lse=True, return_probs=tokens == 1, **options)
        return run, (q, rows, rows, array(ROWS, F32), array((BATCH, HEADS), I32)), ()

    def accumulated(dtype, tokens):
        q, keys = (array((BATCH, heads, tokens, DIM), dtype) for heads in (QUERY_HEADS, HEADS))
        return accumulated_attention, (q, keys, array((BATCH,), I32)), ()

    rows = array(CACHE, BF16)
    return {
        "attention": to(rows),
        "attention of a question": to(rows, 64),
        "attention of a chunk": to(rows, 512),
        "attention with a soft cap": to(rows, soft_cap=50.0),
        "attention of int4 with a soft cap": to(codes(array, "int4"), soft_cap=50.0),
        "attention float32": to(array(CACHE, F32), dtype=F32),
        **{f"attention of {name}": to(codes(array, name)) for name in CODES},
        "attention of a question of int4": to(codes(array, "int4"), 64),
        "attention of int8 float32": to(codes(array, "int8"), dtype=F32),
        "accumulated attention": accumulated(BF16, 32768),
        "accumulated attention float32": accumulated(F32, 4096),
    }


def appending(array):
    """Rows behind those of the cache."""

    def to(rows, new, tokens=1):
        own = array((BATCH, tokens), I32), array((BATCH, tokens), bool)
        beside = array(ROWS, F32), array(ROWS, I32), array((BATCH, HEADS), I32)
        return append_rows, (rows, rows, *beside, new, new, *own), (0, 1, 2, 3)

    new, of_a_question = (array((BATCH, HEADS, tokens, DIM), BF16) for tokens in (1, 64))
    function, args, donated = to(array(CACHE, BF16), new)
    with_scores = *args, array(ROWS, F32), array((BATCH, HEADS, 1), F32)
    return {
        "append": (function, args, donated),
        "append a question": to(array(CACHE, BF16), of_a_question, 64),
        "append float16": to(array(CACHE, jnp.float16), new),
        "append with scores": (function, with_scores, (*donated, len(args))),
        **{f"append {name}": to(codes(array, name), codes(array, name, 1)) for name in CODES},
    }


def stepping(array):
    """A token into three groups of heads."""

    def into(rows_of):
        new, groups = rows_of(1, HEADS), [(SLOTS, 1), (4000, HEADS - 2), (100, 1)]
        rows = [rows_of(slots, heads) for slots, heads in groups]
        beside = [[array((BATCH, heads, slots), dtype) for dtype in (F32, I32, F32)] for slots, heads in groups]
        buffers = tuple((x, x, *more) for x, more in zip(rows, beside, strict=True))
        token = array((BATCH, 1, QUERY_HEADS, DIM), BF16), new, new, array((BATCH, 1), I32), array((BATCH, 1), bool)
        lengths = tuple(array((BATCH, heads), I32) for _, heads in groups)
        args = *token, array((BATCH, HEADS, 1), F32), buffers, lengths
        return partial(step_in_groups, heads=((2,), (0, 1, 3, 4, 5, 7), (6,))), args, (6,)

    return {
        "step in groups": into(lambda slots, heads: array((BATCH, heads, slots, DIM), BF16)),
        **{f"step in groups of {name}": into(partial(codes, array, name)) for name in CODES},
    }


def matching(array):
    """Partners of rows, by keys alone and with values; and rows merged where they lie."""
    bias, listed, length = array(ROWS, F32), array(ROWS, I32), array((BATCH, HEADS), I32)

    def alone(features, chunk, bias):
        def run(f, bias, rows, n):
            return chunked_matching(f, chunk=chunk, bias=bias, index=rows, length=n)

        return run, (features, bias, listed, length), ()

    def paired(rows):
        def run(k, v, w, bias, listed, n):
            return chunked_matching(k, values=v, key_weight=w, bias=bias, index=listed, length=n, chunk=256)

        return run, (rows, rows, array(length.shape, F32), bias, listed, length), ()

    def merging(rows):
        edges = array((BATCH, HEADS, SLOTS // 2), I32), array((BATCH, HEADS, SLOTS // 2), F32)
        merge = partial(row_merge, chunk=256)
        return merge, (rows, rows, bias, listed, length, *edges, array((BATCH,), I32)), (0, 1, 2, 3)

    wide = (*ROWS, 2 * DIM)
    return {
        "matching": alone(array(CACHE, BF16), 256, bias),
        "matching float32": alone(array(wide, F32), 512, bias),
        "matching of keys and values": paired(array(CACHE, BF16)),
        "matching of wide keys and values": paired(array(wide, BF16)),
        "matching of keys and values float32": paired(array(CACHE, F32)),
        **{f"matching of {name}": alone(codes(array, name), 256, None) for name in CODES},
        "matching of keys and values of int4": paired(codes(array, "int4")),
        **{f"merge {name}": merging(codes(array, name)) for name in CODES},
    }


def clustering(array):
    """Steps of K-means, and rows in the order of their labels or moved up."""
    prompt, labels = array((BATCH, HEADS, PROMPT, DIM), BF16), array((BATCH, HEADS, PROMPT), I32)
    narrow, many = array((2, 1, 4104, 64), jnp.float16), array((2, 1, 1000, 64), F32)
    moved = array((32, HEADS, SLOTS, DIM), jnp.int8), array((32, HEADS, SLOTS), I32)
    return {
        "kmeans": (lloyd, (prompt, array((BATCH, HEADS, CENTROIDS, DIM), F32)), ()),
        "kmeans, many centroids": (lloyd, (narrow, many), ()),
        "rows by label": (partial(group_rows, count=CENTROIDS), (labels,), ()),
        "gather": (gather_rows, (prompt, array((BATCH, HEADS, RECALLED), I32)), ()),
        "rows that move up": (partial(gather_rows, in_place=True), moved, (0,)),
        "top rows": (top_rows, (array((BATCH, HEADS, PROMPT), F32), array((BATCH,), I32)), ()),
    }


def recalling(array):
    """Scores of an index, the rows that they select, and attention to these."""
    group, length = QUERY_HEADS // HEADS, array((BATCH,), I32)
    query, index = array((BATCH, HEADS, group, DIM), BF16), (BATCH, HEADS, CENTROIDS, DIM)
    clusters, rows = array((BATCH, HEADS, CENTROIDS), I32), array((BATCH, HEADS, PROMPT), I32)
    selecting = array((BATCH, HEADS, group, CENTROIDS), F32), clusters, clusters, rows, length
    pages = array((BATCH, HEADS, PROMPT // 16), I32)
    paged = array((BATCH, HEADS, group, PROMPT // 16), F32), pages, pages, None, length
    prompt, recalled = array((BATCH, HEADS, PROMPT, DIM), BF16), array((BATCH, HEADS, group, RECALLED), I32)
    attending = query, prompt, prompt, recalled, length, array((BATCH, HEADS), I32)
    select, attend = partial(select_rows, count=RECALLED), partial(recalled_attention, unlisted=320)

    def of_a_batch(args):
        return [array((16, *x.shape[1:]), x.dtype) for x in args]

    return {
        "index scores": (index_scores, (query, array(index, BF16)), ()),
        "index scores of a batch": (index_scores, of_a_batch((query, array(index, BF16))), ()),
        "index scores float32": (index_scores, (query, array(index, F32)), ()),
        "select": (partial(select, sinks=16), selecting, ()),
        "select for a batch": (partial(select, sinks=16), of_a_batch(selecting), ()),
        "select pages": (select, paged, ()),
        "recalled attention": (attend, attending, ()),
        "recalled attention with a soft cap": (partial(attend, soft_cap=50.0), attending, ()),
    }


def products(array):
    """Few rows through weights."""

    def rows(count, inputs, outputs, dtype=BF16):
        return row_products, (*(array(x, dtype) for x in ((count, inputs), (inputs, outputs), (count, outputs))),), ()

    def gated(count, inputs, outputs, gate, dtype=BF16):
        weights = array((inputs, outputs), dtype)
        return partial(row_products, gate=gate), (array((count, inputs), dtype), weights, None, weights), ()

    def of_heads(dtype, tokens, inputs=4096):
        counts = QUERY_HEADS, HEADS, HEADS
        weights = tuple(array((count, DIM, inputs), dtype) for count in counts)
        biases = tuple(array((count, DIM), dtype) for count in counts)
        return array((tokens, inputs), dtype), weights, biases, (array((tokens, DIM // 2), F32),) * 2

    def of_codes(kind, dtype, rows, inputs, outputs, groups, offsets=False):
        codes = array((inputs // (2 if kind in PACKED else 1), outputs), dtype)
        scales = array((groups, outputs), jnp.uint8 if kind == "mxfp4" else jnp.float16)
        parts = codes, scales, scales if offsets else None
        weights = QuantisedWeights(*parts, kind=kind, shape=(inputs, outputs), names=("model", "mlp"))
        return quantised_linear, (array((rows, inputs), BF16), weights), ()

    surrogate = array((HEADS, 4096), F32), array((HEADS,), F32)
    return {
        "product of int8": of_codes("int8", jnp.int8, 1, 14336, 4096, 1),
        "product of a head in int8": of_codes("int8", jnp.int8, 16, 4096, 128256, 1),
        "product of int4": of_codes("int4", jnp.uint8, 1, 4096, 14336, 32, offsets=True),
        "product of fp8": of_codes("fp8", jnp.float8_e4m3fn, 16, 4096, 4096, 32),
        "product of mxfp4": of_codes("mxfp4", jnp.uint8, 16, 2880, 2880, 90),
        "row products": rows(16, 4096, 2048),
        "row products of half a model": rows(16, 7168, 4096),
        "gated row products": gated(3, 4096, 14336, "gelu_tanh", jnp.float16),
        "gated row products of half a model": gated(16, 4096, 7168, "silu"),
        "head products": (head_products, of_heads(BF16, 16), ()),
        "head products float16": (head_products, of_heads(jnp.float16, 1), ()),
        "head products with scores": (head_products, (*of_heads(BF16, 1), array((4096,), BF16), surrogate), ()),
    }
