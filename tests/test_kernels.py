"""Every backend of every op that runs on a CPU against the shared base, and broken ones that the base must refuse."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.test_util import check_grads

from clusterkv_jax.kernels.accumulated_attention import accumulated_attention
from clusterkv_jax.kernels.accumulated_attention import pallas_gpu as accumulated_gpu
from clusterkv_jax.kernels.accumulated_attention import pallas_tpu as accumulated_tpu
from clusterkv_jax.kernels.accumulated_attention import reference as accumulated_reference
from clusterkv_jax.kernels.append_rows import pallas_gpu as append_gpu
from clusterkv_jax.kernels.append_rows import reference as append_reference
from clusterkv_jax.kernels.biased_attention import biased_attention
from clusterkv_jax.kernels.biased_attention import pallas_gpu as attention_gpu
from clusterkv_jax.kernels.biased_attention import pallas_tpu as attention_tpu
from clusterkv_jax.kernels.biased_attention import reference as attention_reference
from clusterkv_jax.kernels.biased_attention.derivative import differentiable
from clusterkv_jax.kernels.chunked_matching import chunked_matching
from clusterkv_jax.kernels.chunked_matching import pallas_gpu as matching_gpu
from clusterkv_jax.kernels.chunked_matching import pallas_tpu as matching_tpu
from clusterkv_jax.kernels.chunked_matching import reference as matching_reference
from clusterkv_jax.kernels.gather_rows import gather_rows
from clusterkv_jax.kernels.gather_rows import pallas_gpu as gather_gpu
from clusterkv_jax.kernels.gather_rows import reference as gather_reference
from clusterkv_jax.kernels.group_rows import pallas_gpu as group_gpu
from clusterkv_jax.kernels.group_rows import reference as group_reference
from clusterkv_jax.kernels.index_scores import pallas_gpu as scores_gpu
from clusterkv_jax.kernels.index_scores import reference as scores_reference
from clusterkv_jax.kernels.kmeans import assign
from clusterkv_jax.kernels.kmeans import pallas_gpu as kmeans_gpu
from clusterkv_jax.kernels.kmeans import pallas_tpu as kmeans_tpu
from clusterkv_jax.kernels.kmeans import reference as kmeans_reference
from clusterkv_jax.kernels.recalled_attention import pallas_gpu as recalled_gpu
from clusterkv_jax.kernels.recalled_attention import recalled_attention
from clusterkv_jax.kernels.recalled_attention import reference as recalled_reference
from clusterkv_jax.kernels.row_merge import pallas_gpu as merge_gpu
from clusterkv_jax.kernels.row_merge import reference as merge_reference
from clusterkv_jax.kernels.select_rows import pallas_gpu as select_gpu
from clusterkv_jax.kernels.select_rows import reference as select_reference
from tests import kernel_base as base
from tests import kernel_base_recall as recall_base

# Memory that nothing wrote holds NaN, reads out of bounds raise, and two cores are checked for races: slow.
STRICT = pltpu.InterpretParams(uninitialized_memory="nan", detect_races=True, num_cores_or_threads=2)

ATTENTION = {
    "xla": attention_reference.biased_attention,
    "gpu": partial(attention_gpu.biased_attention, sizes={"block": 64, "span": 128}, interpret=True),
    "tpu": partial(attention_tpu.biased_attention, block=128, interpret=True),
}
ACCUMULATED = {
    "xla": partial(accumulated_reference.accumulated_attention, block=48),
    "gpu": partial(accumulated_gpu.accumulated_attention, interpret=True),
    "gpu-wide-blocks": partial(accumulated_gpu.accumulated_attention, sizes={"tile": 32, "block": 64}, interpret=True),
    "tpu": partial(accumulated_tpu.accumulated_attention, block=128, interpret=True),
    "tpu-short-last-block": partial(accumulated_tpu.accumulated_attention, block=256, interpret=True),
}
MATCHING = {
    "xla": matching_reference.chunked_matching,
    "gpu": partial(matching_gpu.chunked_matching, interpret=True),
    "tpu": partial(matching_tpu.chunked_matching, block=256, interpret=True),
}
KMEANS = {
    "xla": kmeans_reference.kmeans,
    "gpu": partial(kmeans_gpu.kmeans, interpret=True),
    "gpu-small-tiles": partial(
        kmeans_gpu.kmeans, sizes={"mean_keys": 16, "mean_tiles": 2, "sort_tiles": 1}, interpret=True
    ),
    "tpu": partial(kmeans_tpu.kmeans, block=128, interpret=True),
}
SCORES = {"xla": scores_reference.index_scores, "gpu": partial(scores_gpu.index_scores, interpret=True)}
GROUP = {
    "xla": group_reference.group_rows,
    "gpu": partial(group_gpu.group_rows, sizes={"rows": 64, "tiles": 2}, interpret=True),
}
SELECT = {
    "xla": select_reference.select_rows,
    "gpu": partial(select_gpu.select_rows, interpret=True),
    "gpu-long-lists": partial(select_gpu.select_rows, tuning={"groups": 2, "few": 4, "listed": 8}, interpret=True),
}
RECALLED = {
    "xla": recalled_reference.recalled_attention,
    "gpu": partial(recalled_gpu.recalled_attention, sizes={"span": 32}, interpret=True),
}
APPEND = {
    "xla": append_reference.append_rows,
    "gpu": partial(append_gpu.append_rows, interpret=True),
    "gpu-small-tiles": partial(append_gpu.append_rows, tile=2, interpret=True),
}
GATHER = {"xla": gather_reference.gather_rows, "gpu": partial(gather_gpu.gather_rows, interpret=True)}

CHECKS = [
    *((base.check_attention, name, op) for name, op in ATTENTION.items()),
    *((base.check_accumulated, name, op) for name, op in ACCUMULATED.items()),
    *((base.check_matching, name, op) for name, op in MATCHING.items()),
    *((base.check_paired, name, op) for name, op in MATCHING.items()),
    *((base.check_kmeans, name, op) for name, op in KMEANS.items()),
    *((base.check_append, name, op) for name, op in APPEND.items()),
    *((recall_base.check_group, name, op) for name, op in GROUP.items()),
    *((recall_base.check_gather, name, op) for name, op in GATHER.items()),
    *((recall_base.check_index_scores, name, op) for name, op in SCORES.items()),
    *((recall_base.check_select, name, op) for name, op in SELECT.items()),
    *((recall_base.check_recalled, name, op) for name, op in RECALLED.items()),
]


@pytest.mark.parametrize(("check", "op"), [pytest.param(c, op, id=f"{c.__name__[6:]}-{n}") for c, n, op in CHECKS])
def test_the_op_is_its_definition(check, op):
    check(op)


@pytest.mark.parametrize(
    ("check", "op", "shape"),
    [
        (base.check_attention, ATTENTION["tpu"], (2, 1, 2, 1, 130, 8, jnp.float32)),
        (base.check_attention, ATTENTION["tpu"], (1, 3, 8, 2, 260, 16, jnp.bfloat16)),
        (base.check_accumulated, ACCUMULATED["tpu"], (2, 1, 1, 300, 8, jnp.float32)),
        (base.check_accumulated, ACCUMULATED["tpu"], (1, 4, 2, 140, 16, jnp.bfloat16)),
        (base.check_matching, MATCHING["tpu"], (2, 1, 300, 8, 16, True, False, False, jnp.float32)),
        (base.check_matching, MATCHING["tpu"], (1, 2, 520, 16, 256, False, True, True, jnp.bfloat16)),
        (base.check_kmeans, KMEANS["tpu"], (2, 1, 140, 3, 8, jnp.float32)),
        (base.check_kmeans, KMEANS["tpu"], (1, 2, 260, 17, 16, jnp.bfloat16)),
    ],
    ids=[
        f"{op}-{heads}"
        for op in ("attention", "accumulated", "matching", "kmeans")
        for heads in ("one-head", "two-heads")
    ],
)
def test_tpu_kernels_race_no_one(check, op, shape, capfd):
    check(partial(op, interpret=STRICT), shapes=[shape], examples=1)
    assert "RACE" not in capfd.readouterr().out  # jax before 0.12 prints races instead of raising


def without_log_degree(q, keys, values, degree, length, **options):
    return attention_reference.biased_attention(q, keys, values, jnp.sign(degree), length, **options)


def without_length(q, keys, values, degree, length, **options):
    return attention_reference.biased_attention(q, keys, values, degree, None, **options)


def with_a_split_off_by_one(q, keys, values, degree, length, *, return_lse, return_probs):
    """Two parts that are combined as they should be, but the second begins one slot late."""
    half, both = keys.shape[2] // 2, {"return_lse": True, "return_probs": True}
    parts = []
    for a, b in ((0, half), (half + 1, keys.shape[2])):
        cut = (x[:, :, a:b] for x in (keys, values, degree))
        parts.append(attention_reference.biased_attention(q, *cut, jnp.clip(length - a, 0, b - a), **both))
    lse = jnp.logaddexp(parts[0][1], parts[1][1])
    share = [jnp.where(jnp.isfinite(lse), jnp.exp(part[1] - lse), 0.0) for part in parts]
    out = sum(s[..., None] * part[0].astype(jnp.float32) for s, part in zip(share, parts, strict=True))
    probs = [part[2] for part in parts]
    return out.astype(q.dtype), lse, jnp.concatenate([probs[0], probs[0][..., :1] * 0, probs[1]], axis=-1)


def accumulated_without_length(q, keys, lengths):
    return accumulated_reference.accumulated_attention(q, keys, jnp.full_like(lengths, q.shape[2]))


def accumulated_without_diagonal(q, keys, lengths):
    """Queries that see the row after their own too."""
    return accumulated_reference.accumulated_attention(jnp.roll(q, 1, axis=2), keys, lengths)


def accumulated_of_the_first_query_heads(q, keys, lengths):
    return accumulated_reference.accumulated_attention(q[:, : keys.shape[1]], keys, lengths)


def matching_without_tail_mask(features, *, length, **options):
    return matching_reference.chunked_matching(features, length=None, **options)


def matching_of_longer_chunks(features, *, chunk, **options):
    return matching_reference.chunked_matching(features, chunk=chunk + 2, **options)


def matching_of_one_value_weight(features, *, value_weight, **options):
    return matching_reference.chunked_matching(features, value_weight=1.0, **options)


def matching_without_distance(features, *, key_weight, **options):
    return matching_reference.chunked_matching(features, key_weight=jnp.zeros_like(key_weight), **options)


def matching_without_bias(features, *, bias, **options):
    return matching_reference.chunked_matching(features, bias=None, **options)


def kmeans_without_tail_mask(keys, centroids, length, *given, **options):
    return kmeans_reference.kmeans(jnp.nan_to_num(keys), centroids, None, *given, **options)


def kmeans_without_the_last_key(keys, centroids, length, *given, **options):
    _, means, sizes, _ = kmeans_reference.kmeans(keys, centroids, length - 1, *given, **options)
    full, _, _, changed = kmeans_reference.kmeans(keys, centroids, length, *given, **options)
    return full, means, sizes, changed


def kmeans_with_every_centroid(keys, centroids, length, used, before, **options):
    return kmeans_reference.kmeans(keys, centroids, length, None, before, **options)


def kmeans_by_half_precision(keys, centroids, *given, **options):
    half = kmeans_reference.unit_rows(centroids).astype(jnp.float16).astype(jnp.float32)
    labels, means, sizes, changed = kmeans_reference.kmeans(keys, half, *given, **options)
    return labels, jnp.where(sizes[..., None] > 0, means, centroids), sizes, changed


def kmeans_that_forgets_labels(keys, centroids, length, used, before, **options):
    _, *moved, changed = kmeans_reference.kmeans(keys, centroids, length, used, before, **options)
    return kmeans_reference.kmeans(keys, centroids, length, used, with_means=False), *moved, changed


def kmeans_that_never_ends(*given, **options):
    *moved, changed = kmeans_reference.kmeans(*given, **options)
    return *moved, jnp.ones_like(changed)


def append_of_padding(*args):
    return append_reference.append_rows(*args[:-1], jnp.ones_like(args[-1]))


def append_behind_the_first_head(keys, values, degree, positions, length, *new):
    return append_reference.append_rows(keys, values, degree, positions, length[:, :1] + 0 * length, *new)


def append_over_the_last_rows(keys, values, degree, positions, length, new_keys, *new):
    length = jnp.minimum(length, keys.shape[2] - new_keys.shape[2])
    return append_reference.append_rows(keys, values, degree, positions, length, new_keys, *new)


def append_of_short_rows(keys, values, degree, positions, length, new_keys, *new):
    return append_reference.append_rows(keys, values, degree, positions, length, new_keys.astype(jnp.float8_e5m2), *new)


def group_without_the_order_of_rows(labels, count):
    order, starts = group_reference.group_rows(labels[..., ::-1], count)
    return labels.shape[-1] - 1 - order, starts


def group_with_the_first_label_for_none(labels, count):
    return group_reference.group_rows(jnp.maximum(labels, 0), count)


def index_scores_of_short_products(q, index):
    return scores_reference.index_scores(q.astype(jnp.bfloat16), index.astype(jnp.bfloat16))


def index_scores_of_the_first_query(q, index):
    return jnp.broadcast_to(scores_reference.index_scores(q[:, :, :1], index), (*q.shape[:3], index.shape[2]))


def select_of_equals_in_any_order(scores, *args, **options):
    nudged = scores + 1e-5 * jnp.arange(scores.shape[-1], dtype=jnp.float32)
    return select_reference.select_rows(nudged, *args, **options)


def select_of_one_row_too_many(scores, sizes, starts, order, room, *kept, **options):
    return select_reference.select_rows(scores, sizes, starts, order, room + 1, *kept, **options)


def select_with_sinks_on_top(scores, sizes, starts, order, room, *kept, sinks, **options):
    return select_reference.select_rows(scores, sizes, starts, order, room + sinks, *kept, sinks=sinks, **options)


def select_for_all_batch_rows(scores, sizes, starts, order, room, *kept, **options):
    return select_reference.select_rows(scores, sizes, starts, order, room, **options)


def select_of_scattered_rows(*args, sinks, **options):
    rows = select_reference.select_rows(*args, sinks=sinks, **options)
    return jnp.concatenate([rows[..., :sinks], jnp.sort(rows[..., sinks:], descending=True)], axis=-1)


def recalled_with_the_last_row_for_none(q, keys, values, rows, *args, **options):
    return recalled_reference.recalled_attention(q, keys, values, rows % keys.shape[2], *args, **options)


def recalled_beyond_its_length(q, keys, values, rows, since, length, **options):
    return recalled_reference.recalled_attention(q, keys, values, rows, since, None, **options)


def recalled_without_the_first_unlisted_row(q, keys, values, rows, since, length, *, unlisted):
    since = None if since is None else since + 1
    return recalled_reference.recalled_attention(q, keys, values, rows, since, length, unlisted=unlisted)


def gather_of_the_last_row_for_none(source, rows, near=None, place=None):
    return gather_reference.gather_rows(source, rows % source.shape[2], near, place)


def gather_of_what_is_near_first(source, rows, near=None, place=None):
    return gather_reference.gather_rows(source, rows, near, None if place is None else abs(place))


@pytest.mark.parametrize(
    ("check", "broken"),
    [
        (base.check_attention, without_log_degree),
        (base.check_attention, without_length),
        (base.check_attention, with_a_split_off_by_one),
        (base.check_accumulated, accumulated_without_length),
        (base.check_accumulated, accumulated_without_diagonal),
        (base.check_accumulated, accumulated_of_the_first_query_heads),
        (base.check_matching, matching_without_tail_mask),
        (base.check_matching, matching_of_longer_chunks),
        (base.check_matching, matching_without_bias),
        (base.check_paired, matching_of_one_value_weight),
        (base.check_paired, matching_without_distance),
        (base.check_kmeans, kmeans_without_tail_mask),
        (base.check_kmeans, kmeans_without_the_last_key),
        (base.check_kmeans, kmeans_with_every_centroid),
        (base.check_kmeans, kmeans_by_half_precision),
        (base.check_kmeans, kmeans_that_forgets_labels),
        (base.check_kmeans, kmeans_that_never_ends),
        (base.check_append, append_of_padding),
        (base.check_append, append_behind_the_first_head),
        (base.check_append, append_over_the_last_rows),
        (base.check_append, append_of_short_rows),
        (recall_base.check_group, group_without_the_order_of_rows),
        (recall_base.check_group, group_with_the_first_label_for_none),
        (recall_base.check_gather, gather_of_the_last_row_for_none),
        (recall_base.check_gather, gather_of_what_is_near_first),
        (recall_base.check_select, select_of_equals_in_any_order),
        (recall_base.check_index_scores, index_scores_of_short_products),
        (recall_base.check_index_scores, index_scores_of_the_first_query),
        (recall_base.check_select, select_of_one_row_too_many),
        (recall_base.check_select, select_for_all_batch_rows),
        (recall_base.check_select, select_with_sinks_on_top),
        (recall_base.check_select, select_of_scattered_rows),
        (recall_base.check_recalled, recalled_with_the_last_row_for_none),
        (recall_base.check_recalled, recalled_beyond_its_length),
        (recall_base.check_recalled, recalled_without_the_first_unlisted_row),
    ],
    ids=lambda f: f.__name__,
)
def test_the_base_refuses_broken_ones(check, broken):
    with pytest.raises(AssertionError):
        check(broken)


@pytest.mark.parametrize(("levels", "merges"), [(0, (60, 0)), (3, (60, 20))])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_rows_merge_on_the_gpu_as_the_reference_says(dtype, levels, merges):
    """Ties (scores of few levels) at the limit, a row of the batch that is done, slots that are not on the list."""
    rng = np.random.default_rng(levels)
    keys, values = (jnp.asarray(rng.normal(size=(2, 2, 160, 20)), dtype) for _ in range(2))
    degree = jnp.asarray(rng.integers(1, 90000, (2, 2, 160)), jnp.float32)
    rows = jnp.asarray(np.sort(rng.permuted(np.tile(np.arange(160), (2, 2, 1)), axis=2)[..., :149]), jnp.int32)
    length, merges = jnp.asarray([[149, 149], [120, 120]]), jnp.asarray(merges)
    match, score = chunked_matching(keys, chunk=32, length=length, index=rows)
    score = jnp.round(score * levels) / levels if levels else score
    args = (keys, values, degree, rows, length, match, score, merges)
    expected = merge_reference.row_merge(*args, chunk=32)
    found = merge_gpu.row_merge(*args, chunk=32, interpret=True)
    for x, y in zip(found[:2], expected[:2], strict=True):
        base.near(x, y, base.tolerance(dtype), axes=(2, 3))
    np.testing.assert_array_equal(found[2], expected[2])
    left = jnp.arange(149) < (length - merges[:, None])[..., None]
    np.testing.assert_array_equal(jnp.where(left, found[3], -1), jnp.where(left, expected[3], -1))


@pytest.mark.parametrize("op", APPEND.values(), ids=APPEND)
def test_appending_has_derivatives(op):
    keys, values, *rows = (jnp.asarray(base.normal(i, 1, 2, n, 3), jnp.float32) for i, n in enumerate((5, 5, 2, 2)))
    length, real = jnp.asarray([[2, 4]]), jnp.asarray([[True, True]])

    def function(keys, values, degree, new_keys, new_values):
        return op(keys, values, degree, None, length, new_keys, new_values, jnp.zeros((1, 2), jnp.int32), real)[:3]

    check_grads(jax.jit(function), (keys, values, keys[..., 0], *rows), order=1, modes=("fwd", "rev"), rtol=1e-2)


@pytest.mark.parametrize("op", ATTENTION.values(), ids=ATTENTION)
def test_attention_has_derivatives(op):
    q, keys, values, degree = base.attention_case((1, 2, 2, 1, 6, 4, jnp.float32), 3, holes=0.0)

    @jax.jit
    def function(q, keys, values, log_degree):
        return differentiable(op)(q, keys, values, jnp.exp(log_degree), None, return_lse=True, return_probs=True)

    check_grads(function, (q, keys, values, jnp.log(degree)), order=1, modes=("fwd", "rev"), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("op", ATTENTION.values(), ids=ATTENTION)
def test_empty_slots_have_no_derivative_and_their_nan_reaches_none(op):
    q, keys, values, degree = base.attention_case((1, 2, 4, 2, 12, 4, jnp.float32), 5, holes=0.4)
    length = jnp.asarray([[9, 0]])
    empty = (degree == 0) | (jnp.arange(12) >= length[..., None])

    @jax.jit
    def gradients(*operands):
        def loss(*operands):
            out, lse = differentiable(op)(*operands, length, return_lse=True, return_probs=False)
            return jnp.sum(jnp.sin(out)) + jnp.sum(jnp.where(jnp.isfinite(lse), lse, 0.0))

        return jax.grad(loss, argnums=(0, 1, 2, 3))(*operands)

    clean = gradients(q, keys, values, degree)
    dirty = gradients(q, *(base.poisoned(x, empty) for x in (keys, values)), degree)
    for found, expected in zip(dirty, clean, strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6)
    for x in dirty[1:]:
        assert not np.any(np.asarray(x)[np.asarray(empty)])
    assert np.any(np.asarray(dirty[3]))


def test_attention_does_not_depend_on_slot_order():
    q, keys, values, degree = base.attention_case((2, 1, 4, 2, 24, 16, jnp.float32), 6, holes=0.2)
    order = np.random.default_rng(8).permutation(24)
    mixed = biased_attention(q, keys[:, :, order], values[:, :, order], degree[:, :, order])
    base.near(mixed, biased_attention(q, keys, values, degree), 1e-6, axes=(1, 3))


def test_what_no_backend_can_serve_is_named():
    features = jnp.ones((1, 1, 4, 4))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        chunked_matching(features, chunk=4, backend="cuda")
    with pytest.raises(ValueError, match="even number"):
        chunked_matching(features, chunk=5)
    with pytest.raises(ValueError, match="no backend"):
        biased_attention(jnp.ones((1, 1, 2, 4)), features, features, jnp.ones((1, 1, 4)), backend="cuda")
    with pytest.raises(ValueError, match="multiple of KV heads, got 3 and 2"):
        biased_attention(jnp.ones((1, 1, 3, 4)), jnp.ones((1, 2, 4, 4)), jnp.ones((1, 2, 4, 4)), jnp.ones((1, 2, 4)))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        accumulated_attention(features, features, jnp.ones(1, jnp.int32), backend="cuda")
    with pytest.raises(ValueError, match="multiple of KV heads, got 1 and 2"):
        accumulated_attention(features, jnp.ones((1, 2, 4, 4)), jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="a query and a key, got 4 and 3"):
        accumulated_attention(features, features[:, :, 1:], jnp.ones(1, jnp.int32))
    with pytest.raises(ValueError, match="no backend 'cuda'"):
        gather_rows(features, jnp.zeros((1, 1, 2), jnp.int32), backend="cuda")
    with pytest.raises(ValueError, match="at least one centroid"):
        assign(features, features[:, :, :0])
    with pytest.raises(ValueError, match="multiple of its lists, got 4 and 3"):
        recalled_attention(features, features, features, jnp.zeros((1, 1, 3, 2), jnp.int32))


@pytest.mark.parametrize(
    "call",
    [
        lambda x: biased_attention(x, x, x, x[..., 0], backend="tpu"),
        lambda x: accumulated_attention(x, x, jnp.ones(1, jnp.int32), backend="tpu"),
        lambda x: chunked_matching(x, chunk=4, backend="tpu"),
        lambda x: assign(x, x, backend="tpu"),
    ],
)
def test_a_backend_of_another_device_says_what_it_needs(call):
    with pytest.raises(NotImplementedError, match="backend 'tpu' needs a TPU, not a cpu"):
        call(jnp.ones((1, 1, 4, 4)))


def test_tpu_kernels_say_what_they_do_not_serve():
    x = jnp.ones((1, 1, 200, 8))
    with pytest.raises(NotImplementedError, match="float32 or bfloat16, got float16"):
        attention_tpu.biased_attention(
            *[x.astype(jnp.float16)] * 3, x[..., 0], None, return_lse=False, return_probs=False
        )
    with pytest.raises(NotImplementedError, match="multiple of 128, got 100"):
        accumulated_tpu.accumulated_attention(x, x, jnp.ones(1, jnp.int32), block=100)
    with pytest.raises(NotImplementedError, match="multiple of 128 or all 200 keys, got 100"):
        kmeans_tpu.kmeans(x, x[:, :, :3], None, with_means=True, block=100)
    with pytest.raises(NotImplementedError, match="chunks of 198 rows"):
        matching_tpu.chunked_matching(x, chunk=198, bias=None, normalize=True, start=None, length=None, block=256)
