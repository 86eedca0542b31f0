"""What falls back to XLA on an accelerator is said once for each op and reason; a CPU has no kernels to refuse."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractDevice, AbstractMesh

from clusterkv_jax.kernels import gpu
from clusterkv_jax.kernels.group_rows import group_rows
from clusterkv_jax.kernels.index_scores import index_scores
from clusterkv_jax.kernels.quantised import quantise
from clusterkv_jax.runtime import dispatch

GPU = AbstractMesh((), (), abstract_device=AbstractDevice("NVIDIA H200", num_cores=None, platform="gpu"))


def scores(dim, entries=8):
    q, index = (jax.ShapeDtypeStruct((1, 2, n, dim), jnp.float32) for n in (2, entries))
    return jax.eval_shape(index_scores, q, index)


def test_a_refused_kernel_is_logged_once_for_each_op_and_reason(caplog):
    dispatch._log_refusal.cache_clear()
    with jax.sharding.use_abstract_mesh(GPU):
        assert scores(1024).shape == scores(1024).shape == (1, 2, 2, 8)
        scores(2048)
        labels = jax.ShapeDtypeStruct((1, 2, 16), jnp.int32)
        jax.eval_shape(lambda labels: group_rows(labels, 10**6), labels)
    assert {(record.name, record.levelname) for record in caplog.records} == {("clusterkv_jax.kernels", "WARNING")}
    said = [record.message for record in caplog.records]
    assert [line.split()[0] for line in said] == ["index_scores", "index_scores", "group_rows"]
    assert said[0].startswith("index_scores falls back to XLA from its GPU kernel: ")
    assert "(1, 2, 2, 1024)" in said[0]


def test_nothing_is_logged_where_no_kernel_is_refused(caplog):
    scores(1024)
    assert not caplog.records


def test_no_backend_at_all_says_why():
    def refuses():
        raise NotImplementedError("The rows are odd.")

    with pytest.raises(NotImplementedError, match=r"No backend of op serves this call on cpu: The rows are odd."):
        dispatch.dispatch("op", {"xla": refuses}, None)


def test_a_gpu_that_cannot_convert_float8_says_so(monkeypatch):
    rows = {name: quantise(jnp.ones((1, 1, 2, 4)), name) for name in ("int8", "float8_e4m3")}
    monkeypatch.setattr(gpu, "device_kind", lambda: "NVIDIA A100-SXM4-80GB")
    gpu.check_dtypes("row_merge", rows["int8"], rows["int8"])
    with pytest.raises(NotImplementedError, match=r"row_merge reads no float8_e4m3 on NVIDIA A100"):
        gpu.check_dtypes("row_merge", rows["float8_e4m3"])
    with pytest.raises(NotImplementedError, match=r"stored alike, got int8, float32\.$"):
        gpu.check_dtypes("row_merge", rows["int8"], jnp.ones((1, 1, 2, 4)))
