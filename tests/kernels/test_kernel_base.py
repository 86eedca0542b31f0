"""The shared base refuses what is broken: implementations that are wrong in one place each."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from clusterkv_jax.kernels.accumulated_attention import reference as accumulated_reference
from clusterkv_jax.kernels.append_rows import reference as append_reference
from clusterkv_jax.kernels.biased_attention import reference as attention_reference
from clusterkv_jax.kernels.chunked_matching import reference as matching_reference
from clusterkv_jax.kernels.gather_rows import reference as gather_reference
from clusterkv_jax.kernels.group_rows import reference as group_reference
from clusterkv_jax.kernels.index_scores import reference as scores_reference
from clusterkv_jax.kernels.kmeans import pallas_gpu as kmeans_gpu
from clusterkv_jax.kernels.kmeans import reference as kmeans_reference
from clusterkv_jax.kernels.recalled_attention import reference as recalled_reference
from clusterkv_jax.kernels.row_merge import reference as merge_reference
from clusterkv_jax.kernels.select_rows import reference as select_reference
from tests.kernels import base
from tests.kernels import base_kmeans as kmeans_base
from tests.kernels import base_merge as merge_base
from tests.kernels import base_recall as recall_base
from tests.support.hopper_interpreter import INTERPRETED


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


def kmeans_sure_of_what_fp16_decides(*args, **options):
    """Takes the heads of centroids for all of them: what their tails may change is not in doubt."""

    def first_guess(keys, norms, heads_of, tail_norm, *given):
        return INTERPRETED.first_guess(keys, norms, heads_of, 0 * tail_norm, *given)

    hasty = SimpleNamespace(groups=INTERPRETED.groups, SIZES=INTERPRETED.SIZES, first_guess=first_guess)
    sizes = {"warpgroups": 1, "programs": 1}
    return kmeans_gpu.kmeans(*args, **options, first_guess=hasty, sizes=sizes, interpret=True)


def merge_of_equal_degrees(keys, values, degree, *given, chunk):
    *means, _, rows = merge_reference.row_merge(keys, values, jnp.ones_like(degree), *given, chunk=chunk)
    return *means, merge_reference.row_merge(keys, values, degree, *given, chunk=chunk)[2], rows


def merge_of_the_last_of_equal_edges(keys, values, degree, rows, length, match, score, *given, chunk):
    score = score + 1e-4 * jnp.arange(score.shape[2], dtype=jnp.float32)
    return merge_reference.row_merge(keys, values, degree, rows, length, match, score, *given, chunk=chunk)


def merge_with_other_rows(keys, values, degree, rows, length, match, *given, chunk):
    """Rounds the partner down to every fourth row, so that other rows meet."""
    return merge_reference.row_merge(keys, values, degree, rows, length, match // 4 * 4 + 1, *given, chunk=chunk)


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
        (kmeans_base.check_kmeans, kmeans_without_tail_mask),
        (kmeans_base.check_kmeans, kmeans_without_the_last_key),
        (kmeans_base.check_kmeans, kmeans_with_every_centroid),
        (kmeans_base.check_kmeans, kmeans_by_half_precision),
        (kmeans_base.check_kmeans, kmeans_that_forgets_labels),
        (kmeans_base.check_kmeans, kmeans_that_never_ends),
        (kmeans_base.check_kmeans_on_hopper, kmeans_sure_of_what_fp16_decides),
        (merge_base.check_row_merge, merge_of_equal_degrees),
        (merge_base.check_row_merge, merge_of_the_last_of_equal_edges),
        (merge_base.check_row_merge, merge_with_other_rows),
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
