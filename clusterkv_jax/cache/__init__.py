"""The KV cache as pytrees: layers, pages, rings, rows in host memory, and attention over all of them."""

from clusterkv_jax.cache.layers import HeadGroups as HeadGroups
from clusterkv_jax.cache.layers import KVCache as KVCache
from clusterkv_jax.cache.layers import LayerCache as LayerCache
from clusterkv_jax.cache.layers import PagedHeads as PagedHeads
from clusterkv_jax.cache.layers import WindowCache as WindowCache
from clusterkv_jax.cache.layers import append as append
from clusterkv_jax.cache.layers import nbytes as nbytes
from clusterkv_jax.cache.layers import occupancy as occupancy
