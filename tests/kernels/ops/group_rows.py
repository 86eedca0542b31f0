"""Rows by label: checks, backends, broken variants."""

from functools import partial

import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st

from clusterkv_jax.kernels.group_rows import pallas_gpu, reference
from tests.kernels.base import changed, compiled, drawn

BACKENDS = {
    "xla": reference.group_rows,
    "gpu": partial(pallas_gpu.group_rows, sizes={"rows": 64, "tiles": 2}, interpret=True),
}

# batch, heads, rows, labels
GROUP_SHAPES = [(2, 2, 300, 5), (1, 2, 129, 200)]


def check_group(implementation, *, examples=6):
    for shape in GROUP_SHAPES:
        check_group_of(shape, implementation, examples)


def check_group_of(shape, implementation, examples):
    *shape, count = shape
    run = compiled(partial(implementation, count=count))

    def check(seed, limit):
        labels = np.random.default_rng(seed).integers(-1, min(limit, count), shape)
        labels[0, 0, : seed % 2 * 64] = -1  # a whole tile without a label
        order, starts = run(np.asarray(labels, np.int32))
        assert (order.dtype, starts.dtype) == (jnp.int32, jnp.int32)
        last = np.where(labels < 0, count, labels)
        np.testing.assert_array_equal(order, np.argsort(last, axis=-1, kind="stable"))
        np.testing.assert_array_equal(starts, (last[..., None] < np.arange(count + 1)).sum(axis=2))

    drawn(check, examples, st.integers(0, 2**16), st.sampled_from([1000, 0, 1, 3]))


def group_without_the_order_of_rows(labels, count):
    order, starts = reference.group_rows(labels[..., ::-1], count)
    return labels.shape[-1] - 1 - order, starts


wrong = partial(changed, reference.group_rows)
CHECKS = [check_group]
BROKEN = {
    check_group: [
        group_without_the_order_of_rows,
        wrong("with_the_first_label_for_none", labels=lambda a: jnp.maximum(a.labels, 0)),
    ]
}
