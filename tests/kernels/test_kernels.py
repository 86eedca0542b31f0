"""Every backend of every op that runs on a CPU against the shared base; derivatives; what is refused and how."""

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
from tests.kernels import base
from tests.kernels import base_kmeans as kmeans_base
from tests.kernels.checks import CHECKS
from tests.support import hopper_interpreter

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
# Several groups of centroids, and more tiles of keys than a warpgroup's ring has room for.
SMALL = {"block": 24, "held": 48, "warpgroups": 1, "programs": 1}
HOPPER = {"gpu": partial(kmeans_gpu.kmeans, first_guess=hopper_interpreter.INTERPRETED, sizes=SMALL, interpret=True)}
SCORES = {
    "xla": scores_reference.index_scores,
    "gpu": partial(scores_gpu.index_scores, interpret=True),
    "gpu-long-tiles": partial(scores_gpu.index_scores, tile=64, interpret=True),
}
GROUP = {
    "xla": group_reference.group_rows,
    "gpu": partial(group_gpu.group_rows, sizes={"rows": 64, "tiles": 2}, interpret=True),
}
SELECT = {
    "xla": select_reference.select_rows,
    "gpu": partial(select_gpu.select_rows, interpret=True),
    "gpu-marks": partial(select_gpu.select_rows, tuning={"marked": 1, "listed": 8}, interpret=True),
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

MERGE = {"xla": merge_reference.row_merge, "gpu": partial(merge_gpu.row_merge, interpret=True)}

BACKENDS = {
    "biased_attention": ATTENTION,
    "accumulated_attention": ACCUMULATED,
    "chunked_matching": MATCHING,
    "row_merge": MERGE,
    "kmeans": KMEANS,
    "kmeans on Hopper": HOPPER,
    "append_rows": APPEND,
    "group_rows": GROUP,
    "gather_rows": GATHER,
    "index_scores": SCORES,
    "select_rows": SELECT,
    "recalled_attention": RECALLED,
}


@pytest.mark.parametrize(
    ("check", "op"),
    [
        pytest.param(check, implementation, id=f"{check.__name__[6:]}-{name}")
        for op, checks in CHECKS.items()
        for check in checks
        for name, implementation in BACKENDS[op].items()
    ],
)
def test_the_op_is_its_definition(check, op):
    check(op)


def test_warpgroups_of_kmeans_wait_for_what_they_share():
    """Two of them at once; all else is drawn with one, which compiles in a fraction of the time."""
    op = partial(HOPPER["gpu"], sizes=SMALL | {"warpgroups": 2})
    kmeans_base.check_kmeans_on_hopper(op, shapes=[(1, 1, 136, 30, 64, jnp.bfloat16)], examples=1)


@pytest.mark.parametrize(
    ("check", "op", "shape"),
    [
        (base.check_attention, ATTENTION["tpu"], (2, 1, 2, 1, 130, 8, jnp.float32)),
        (base.check_attention, ATTENTION["tpu"], (1, 3, 8, 2, 260, 16, jnp.bfloat16)),
        (base.check_accumulated, ACCUMULATED["tpu"], (2, 1, 1, 300, 8, jnp.float32)),
        (base.check_accumulated, ACCUMULATED["tpu"], (1, 4, 2, 140, 16, jnp.bfloat16)),
        (base.check_matching, MATCHING["tpu"], (2, 1, 300, 8, 16, True, False, False, jnp.float32)),
        (base.check_matching, MATCHING["tpu"], (1, 2, 520, 16, 256, False, True, True, jnp.bfloat16)),
        (kmeans_base.check_kmeans, KMEANS["tpu"], (2, 1, 140, 3, 8, jnp.float32)),
        (kmeans_base.check_kmeans, KMEANS["tpu"], (1, 2, 260, 17, 16, jnp.bfloat16)),
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


def test_means_do_not_hang_on_centroids_of_no_use():
    """A row of a batch has as many centroids as the longest one, and uses its own."""
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.normal(size=(1, 1, 3000, 16)) * np.exp(2 * rng.normal(size=(3000, 1))), jnp.float32)
    centroids = jnp.asarray(rng.normal(size=(1, 1, 620, 16)), jnp.float32)
    step = partial(kmeans_gpu.kmeans, length=None, used=jnp.full((1, 1), 20), with_means=True, interpret=True)
    alone, among_others = step(keys, centroids[:, :, :20]), step(keys, centroids)
    np.testing.assert_array_equal(alone[0], among_others[0])
    np.testing.assert_array_equal(alone[1], among_others[1][:, :, :20])


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
