"""Where kernels take few tokens on a GPU: through a decoder's norms and experts, and its heads through rotations.

What they cannot take is left to XLA, as are most products with weights that every token meets: all but a token's
output projection and a router's logits.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from clusterkv_jax.kernels.dispatch import platform
from clusterkv_jax.kernels.expert_products import expert_products
from clusterkv_jax.kernels.normed_rows import normed_rows
from clusterkv_jax.kernels.split_product import split_product
from clusterkv_jax.kernels.turned_heads import turned_heads
from clusterkv_jax.models.config import Experts, ModelConfig
from clusterkv_jax.models.rope import cosines_and_sines
from clusterkv_jax.sharding import ambient_mesh, on_one_device

Params = dict[str, Any]
PARTS = 4  # of an output projection
WHOLE = 64  # inputs of a part, and outputs, are a multiple of it: what fills no block of the kernel is XLA's
MOST = 16  # tokens: beyond, launches are not what takes time


def few(x: Float[Array, "B T ..."]) -> bool:
    """Whether these are few tokens, and on one GPU."""
    return platform() == "gpu" and x.shape[0] * x.shape[1] <= MOST and on_one_device()


def normalises(config: ModelConfig, hidden: Float[Array, "B T M"]) -> bool:
    """Whether a kernel normalises what enters a block: one token, since XLA takes one launch for several itself."""
    has_norm = config.norm == "rms" and config.norm_place != "after"
    return platform() == "gpu" and has_norm and hidden.shape[0] * hidden.shape[1] == 1


def normed(
    weights: Params,
    config: ModelConfig,
    hidden: Float[Array, "1 1 M"],
    added: Float[Array, "parts _ M"] | None,
    rows: int = 1,
    router: Float[Array, "E M"] | None = None,
) -> tuple[Float[Array, "1 1 M"], Float[Array, "1 rows M"], Float[Array, "1 1 E"] | None]:
    """A token's hidden state with the parts that a block adds to it, and the norm of that, rows of zeros behind it.

    With a router its logits too, float32; on one device.
    """
    options = {"eps": config.norm_eps, "offset": config.norm_offset, "rows": rows}
    run: Any = partial(normed_rows, **options)
    if not on_one_device():
        whole = PartitionSpec()
        run = jax.shard_map(run, mesh=ambient_mesh(), in_specs=whole, out_specs=whole, check_vma=False)
    total, x, logits = run(hidden[0], added, weights["scale"], router)
    return total[None], x[None], None if logits is None else logits[None]


def projects(config: ModelConfig, hidden: Float[Array, "B T M"]) -> bool:
    """Whether a kernel takes a token's heads through their output projection, whose sum the norm behind it makes."""
    plain = config.norm_place == "before" and config.residual_scale == 1 and not config.output_bias
    whole = config.num_heads * config.head_dim % (PARTS * WHOLE) == 0 and hidden.shape[-1] % WHOLE == 0
    return plain and whole and on_one_device() and normalises(config, hidden)


def projected(attended: Float[Array, "1 1 H D"], weights: Float[Array, "H D M"]) -> Float[Array, "parts 1 M"]:
    """The output projection of a token's heads, float32, in parts to be added up."""
    return split_product(attended.reshape(-1), weights.reshape(-1, weights.shape[-1]), parts=PARTS)[:, None]


def turns(config: ModelConfig, q: Float[Array, "B T H D"]) -> bool:
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
    tokens = math.prod(x.shape[:2])
    rows = x.reshape(tokens, -1), logits.reshape(tokens, -1)
    route = {"per_token": experts.per_token, "normalize": experts.normalize}
    products = weights["gate"], weights["up"], weights["down"]
    return expert_products(*rows, *products, **route).reshape(x.shape)
