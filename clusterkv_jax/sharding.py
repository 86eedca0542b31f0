"""Meshes of devices, for those who make their own: the public part of `runtime.sharding`."""

from clusterkv_jax.runtime.sharding import fitted_mesh as fitted_mesh
from clusterkv_jax.runtime.sharding import named_mesh as named_mesh
from clusterkv_jax.runtime.sharding import on_mesh as on_mesh
from clusterkv_jax.runtime.sharding import param_shardings as param_shardings
from clusterkv_jax.runtime.sharding import whole_axes as whole_axes
