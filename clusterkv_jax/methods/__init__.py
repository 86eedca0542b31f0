"""Compression methods: a short file per paper, and the pieces that a method of your own is made of."""

from clusterkv_jax.methods.base import Compressed as Compressed
from clusterkv_jax.methods.base import Method as Method
from clusterkv_jax.methods.base import Rows as Rows
from clusterkv_jax.methods.families.clustering import Clustering as Clustering
from clusterkv_jax.methods.families.eviction import (
    Eviction as Eviction,
)
from clusterkv_jax.methods.families.eviction import (
    Scoped as Scoped,
)
from clusterkv_jax.methods.families.eviction import (
    Windowed as Windowed,
)
from clusterkv_jax.methods.families.eviction import (
    window_of as window_of,
)
from clusterkv_jax.methods.families.recall import Recall as Recall
from clusterkv_jax.methods.families.scored import Scored as Scored
from clusterkv_jax.methods.registry import *
from clusterkv_jax.methods.schedule import Protected as Protected
from clusterkv_jax.methods.schedule import Schedule as Schedule
from clusterkv_jax.methods.schedule import recompress_every as recompress_every

every = recompress_every  # its earlier name
