"""Where kernels take few tokens on a GPU: through a decoder's norms, projections and experts, and its heads through
rotations.

What they cannot take is left to XLA.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from clusterkv_jax.blocks.rope import cosines_and_sines
from clusterkv_jax.kernels.expert_products import expert_products
from clusterkv_jax.kernels.head_products import head_products
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.kernels.row_products import row_products
from clusterkv_jax.kernels.row_products.reference import GATES
from clusterkv_jax.kernels.turned_heads import turned_heads
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.runtime.dispatch import platform
from clusterkv_jax.runtime.sharding import ambient_mesh, apart, devices_along, on_one_device, ways

Params = dict[str, Any]
# Sizes are multiples of the first, heads of the second: what fills no block is XLA's.
WHOLE, WHOLE_HEAD = 64, 32
SIXTEEN_BITS = (jnp.bfloat16, jnp.float16)
MOST = 16  # tokens: beyond, launches are not what takes time
TOKENS = ("batch", None, None)


def few(x: Float[Array, "B T ..."]) -> bool:
    """Whether these are few tokens, and on one GPU."""
    return platform() == "gpu" and x.shape[0] * x.shape[1] <= MOST and on_one_device()


def normalises(config: ModelConfig, hidden: Float[Array, "B T M"]) -> bool:
    """Whether a kernel normalises what enters a block: one token, since XLA takes one launch for several itself."""
    has_norm = config.norm == "rms" and config.norm_place != "after"
    return platform() == "gpu" and has_norm and hidden.shape[0] * hidden.shape[1] == 1


def normed(
    weights: Params, config: ModelConfig, hidden: Float[Array, "1 1 M"], router: Float[Array, "E M"] | None = None
) -> tuple[Float[Array, "1 1 M"], Float[Array, "1 1 E"] | None]:
    """The norm of a token's hidden state; with a router its logits too, float32, on one device."""
    run: Any = partial(normed_rows, eps=config.norm_eps, offset=config.norm_offset)
    if not on_one_device():
        whole = PartitionSpec()
        run = jax.shard_map(run, mesh=ambient_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
    x, logits = run(hidden[0], weights["scale"], router)
    return x[None], None if logits is None else logits[None]


def multiplies(config: ModelConfig, x: Float[Array, "B T M"]) -> bool:
    """Whether kernels take these tokens through a layer's projections: few ones of each device, of 16 bits."""
    sizes = config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size // ways("mlp")
    whole = all(size % WHOLE == 0 for size in sizes) and config.head_dim % WHOLE_HEAD == 0
    few = x.shape[0] * x.shape[1] <= MOST * math.gcd(x.shape[0], ways("batch"))
    return platform() == "gpu" and whole and few and x.dtype in SIXTEEN_BITS


def adds(config: ModelConfig, x: Float[Array, "B T M"]) -> bool:
    """Whether these products are added to the hidden states on the way: plainly, by each device to an exact share."""
    plain = config.norm_place == "before" and config.residual_scale == 1 and not config.output_bias
    exact = all(ways(name).bit_count() == 1 for name in ("heads", "mlp"))
    return plain and not config.mlp_bias and exact and multiplies(config, x)


def heads(
    weights: Params,
    config: ModelConfig,
    x: Float[Array, "B T M"],
    positions: Int[Array, "B T"],
    norm: Params | None,
    surrogate: Params | None,
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"], Float[Array, "B T K D"], Float[Array, "B T K"] | None]:
    """Queries, keys and values with their biases, turned if `turns_along` says so; of one token after a norm.

    With a surrogate what it says of the token, float32, if it `scores`.
    """
    cos, sin = cosines_and_sines(positions, config.rope) if config.rope and turns_along(config) else (None, None)
    options: Any = {"eps": config.norm_eps, "offset": config.norm_offset}

    def run(x: Array, *operands: Any) -> tuple[Array, ...]:
        q, k, v, *biases, cos, sin, scale, columns, bias = operands
        own = None if biases[0] is None else tuple(biases)
        angles = None if cos is None else (_rows(cos), _rows(sin))
        scoring = None if columns is None else (columns.T, bias)
        results = head_products(_rows(x), (q, k, v), own, angles, scale, scoring, **options)
        return tuple(y.reshape(*x.shape[:2], *y.shape[1:]) for y in results if y is not None)

    names = [("q", "heads"), ("k", "kv_heads"), ("v", "kv_heads")]
    operands = [(x, TOKENS), *((weights[name], (axis, None, None)) for name, axis in names)]
    operands += [(weights.get(f"{name}_bias"), (axis, None)) for name, axis in names]
    operands += [(angle, ("batch", None, None, None)) for angle in (cos, sin)]
    operands += [(None if norm is None else norm["scale"], (None,))]
    for name, axes in (("weights", (None, None)), ("bias", (None,))):
        operands += [(None if surrogate is None else surrogate[name].astype(jnp.float32), axes)]
    results = [((*x.shape[:2], *weights[name].shape[:2]), ("batch", None, axis, None)) for name, axis in names]
    q, k, v, *scores = apart(run, operands, results)
    return q, k, v, scores[0] if scores else None


def scores(config: ModelConfig, surrogate: Params, hidden: Float[Array, "B T M"]) -> bool:
    """Whether a layer's surrogate says something of a token along with its heads: a linear one, on one device."""
    linear = config.decoder is None and "inner_weights" not in surrogate
    return linear and few(hidden) and normalises(config, hidden) and multiplies(config, hidden)


def turns_along(config: ModelConfig) -> bool:
    """Whether the projections of heads are turned on the way: by halves, and as they are."""
    rope = config.rope
    return rope is not None and rope.dim == config.head_dim and not rope.interleaved and not config.qk_norm


def projected(
    x: Float[Array, "B T *inner"],
    weights: Float[Array, "*inner M"],
    split: str,
    onto: Float[Array, "B T M"] | None = None,
) -> Float[Array, "B T M"]:
    """Heads, or the inner states of an MLP, back in the model's width; devices split them along the axis `split`.

    `onto` is added to it, by each device its share.
    """
    inner = (split, *(None,) * (x.ndim - 3))
    share = 1 / devices_along(("batch", None, *inner), x.shape, 2)

    def run(x: Array, weights: Array, onto: Array | None) -> tuple[Array, ...]:
        wide = weights.reshape(-1, weights.shape[-1])
        y = row_products(_rows(x), wide, None if onto is None else _rows(onto), share=share)
        return (y.reshape(*x.shape[:2], -1),)

    operands = [(x, ("batch", None, *inner)), (weights, (*inner, None)), (onto, TOKENS)]
    return apart(run, operands, [((*x.shape[:2], weights.shape[-1]), TOKENS)], summed=2)[0]


def gates(config: ModelConfig) -> bool:
    """Whether an MLP's gate is one of the kernel."""
    return config.gated_mlp and not config.mlp_bias and config.activation in GATES


def gated(weights: Params, config: ModelConfig, x: Float[Array, "B T M"]) -> Float[Array, "B T F"]:
    """The inner states of a gated MLP."""

    def run(x: Array, gate: Array, up: Array) -> tuple[Array, ...]:
        return (row_products(_rows(x), gate, None, up, gate=config.activation).reshape(*x.shape[:2], -1),)

    operands = [(x, TOKENS), *((weights[name], (None, "mlp")) for name in ("gate", "up"))]
    result = (*x.shape[:2], weights["up"].shape[1]), ("batch", None, "mlp")
    return apart(run, operands, [result])[0]


def _rows(x: Float[Array, "B T *rest"]) -> Float[Array, "n width"]:
    """The tokens of all sequences, their numbers in one dimension."""
    return x.reshape(x.shape[0] * x.shape[1], -1)


def turns(config: ModelConfig, q: Float[Array, "B T ..."]) -> bool:
    """Whether a kernel normalises and turns these heads: whole ones, each by its own norm."""
    rope, own_norm = config.rope, config.qk_norm and not config.qk_norm_whole and not config.qkv_bias
    whole = rope is not None and rope.dim == config.head_dim and not rope.interleaved
    return own_norm and whole and config.norm == "rms" and few(q)


def turned(
    weights: Params,
    config: ModelConfig,
    q: Float[Array, "B T H D"],
    k: Float[Array, "B T K D"],
    positions: Int[Array, "B T"],
) -> tuple[Float[Array, "B T H D"], Float[Array, "B T K D"]]:
    """Queries and keys normalised by heads and turned by their positions."""
    assert config.rope is not None
    cos, sin = (x.reshape(-1, x.shape[-1]) for x in cosines_and_sines(positions, config.rope))
    rows = [x.reshape(-1, *x.shape[2:]) for x in (q, k)]
    operands = rows[0], rows[1], weights["q_norm"], weights["k_norm"], cos, sin
    turned_q, turned_k = turned_heads(*operands, eps=config.norm_eps, offset=config.norm_offset)
    return turned_q.reshape(q.shape), turned_k.reshape(k.shape)


def mixes(config: ModelConfig, experts: Experts, x: Float[Array, "B T M"], weights: Params) -> bool:
    """Whether a kernel takes these tokens through their experts: gated by silu, without biases."""
    plain = config.activation == "silu" and experts.clamp is None and not experts.bias
    return plain and few(x) and x.dtype == weights["up"].dtype == jnp.bfloat16


def mixture(
    weights: Params, experts: Experts, x: Float[Array, "B T M"], logits: Float[Array, "B T E"]
) -> Float[Array, "B T M"]:
    """The outputs of each token's experts, added up by the router's shares."""
    rows = _rows(x), _rows(logits)
    route = {"per_token": experts.per_token, "normalize": experts.normalize}
    products = weights["gate"], weights["up"], weights["down"]
    return expert_products(*rows, *products, **route).reshape(x.shape)
