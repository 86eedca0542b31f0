"""The earlier path of `clusterkv_jax.cache.host_store`, for one release."""

from clusterkv_jax.cache.host_store import host_bytes as host_bytes
from clusterkv_jax.cache.host_store import traffic as traffic
