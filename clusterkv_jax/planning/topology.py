"""Chips by name: what they hold, how fast they read it, how fast they tell each other."""

import math
import re
from dataclasses import dataclass

from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.sharding import mesh_sizes

GIB, GB = 2**30, 10**9


@dataclass(frozen=True)
class Chip:
    """One chip.

    Attributes:
        name: as topologies call it.
        platform: "tpu" or "gpu".
        hbm: bytes that programs may use.
        hbm_bandwidth: bytes per second.
        link_bandwidth: bytes per second that a chip sends over all of its links.
    """

    name: str
    platform: str
    hbm: float
    hbm_bandwidth: float
    link_bandwidth: float


# HBM of TPUs: what the TPU compiler grants a program ("exceeds available HBM (15.75G)"), a little less than the 16, 95
# and 32 GB of the chip. Bandwidths: docs.cloud.google.com/tpu/docs/v5e, v5p and v6e; of links one way, which is half of
# what the pages call bidirectional (400, 1200 and 800 GB/s).
# HBM of GPUs: memory.total of nvidia-smi. Bandwidths: NVIDIA's data sheets of the SXM boards; NVLink of 900 GB/s counts
# both ways.
CHIPS = {
    chip.name: chip
    for chip in (
        Chip("v5e", "tpu", 15.75 * GIB, 819 * GB, 200 * GB),
        Chip("v5p", "tpu", 95.74 * GIB, 2765 * GB, 600 * GB),
        Chip("v6e", "tpu", 31.25 * GIB, 1600 * GB, 400 * GB),
        Chip("h100", "gpu", 79.6 * GIB, 3350 * GB, 450 * GB),
        Chip("h200", "gpu", 140.4 * GIB, 4800 * GB, 450 * GB),
    )
}


@dataclass(frozen=True)
class Topology:
    """Chips of one kind: "v5e:4x4" are 16."""

    name: str
    chip: Chip
    count: int


def parse_topology(text: str) -> Topology:
    """ "v5e:4x4", "v5p:2x2x2", "h200:8".

    Raises ValueError that names what is allowed.
    """
    kind, _, size = text.partition(":")
    chip = CHIPS.get(kind)
    gpu = chip is not None and chip.platform == "gpu"
    number = "[1-9][0-9]{0,2}"
    if chip is None or not re.fullmatch(number if gpu else f"{number}(x{number}){{1,2}}", size):
        raise ValueError(
            f"--topology {text!r} is unknown; allowed are {', '.join(CHIPS)}, with a TPU's sides as in v5e:4x4 or "
            "v5p:2x2x2, or a number of GPUs as in h200:8."
        )
    return Topology(text, chip, math.prod(map(int, size.split("x"))))


def model_ways(config: ModelConfig, count: int, batch: int) -> int:
    """Over how many of `count` chips a model is best split: as many as divide both kinds of heads, and more where the
    batch cannot be divided by the rest; those share the slots of a head.
    """
    heads = math.gcd(config.num_heads, config.num_kv_heads)
    fewest = max(ways for ways in range(1, count + 1) if count % ways == 0 and heads % ways == 0)
    shared = math.gcd(config.num_heads, *config.mlp_sizes)
    more = (ways for ways in range(fewest, count + 1) if count % ways == 0 and shared % ways == 0)
    return next((ways for ways in more if batch % (count // ways) == 0), fewest)


def choose_mesh(config: ModelConfig, count: int, batch: int, text: str | None) -> tuple[dict[str, int], str]:
    """The sizes of a mesh over `count` chips, and it as a text; by default `model_ways`, the rest for data.

    Raises ValueError for a text that is no mesh, or one of another number of chips.
    """
    if text is None:
        ways = model_ways(config, count, batch)
        text = f"data={count // ways},model={ways}" if count > ways else f"model={ways}"
    sizes = mesh_sizes(text)
    if math.prod(sizes.values()) != count:
        raise ValueError(f"--mesh {text} is for {math.prod(sizes.values())} chips, and the topology has {count}.")
    return sizes, text
