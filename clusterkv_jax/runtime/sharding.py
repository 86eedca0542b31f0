"""From logical axes to a mesh of up to three kinds of axes.

    data       sequences of a batch; every axis that is neither of the others
    sequence   tokens of a prompt while it is read, then KV heads, or slots of a cache
    model      tensor parallelism: heads, MLP and vocabulary; the last axis of a mesh, "sequence" and "slots" aside

Parameters declare their logical axes in `models.parameters.abstract`, caches in `CACHE_AXES`; the rules here are the
only place that knows mesh axes. A dimension that its mesh axes do not divide stays whole, and `whole_axes` names what
stayed so. Devices that are left over by too few KV heads share the slots of each head: `fitted_mesh` gives such devices
an axis of their own, "slots".
"""

import contextlib
import functools
import math
import re
from collections.abc import Callable, Sequence
from operator import getitem
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

SEQUENCE, SLOTS = "sequence", "slots"
# Logical axes that are split over the mesh's model axis, and over the devices that KV heads leave.
TENSOR_PARALLEL = ("heads", "mlp", "vocab")

CACHE_AXES: dict[int, tuple[str | None, ...]] = {
    4: ("batch", "kv_heads", "slots", None),  # keys, values [B, K, C, D]
    3: ("batch", "kv_heads", "slots"),  # degree, positions [B, K, C]
    2: ("batch", "kv_heads"),  # length [B, K]
    1: ("batch",),  # state and position [B]
}
# Of heads that share pages [B, P, S, D], whose devices share them too.
PAGE_AXES = {
    rank: tuple({"kv_heads": "pages", "slots": None}.get(name or "", name) for name in axes) if rank > 2 else axes
    for rank, axes in CACHE_AXES.items()
}
# The same with every head's slots on one device.
HEAD_AXES = {rank: tuple(None if name == "slots" else name for name in axes) for rank, axes in CACHE_AXES.items()}

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
    # A 4x4 slice as 2x8: `jax.make_mesh` refuses to split a side of the slice over two axes on most TPUs.
    laid = mesh_utils.create_device_mesh(shape, devices=devices, allow_split_physical_axes=True)
    return Mesh(laid, names, axis_types=(AxisType.Auto,) * len(names))


def auto_mesh(mesh: Mesh) -> Mesh:
    """The same mesh with automatic axes: the compiler places the collectives."""
    return Mesh(mesh.devices, mesh.axis_names, axis_types=(AxisType.Auto,) * len(mesh.axis_names))


def fitted_mesh(mesh: Mesh, kv_heads: int) -> Mesh:
    """The mesh with its model axis split into as many devices as divide the KV heads, and "slots" for the others."""
    model = _model_axis(mesh)
    size = mesh.shape[model]
    split = math.gcd(size, kv_heads)
    if split in (1, size) or SLOTS in mesh.axis_names:
        return mesh
    place = mesh.axis_names.index(model)
    names = (*mesh.axis_names[: place + 1], SLOTS, *mesh.axis_names[place + 1 :])
    shape = mesh.devices.shape
    devices = mesh.devices.reshape(*shape[:place], split, size // split, *shape[place + 1 :])
    return Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))


def on_mesh(mesh: Mesh | None, kv_heads: int) -> contextlib.AbstractContextManager[Any]:
    """Makes a model's mesh, as it fits its KV heads, the ambient one; without a mesh, nothing."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(fitted_mesh(mesh, kv_heads))


def mesh_axes(name: str | None, mesh: Any) -> tuple[str, ...]:
    """Mesh axes that a logical axis may be split over, the first first."""
    model = _model_axis(mesh)
    if name == "batch":
        return tuple(axis for axis in mesh.axis_names if axis not in (SEQUENCE, SLOTS, model))
    wanted = {"tokens": (SEQUENCE,), "kv_heads": (model, SEQUENCE), "slots": (SEQUENCE, SLOTS, model)}
    wanted |= {"pages": (model, SEQUENCE, SLOTS)}
    wanted |= dict.fromkeys(TENSOR_PARALLEL, (model, SLOTS))
    return tuple(axis for axis in wanted.get(name or "", ()) if axis in mesh.axis_names)


def _model_axis(mesh: Any) -> str:
    for axis in reversed(mesh.axis_names):
        if axis not in (SEQUENCE, SLOTS):
            return axis
    raise ValueError(f"A mesh needs an axis beside {SEQUENCE!r} and {SLOTS!r}, got {mesh.axis_names}.")


def partition(axes: tuple[str | None, ...], shape: tuple[int, ...], mesh: Any) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes and this shape.

    Slots take what is left over by the dimensions before them, and so do KV heads of what tokens take.

    Raises ValueError if two other dimensions would be split over the same mesh axis.
    """
    entries: list[tuple[str, ...]] = []
    for name, size in zip(axes, shape, strict=True):
        before = {axis for entry in entries for axis in entry}
        split: tuple[str, ...] = ()
        for axis in mesh_axes(name, mesh):
            if size % _ways((*split, axis), mesh) or (axis in before and (axis == SEQUENCE or name == "slots")):
                continue
            if axis in before:
                raise ValueError(
                    f"Logical axes {axes} would split two dimensions over one axis of the mesh {mesh.axis_names}."
                )
            split = (*split, axis)
        entries.append(split)
    return PartitionSpec(*(entry[0] if len(entry) == 1 else entry or None for entry in entries))


