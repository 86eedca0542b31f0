"""From logical axes to a mesh: tensor parallelism over its last axis, data parallelism over the others.

Parameters declare their logical axes in `models.transformer.abstract`, caches in `CACHE_AXES`; the rules here are the
only place that knows mesh axes. A dimension that its mesh axes do not divide stays whole (two KV heads on eight
devices are replicated, as is usual for GQA), and `whole_axes` names what stayed so.
"""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

# Logical axes that are split over the mesh's last axis; "batch" is split over the others, everything else stays whole.
TENSOR_PARALLEL = ("heads", "kv_heads", "mlp", "vocab")

CACHE_AXES: dict[int, tuple[str | None, ...]] = {
    4: ("batch", "kv_heads", None, None),  # keys, values [B, K, C, D]
    3: ("batch", "kv_heads", None),  # degree, positions [B, K, C]
    2: ("batch", "kv_heads"),  # length [B, K]
    1: ("batch",),  # state and position [B]
}


_SIZE = re.compile(r"(data|sequence|model)=([1-9][0-9]{0,4})")
AXES = ("data", "sequence", "model")


def mesh_sizes(text: str) -> dict[str, int]:
    """ "data=2,model=4" as sizes of all of AXES, in their order; an axis that is not named has size 1.

    Raises ValueError that quotes the part which is none.
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        found = _SIZE.fullmatch(part.strip())
        if found is None or found[1] in sizes:
            allowed = f"each of {', '.join(AXES)} once, with a whole number from 1 to 99999"
            raise ValueError(f"A mesh is such as data=2,model=4, {allowed}, got {part!r} in {text!r}.")
        sizes[found[1]] = int(found[2])
    return {name: sizes.get(name, 1) for name in AXES}


def named_mesh(text: str, devices: Sequence[Any] | None = None) -> Mesh:
    """A mesh over these devices (all of JAX's by default), such as "data=2,model=4"; axes of size 1 are left out.

    Neighbouring devices share a model, so that its collectives take the shortest links.

    Raises ValueError for a text that is none (`mesh_sizes`), and unless the sizes' product is the number of devices.
    """
    sizes = mesh_sizes(text)
    devices = jax.devices() if devices is None else devices
    if math.prod(sizes.values()) != len(devices):
        raise ValueError(f"The mesh {text} is for {math.prod(sizes.values())} devices, and there are {len(devices)}.")
    names = tuple(name for name, size in sizes.items() if size > 1 or name == "model")
    shape = tuple(sizes[name] for name in names)
    return auto_mesh(jax.make_mesh(shape, names, devices=devices, axis_types=(AxisType.Auto,) * len(names)))


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same mesh with automatic axes: the compiler places the collectives."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def mesh_axes(name: str | None, mesh: Any) -> tuple[str, ...]:
    """Mesh axes that a logical axis is split over."""
    if name in TENSOR_PARALLEL:
        return mesh.axis_names[-1:]
    return mesh.axis_names[:-1] if name == "batch" else ()


def partition(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes and this shape.

    Raises ValueError if two of its dimensions would be split over the same mesh axis.
    """
    entries = []
    for name, size in zip(axes, shape, strict=True):
        split = mesh_axes(name, mesh)
        entries.append(split if split and size % _ways(split, mesh) == 0 else None)
    names = [axis for entry in entries if entry for axis in entry]
    if len(names) != len(set(names)):
        raise ValueError(f"Logical axes {axes} would split two dimensions over one axis of the mesh {mesh.axis_names}.")
    return PartitionSpec(*(entry[0] if entry and len(entry) == 1 else entry for entry in entries))


def param_shardings(specs: Any, mesh: Mesh) -> Any:
    """A NamedSharding for every TensorSpec of `models.transformer.abstract(config)`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec.axes, spec.shape, mesh)), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def fetch(tree: Any) -> Any:
    """Arrays as NumPy's, those too of which other processes hold a part: all that hold one must call this alike."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        mesh = x.sharding.mesh  # pyright: ignore[reportAttributeAccessIssue]
        return jax.jit(lambda x: x, out_shardings=replicated(mesh))(x)

    return jax.device_get(jax.tree.map(whole, tree))


def whole_axes(specs: Any, mesh: Mesh) -> tuple[str, ...]:
    """Logical axes that this mesh would split but does not divide, sorted; they stay whole on every device."""
    whole = set()
    for spec in jax.tree.leaves(specs):
        spec_of = partition(spec.axes, spec.shape, mesh)
        whole |= {n for n, entry in zip(spec.axes, spec_of, strict=True) if mesh_axes(n, mesh) and entry is None}
    return tuple(sorted(whole))


def ambient_mesh() -> Any | None:
    """The mesh set by `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def ways(name: str) -> int:
    """Into how many parts the ambient mesh splits a logical axis."""
    mesh = ambient_mesh()
    return 1 if mesh is None else _ways(mesh_axes(name, mesh), mesh)


def _ways(axes: tuple[str, ...], mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def constrain(x: Array, *axes: str | None) -> Array:
    """`x` with its logical axes placed on the ambient mesh; without a mesh, `x`."""
    mesh = ambient_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def constrain_cache(tree: Any) -> Any:
    """Cache arrays placed by their rank (see CACHE_AXES)."""
    return jax.tree.map(lambda x: constrain(x, *CACHE_AXES[x.ndim]), tree)


def over_heads(function: Callable[..., Any], *args: Any) -> Any:
    """Apply a function whose work is independent per sequence and KV head, each device on its own part.

    Arguments and results are pytrees of cache arrays. Under a mesh this is a shard_map: loops over heads and, later,
    Pallas calls must not be left to the partitioner, which would gather what they index. Scalars per sequence (rank
    1) are computed alike by every device that holds heads of the row.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return function(*args)

    def specs(tree: Any) -> Any:
        return jax.tree.map(lambda x: partition(CACHE_AXES[x.ndim], x.shape, mesh), tree)

    out = jax.eval_shape(function, *args)
    return jax.shard_map(function, mesh=mesh, in_specs=specs(args), out_specs=specs(out), check_vma=False)(*args)
