"""The one description of a decoder that every model family translates its published configuration into."""

from dataclasses import dataclass, field
from typing import Any

from clusterkv_jax.errors import check_fields, is_count, is_number

ACTIVATIONS = ("silu", "relu", "gelu", "gelu_tanh")
NORMS = ("rms", "layer")


@dataclass(frozen=True)
class LinearScaling:
    """Position interpolation (Chen et al., 2023): every rotary frequency divided by `factor`."""

    factor: float

    def __post_init__(self):
        check_fields(self, ("factor", is_number(self.factor) and self.factor > 0, "a number above 0"))


@dataclass(frozen=True)
class Llama3Scaling:
    """Llama 3.1's scaling: long wavelengths divided by `factor`, short ones kept, a linear blend between.

    The bounds are `original_max_positions / low_freq_factor` and `original_max_positions / high_freq_factor` positions.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int

    def __post_init__(self):
        low, high = self.low_freq_factor, self.high_freq_factor
        check_fields(
            self,
            ("factor", is_number(self.factor) and self.factor > 0, "a number above 0"),
            ("low_freq_factor", is_number(low) and low > 0, "a number above 0"),
            ("high_freq_factor", is_number(high) and high > low, f"a number above low_freq_factor = {low}"),
            ("original_max_positions", is_count(self.original_max_positions, 1), "a whole number of at least 1"),
        )


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` of the head's dimensions.

    `interleaved` rotates the pairs (0, 1), (2, 3), ...; otherwise the pairs (i, i + dim / 2).
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: LinearScaling | Llama3Scaling | None = None

    def __post_init__(self):
        check_fields(self, ("theta", is_number(self.theta) and self.theta > 0, "a number above 0"))


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a decoder's parameters and arithmetic; hashable, so static under jit.

    `rope` None means learned absolute positions, whose table starts with `learned_position_offset` unused rows.
    `dtype` is the name of the published weights' type; what a model computes in is the type of its parameters.
    `weights` is the fingerprint of the parameters that `load` read, None where there are none; saved caches carry it.
    `decoder` is of layers that were written elsewhere (`nnx`): its methods stand in for functions of `transformer`.
    Raises ValueError where a number is impossible, sizes contradict each other, or a name is unknown.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_positions: int
    rope: Rope | None
    norm: str = "rms"
    norm_eps: float = 1e-5
    activation: str = "silu"
    gated_mlp: bool = True
    learned_position_offset: int = 0
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    tie_embeddings: bool = False
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: str = "float32"
    # Two models that differ in it alone share their programs.
    weights: str | None = field(default=None, compare=False)
    decoder: Any = None

    def __post_init__(self):
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_fields(
            self,
            *(
                (name, is_count(getattr(self, name), 1), "a whole number of at least 1")
                for name in (*counts, "head_dim", "max_positions")
            ),
            ("norm_eps", is_number(self.norm_eps) and self.norm_eps > 0, "a number above 0"),
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                "every KV head serves an equal group of query heads."
            )
        if self.rope is not None and (self.rope.dim % 2 or not 0 < self.rope.dim <= self.head_dim):
            raise ValueError(f"rope.dim = {self.rope.dim} must be even and in 2..head_dim = {self.head_dim}.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}.")
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not supported; allowed: {', '.join(NORMS)}.")