def param_shardings(specs: Any, mesh: Mesh | AbstractMesh) -> Any:
    """A NamedSharding for every TensorSpec of `models.parameters.abstract(config)`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, partition(spec.axes, spec.shape, mesh)), specs)


def replicated(mesh: Mesh) -> NamedSharding:
    """Whole on every device."""
    return NamedSharding(mesh, PartitionSpec())


def fetch(tree: Any) -> Any:
    """Arrays as NumPy's, those too of which other processes hold a part: all that hold one must call this alike."""

    def whole(x: Any) -> Any:
        if not isinstance(x, jax.Array) or x.is_fully_addressable or x.is_fully_replicated:
            return x
        return _gather(replicated(x.sharding.mesh))(x)  # pyright: ignore[reportAttributeAccessIssue]

    return jax.device_get(jax.tree.map(whole, tree))


@functools.cache
def _gather(sharding: NamedSharding) -> Any:
    """One compiled program for all arrays of a shape: batches ask again and again."""
    return jax.jit(lambda x: x, out_shardings=sharding)


def whole_axes(specs: Any, mesh: Mesh) -> tuple[str, ...]:
    """Logical axes that this mesh would split but does not divide, sorted; they stay whole on every device."""
    whole = set()
    for spec in jax.tree.leaves(specs):
        spec_of = partition(spec.axes, spec.shape, mesh)
        whole |= {n for n, entry in zip(spec.axes, spec_of, strict=True) if mesh_axes(n, mesh) and entry is None}
    return tuple(sorted(whole))


def check_divides(specs: Any, mesh: Mesh) -> None:
    """Raise ValueError unless the MLP, most of a model, is split over all devices of the mesh's model axis."""
    parts = _ways(mesh_axes("mlp", mesh), mesh)
    sizes = {
        size
        for spec in jax.tree.leaves(specs)
        for name, size in zip(spec.axes, spec.shape, strict=True)
        if name == "mlp"
    }
    for size in sorted(sizes):
        if size % parts:
            raise ValueError(
                f"A model axis of {parts} devices cannot share the {size} hidden units of the MLP equally."
            )


def ambient_mesh() -> Any | None:
    """The mesh set by `jax.set_mesh`, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.empty else mesh


def on_one_device() -> bool:
    """Whether the ambient mesh, if there is one, has a single device."""
    mesh = ambient_mesh()
    return mesh is None or mesh.size == 1


def ways(name: str) -> int:
    """Into how many parts the ambient mesh may split a logical axis."""
    mesh = ambient_mesh()
    return 1 if mesh is None else _ways(mesh_axes(name, mesh), mesh)


def token_ways(tokens: int) -> int:
    """Into how many parts the ambient mesh splits a prompt of this many tokens.

    Raises ValueError if each device cannot have two equal halves of its own.
    """
    parts = ways("tokens")
    if parts > 1 and tokens % (2 * parts):
        raise ValueError(
            f"A mesh of sequence={parts} splits prompts into {2 * parts} equal parts, and {tokens} tokens, padding "
            "included, cannot be."
        )
    return parts


def slot_ways(heads: int) -> int:
    """Into how many parts the ambient mesh may split the slots of this many KV heads."""
    mesh = ambient_mesh()
    if mesh is None:
        return 1
    most = _ways(mesh_axes("slots", mesh), mesh)
    return _ways(_axes(partition(("kv_heads", "slots"), (heads, most), mesh)[1]), mesh)


def _ways(axes: tuple[str, ...], mesh: Any) -> int:
    return math.prod(mesh.shape[axis] for axis in axes)


def _axes(entry: Any) -> tuple[str, ...]:
    """An entry of a PartitionSpec as mesh axes."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def constrain(x: Array, *axes: str | None) -> Array:
    """`x` with its logical axes placed on the ambient mesh; without a mesh, `x`."""
    mesh = ambient_mesh()
    return x if mesh is None else jax.lax.with_sharding_constraint(x, partition(axes, x.shape, mesh))


