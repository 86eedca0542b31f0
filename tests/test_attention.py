"""Attention over a layer's cache: parts combine to the whole, and a mesh changes nothing."""

import jax
import jax.numpy as jnp
import numpy as np

from clusterkv_jax.cache.attention import attend_cache, attend_new, combine
from clusterkv_jax.cache.layers import LayerCache
from clusterkv_jax.kernels.biased_attention import biased_attention, reference
from clusterkv_jax.kernels.ordinals import ordinals
from clusterkv_jax.runtime.sharding import auto_mesh
from tests.kernels.base import near, normal


def layer(batch, heads, slots, dim, length):
    keys, values = (jnp.asarray(normal(i, batch, heads, slots, dim), jnp.float32) for i in (10, 11))
    length = jnp.broadcast_to(jnp.asarray(length), (batch, heads))
    return LayerCache(keys, values, (ordinals(slots, 3) < length[..., None]).astype(jnp.float32), length)


def test_cache_and_new_tokens_combine_to_attention_over_both():
    old = layer(2, 2, 14, 16, [[10, 10], [8, 8]])
    q = normal(12, 2, 4, 4, 16).astype(np.float32)
    new_k, new_v = (normal(13 + i, 2, 4, 2, 16).astype(np.float32) for i in (0, 1))
    real = np.asarray([[True] * 4, [True, True, False, False]])

    @jax.jit
    def both(old, q, k, v, real):
        return combine(attend_cache(old, q), attend_new(q, k, v, real))

    result, keys, values = (np.asarray(x) for x in (both(old, q, new_k, new_v, real), old.keys, old.values))
    for b, t in ((0, 0), (0, 3), (1, 1)):
        n = int(np.asarray(old.length)[b, 0])
        k = np.concatenate([keys[b, :, :n], np.swapaxes(new_k[b, : t + 1], 0, 1)], axis=1)[None]
        v = np.concatenate([values[b, :, :n], np.swapaxes(new_v[b, : t + 1], 0, 1)], axis=1)[None]
        ones = np.ones(k.shape[:3], np.float32)
        expected = jax.jit(biased_attention)(q[b : b + 1, t : t + 1], k, v, ones)
        near(result[b, t], np.asarray(expected)[0, 0], 2e-6, axes=(0, 1))


def test_heads_one_after_the_other_are_those_at_once(monkeypatch):
    """A CPU takes the heads in turn, what has no kernel elsewhere takes them at once."""
    cache = layer(2, 2, 14, 16, [[10, 3], [0, 14]])
    poisoned = jnp.where((cache.degree > 0)[..., None], cache.values, jnp.nan)
    rows = (jnp.asarray(normal(12, 2, 5, 4, 16), jnp.float32), cache.keys, poisoned, cache.degree, cache.length)

    def attended():
        return jax.jit(lambda *rows: reference.biased_attention(*rows, return_lse=True, return_probs=True))(*rows)

    results = [attended()]
    monkeypatch.setattr(reference, "platform", lambda: "gpu")
    results += [attended()]
    for in_turn, at_once in zip(*results, strict=True):
        np.testing.assert_allclose(in_turn, at_once, atol=2e-6)
        assert not np.isnan(at_once).any()


def test_a_mesh_splits_heads_where_it_divides_them():
    cache, q = layer(2, 4, 20, 8, [[20], [7]]), jnp.asarray(normal(12, 2, 3, 8, 8), jnp.float32)
    alone = jax.jit(attend_cache)(cache, q)
    for shape in ((2, 4), (1, 8)):  # four KV heads on eight devices stay whole
        with jax.set_mesh(auto_mesh(jax.make_mesh(shape, ("data", "model")))):
            out, lse = jax.jit(attend_cache)(cache, q)
        np.testing.assert_allclose(out, alone[0], atol=1e-6)
        np.testing.assert_allclose(lse, alone[1], atol=1e-6)
        spec = tuple(out.sharding.spec) + (None,) * 4
        assert spec[2] == ("model" if shape == (2, 4) else None)