def constrain_batch(x: Array) -> Array:
    """`x`, [B, ...], with its sequences placed on the ambient mesh, and its other dimensions where they come to be."""
    mesh = ambient_mesh()
    if mesh is None:
        return x
    others = (PartitionSpec.UNCONSTRAINED,) * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*partition(("batch",), x.shape[:1], mesh), *others))


def constrain_cache(tree: Any, *, apart: bool = False, paged: bool = False) -> Any:
    """Cache arrays placed by their rank: heads on their devices, and `apart` their slots too (see CACHE_AXES); or the
    pages that they share.
    """
    axes = PAGE_AXES if paged else CACHE_AXES if apart else HEAD_AXES
    return jax.tree.map(lambda x: constrain(x, *axes[x.ndim]), tree)


def over_heads(function: Callable[..., Any], *args: Any) -> Any:
    """Apply a function whose work is independent per sequence and KV head, each device on its own part.

    Arguments and results are pytrees of cache arrays. Under a mesh this is a shard_map: loops over heads and, later,
    Pallas calls must not be left to the partitioner, which would gather what they index. Scalars per sequence (rank
    1) are computed alike by every device that holds heads of the row.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return function(*args)
    # Query heads, several to a KV head, go where those are, though more devices might divide them.
    counts = [x.shape[1] for x in jax.tree.leaves(args) if x.ndim > 1 and x.shape[1] > 1]
    heads = min(counts, default=1)

    def place(x: Any) -> PartitionSpec:
        if x.ndim == 1:
            return partition(HEAD_AXES[1], x.shape, mesh)
        split = 1 if x.shape[1] % heads else heads
        return partition(HEAD_AXES[x.ndim], (x.shape[0], split, *x.shape[2:]), mesh)

    def specs(tree: Any) -> Any:
        return jax.tree.map(place, tree)

    apart = functools.partial(jax.shard_map, function, mesh=mesh, check_vma=False)
    out = jax.eval_shape(apart(in_specs=PartitionSpec(), out_specs=PartitionSpec()), *args)
    return apart(in_specs=specs(args), out_specs=specs(out))(*args)


def over_slots(function: Callable[..., Any], cache: Any, *others: Any) -> Any:
    """As `over_heads` of a function that gets a device's slots of the cache alone, and how many stand before them.

    `function(before, cache, *others)` returns a cache of the same kind, or what stands beside it too. Arrays of rank 3
    and 4 have slots there; those of `others` have none: heads, or a dimension of 1, come second.
    """
    mesh = ambient_mesh()
    if mesh is None:
        return function(0, cache, *others)
    held = jax.tree.map(lambda x: partition(CACHE_AXES[x.ndim], x.shape, mesh), cache)
    beside = jax.tree.map(lambda x: partition(HEAD_AXES[x.ndim], x.shape, mesh), others)

    def local(cache: Any, *others: Any) -> Any:
        return function(slots_before(held, cache), cache, *others)

    return jax.shard_map(local, mesh=mesh, in_specs=(held, *beside), out_specs=held, check_vma=False)(cache, *others)


def apart(
    function: Callable[..., tuple[Array, ...]],
    operands: Sequence[tuple[Array | None, tuple[str | None, ...]]],
    results: Sequence[tuple[tuple[int, ...], tuple[str | None, ...]]],
    summed: int | None = None,
) -> tuple[Array, ...]:
    """`function` of arrays, each device on its own part of them.

    Operands are arrays, or None, and their logical axes, results shapes and theirs. Results are added up over devices
    that split dimension `summed` of the first operand.
    """
    mesh, arrays = ambient_mesh(), [x for x, _ in operands]
    if mesh is None or mesh.size == 1:
        return function(*arrays)
    given = tuple(None if x is None else partition(names, x.shape, mesh) for x, names in operands)
    owners = () if summed is None else _axes(given[0][summed])  # pyright: ignore[reportOptionalSubscript]

    def local(*arrays: Any) -> tuple[Array, ...]:
        parts = function(*arrays)
        return jax.lax.psum(parts, owners) if owners else parts

    out = tuple(partition(names, shape, mesh) for shape, names in results)
    return jax.shard_map(local, mesh=mesh, in_specs=given, out_specs=out, check_vma=False)(*arrays)


def devices_along(names: tuple[str | None, ...], shape: tuple[int, ...], dimension: int) -> int:
    """Among how many devices the ambient mesh splits a dimension of an array with these logical axes."""
    mesh = ambient_mesh()
    if mesh is None:
        return 1
    return math.prod(mesh.shape[axis] for axis in _axes(partition(names, shape, mesh)[dimension]))


def take_rows(table: Any, ids: Array, take: Callable[[Any, Array], Array] = getitem, specs: Any = None) -> Array:
    """`table[ids]` of a table [V, M] whose rows devices may share, and ids [B, T]: each device looks up its own.

    Left to the partitioner, a GPU would gather the whole table first. A table that is no array has `take(table, ids)`,
    and the PartitionSpecs of its arrays.
    """
    mesh = ambient_mesh()
    owners = () if mesh is None else _axes(partition(("vocab", None), table.shape, mesh)[0])
    if not owners:
        return take(table, ids)
    count = table.shape[0] // _ways(owners, mesh)

    def local(table: Any, ids: Array) -> Array:
        at = ids - jax.lax.axis_index(owners) * count
        mine = (at >= 0) & (at < count)
        rows = take(table, jnp.clip(at, 0, count - 1))
        return jax.lax.psum(jnp.where(mine[..., None], rows, jnp.zeros((), rows.dtype)), owners)

    where = partition(("batch", "tokens"), ids.shape, mesh)
    specs = PartitionSpec(owners) if specs is None else specs, where
    return jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=where, check_vma=False)(table, ids)


def first_greatest(rows: Float[Array, "B V"]) -> tuple[Int[Array, " B"], Bool[Array, " B"]]:
    """Where the greatest number of each row stands first, and whether all of a row are finite.

    Devices may share the columns: each looks through its own, and one all-reduce brings together what they found. Left
    to the partitioner it would be three collectives.
    """
    mesh = ambient_mesh()
    held = PartitionSpec(None, None) if on_one_device() else partition(("batch", "vocab"), rows.shape, mesh)
    owners = _axes(held[1])
    if not owners:
        return jnp.argmax(rows, axis=-1).astype(jnp.int32), jnp.isfinite(rows).all(axis=-1)

    def local(mine: Array) -> tuple[Array, Array]:
        number, count = jax.lax.axis_index(owners), jax.lax.axis_size(owners)
        place = jnp.argmax(mine, axis=-1) + number * mine.shape[-1]
        finite = jnp.isfinite(mine).all(axis=-1)
        # Float32 numbers are exact up to 16 million columns.
        found = jnp.stack([jnp.max(mine, axis=-1), place.astype(jnp.float32), finite.astype(jnp.float32)])
        own_place = jnp.arange(count, dtype=jnp.int32)[:, None, None] == number
        values, places, good = jnp.moveaxis(jax.lax.psum(jnp.where(own_place, found[None], 0.0), owners), 1, 0)
        best = jnp.argmax(values, axis=0)[None]
        return jnp.take_along_axis(places, best, axis=0)[0].astype(jnp.int32), jnp.all(good > 0, axis=0)

    out = PartitionSpec(held[0]), PartitionSpec(held[0])
    return jax.shard_map(local, mesh=mesh, in_specs=held, out_specs=out, check_vma=False)(rows)


def slots_before(specs: Any, cache: Any) -> Any:
    """How many slots of a head stand on devices before this one; inside of a shard_map over these PartitionSpecs."""
    spec, rows = jax.tree.leaves(specs)[0], jax.tree.leaves(cache)[0]  # keys, stored as they may be
    axes = _axes(spec[2])
    return rows.shape[2] * jax.lax.axis_index(axes) if axes else jnp.int32(0)


def slot_axes(specs: Any) -> tuple[str, ...]:
    """The mesh axes over which the slots of a cache with these PartitionSpecs are split."""
    return _axes(specs.degree[2])
