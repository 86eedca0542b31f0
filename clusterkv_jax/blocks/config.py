"""The one description of a decoder that every model family translates its published configuration into."""

from dataclasses import dataclass, field, replace
from typing import Any

from clusterkv_jax.runtime.errors import check_fields, is_count, is_number

ACTIVATIONS = ("silu", "relu", "relu2", "gelu", "gelu_tanh", "quick_gelu", "mish")
NORMS = ("rms", "layer")
NORM_PLACES = ("before", "after", "both")


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
class LongScaling:
    """LongRoPE (Ding et al., 2024, arXiv:2402.13753): each frequency divided by its own factor.

    Published files have factors for short and for long texts; a cache holds keys of one kind, so a model has one kind.
    `attention_factor` lengthens the rotated queries and keys. A model of which no text is longer than
    `original_max_positions` may take the `short_factors` instead (`limited`).
    """

    factors: tuple[float, ...]
    attention_factor: float
    short_factors: tuple[float, ...] | None = None
    original_max_positions: int | None = None

    def __post_init__(self):
        above = all(is_number(factor) and factor > 0 for factor in self.factors)
        check_fields(
            self,
            ("factors", isinstance(self.factors, tuple) and above, "a tuple of numbers above 0"),
            _attention_factor(self.attention_factor),
        )


@dataclass(frozen=True)
class YarnScaling:
    """YaRN (Peng et al., 2023, arXiv:2309.00071): slow pairs divided by `factor`, fast ones kept, a blend between.

    A pair is slow with at most `beta_slow` turns in `original_max_positions`, fast with at least `beta_fast`; with
    `truncate` these bounds are whole pairs. `attention_factor` lengthens the rotated queries and keys.
    """

    factor: float
    original_max_positions: int
    attention_factor: float
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True

    def __post_init__(self):
        slow, fast = self.beta_slow, self.beta_fast
        check_fields(
            self,
            ("factor", is_number(self.factor) and self.factor > 0, "a number above 0"),
            ("original_max_positions", is_count(self.original_max_positions, 1), "a whole number of at least 1"),
            _attention_factor(self.attention_factor),
            ("beta_slow", is_number(slow) and slow > 0, "a number above 0"),
            ("beta_fast", is_number(fast) and fast > slow, f"a number above beta_slow = {slow}"),
        )


def _attention_factor(value: float) -> tuple[str, bool, str]:
    return "attention_factor", is_number(value) and value > 0, "a number above 0"


Scaling = LinearScaling | Llama3Scaling | LongScaling | YarnScaling


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding of the first `dim` of the head's dimensions.

    `interleaved` rotates the pairs (0, 1), (2, 3), ...; otherwise the pairs (i, i + dim / 2).
    """

    theta: float
    dim: int
    interleaved: bool = False
    scaling: Scaling | None = None

    def __post_init__(self):
        check_fields(self, ("theta", is_number(self.theta) and self.theta > 0, "a number above 0"))
        if isinstance(self.scaling, YarnScaling):
            check_fields(self, ("theta", self.theta > 1, "above 1 for YaRN"))
        if isinstance(self.scaling, LongScaling) and 2 * len(self.scaling.factors) != self.dim:
            raise ValueError(
                f"LongScaling has {len(self.scaling.factors)} factors; "
                f"{self.dim} rotated dimensions need {self.dim // 2}."
            )

    @property
    def magnitude(self) -> float:
        """How much longer rotated queries and keys become."""
        return self.scaling.attention_factor if isinstance(self.scaling, LongScaling | YarnScaling) else 1.0


@dataclass(frozen=True)
class QueryScaling:
    """Queries are longer the farther they stand: at position p by 1 + strength log(1 + floor((p + first) / length))."""

    strength: float
    length: int
    first: int = 0

    def __post_init__(self):
        check_fields(
            self,
            ("strength", is_number(self.strength) and self.strength >= 0, "a number of at least 0"),
            ("length", is_count(self.length, 1), "a whole number of at least 1"),
            ("first", is_count(self.first), "a whole number of at least 0"),
        )


@dataclass(frozen=True)
class ClampedSwiglu:
    """gpt-oss's gate of an expert: (u + 1) g sigmoid(gain g) of clamped g and u, the products with `gate` and `up`.

    Neither is above `limit`, and u not below -limit.
    """

    limit: float = 7.0
    gain: float = 1.702

    def __post_init__(self):
        check_fields(
            self,
            ("limit", is_number(self.limit) and self.limit > 0, "a number above 0"),
            ("gain", is_number(self.gain) and self.gain > 0, "a number above 0"),
        )


@dataclass(frozen=True)
class Experts:
    """What most layers have in place of one MLP: `count` experts of `intermediate_size` hidden units.

    A router chooses `per_token` of them for each token. `normalize` makes their shares add up to 1; otherwise they are
    the probabilities among all experts. With `sigmoid` each expert has a score of its own; `choice_bias` adds a bias
    where experts are chosen. `scale` multiplies the shares. With `scales_inputs` they multiply what enters an expert.
    The layers of `dense_layers` have one MLP. `bias` gives the router and every projection one; `clamp` stands in for
    the model's activation.

    Every token goes through a shared expert of `shared_size` hidden units too, with `shared_gate` by a share that the
    token gives it.
    """

    count: int
    per_token: int
    intermediate_size: int
    normalize: bool = True
    dense_layers: tuple[int, ...] = ()
    bias: bool = False
    clamp: ClampedSwiglu | None = None
    sigmoid: bool = False
    choice_bias: bool = False
    scales_inputs: bool = False
    scale: float = 1.0
    shared_size: int | None = None
    shared_gate: bool = False

    def __post_init__(self):
        shared = self.shared_size
        check_fields(
            self,
            ("scale", is_number(self.scale) and self.scale > 0, "a number above 0"),
            ("shared_size", shared is None or is_count(shared, 1), "a whole number of at least 1, or None"),
            ("choice_bias", self.sigmoid or not self.choice_bias, "False without sigmoid"),
            ("scales_inputs", not self.scales_inputs or self.per_token == 1, "False for several experts a token"),
            ("shared_gate", shared is not None or not self.shared_gate, "False without a shared expert"),
            ("count", is_count(self.count, 1), "a whole number of at least 1"),
            (
                "per_token",
                is_count(self.per_token, 1) and self.per_token <= self.count,
                f"a whole number from 1 to count = {self.count}",
            ),
            ("intermediate_size", is_count(self.intermediate_size, 1), "a whole number of at least 1"),
        )


@dataclass(frozen=True)
class ModelConfig:
    """Everything that determines a decoder's parameters and arithmetic; hashable, so static under jit.

    `rope` None means learned absolute positions, whose table starts with `learned_position_offset` unused rows. `dtype`
    is the name of the published weights' type; what a model computes in is the type of its parameters. The MLP of
    `parallel_blocks` reads what the attention reads. `norm_place` says whether each block's norm is of what enters it,
    of what it adds, or one of both. `norm_offset` is what norms add to their stored scales. `qk_norm_whole` takes one
    norm over all heads; without `qk_norm_scales` those of layers that rotate have none. `attention_scale` None is
    head_dim ** -0.5, which `query_scaling` changes by position, in the unrotated layers alone where there are such;
    embeddings, what blocks add, and logits have scales too. `soft_cap` c makes of an attention score s c tanh(s / c),
    `logit_cap` of a logit. `sink_logits` gives the softmax of each head a logit more, without a value. A token of one
    of the `sliding_layers` sees the last `window` tokens, itself included, by rotations of its own where there is a
    `local_rope`. The other layers see every token. Queries and keys of `unrotated_layers` are not rotated. `of_layer`
    is the configuration as one layer sees it. `weights` is the fingerprint of the parameters that `load` read, None
    where there are none; saved caches carry it. `decoder` is of layers that were written elsewhere (`nnx`): its methods
    stand in for functions of `models.decoder`.
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
    qk_norm_whole: bool = False
    qk_norm_scales: bool = True
    norm_place: str = "before"
    parallel_blocks: bool = False
    attention_scale: float | None = None
    query_scaling: QueryScaling | None = None
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0
    norm_offset: float = 0.0
    norm_bias: bool = True
    soft_cap: float | None = None
    logit_cap: float | None = None
    sink_logits: bool = False
    window: int | None = None
    sliding_layers: tuple[int, ...] = ()
    local_rope: Rope | None = None
    unrotated_layers: tuple[int, ...] = ()
    tie_embeddings: bool = False
    experts: Experts | None = None
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    dtype: str = "float32"
    # Two models that differ in it alone share their programs.
    weights: str | None = field(default=None, compare=False)
    decoder: Any = None

    def __post_init__(self):
        layers = f"layers, from 0 to {self.num_layers - 1}"
        counts = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads")
        check_fields(
            self,
            *(
                (name, is_count(getattr(self, name), 1), "a whole number of at least 1")
                for name in (*counts, "head_dim", "max_positions")
            ),
            *(
                (name, is_number(getattr(self, name)) and getattr(self, name) > 0, "a number above 0")
                for name in ("norm_eps", "embedding_scale", "residual_scale", "logit_scale")
            ),
            *(
                (name, value is None or (is_number(value) and value > 0), "a number above 0, or None")
                for name in ("attention_scale", "soft_cap", "logit_cap")
                for value in (getattr(self, name),)
            ),
            ("window", self.window is None or is_count(self.window, 1), "a whole number of at least 1, or None"),
            *(
                (name, all(is_count(one) and one < self.num_layers for one in getattr(self, name)), layers)
                for name in ("sliding_layers", "unrotated_layers")
            ),
            ("sliding_layers", bool(self.sliding_layers) == (self.window is not None), "some if there is a window"),
        )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = {self.num_kv_heads}: "
                "every KV head serves an equal group of query heads."
            )
        for rope in (self.rope, self.local_rope):
            if rope is not None and (rope.dim % 2 or not 0 < rope.dim <= self.head_dim):
                raise ValueError(f"rope.dim = {rope.dim} must be even and in 2..head_dim = {self.head_dim}.")
        if self.activation not in ACTIVATIONS:
            raise ValueError(f"activation {self.activation!r} is not supported; allowed: {', '.join(ACTIVATIONS)}.")
        if self.norm not in NORMS:
            raise ValueError(f"norm {self.norm!r} is not supported; allowed: {', '.join(NORMS)}.")
        if self.norm_place not in NORM_PLACES:
            raise ValueError(f"norm_place {self.norm_place!r} is not supported; allowed: {', '.join(NORM_PLACES)}.")

    def experts_of(self, layer: int) -> Experts | None:
        """The experts of a layer, None for one with a single MLP."""
        return None if self.experts is None or layer in self.experts.dense_layers else self.experts

    def of_layer(self, layer: int) -> "ModelConfig":
        """The configuration as a layer sees it, a model of this layer: layers of a kind have the same.

        Of a model whose layers all see every token, by the same rotations, it is the configuration itself.
        """
        if not self.sliding_layers and not self.unrotated_layers:
            return self
        slides = layer in self.sliding_layers
        own: Any = {"window": self.window, "sliding_layers": (0,)} if slides else {"window": None, "sliding_layers": ()}
        if layer in self.unrotated_layers:
            own["qk_norm"] = self.qk_norm and self.qk_norm_scales
        elif self.unrotated_layers:
            own["query_scaling"] = None
        return replace(self, num_layers=1, rope=self.ropes[layer], local_rope=None, unrotated_layers=(), **own)

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotations of each layer, None for one without."""
        return tuple(
            None if layer in self.unrotated_layers else (layer in self.sliding_layers and self.local_rope) or self.rope
            for layer in range(self.num_layers)
        )

    @property
    def global_layers(self) -> tuple[int, ...]:
        """The layers that see every token: those that methods compress, and count."""
        return tuple(layer for layer in range(self.num_layers) if layer not in self.sliding_layers)

    def global_number(self, layer: int) -> int | None:
        """Which of the global layers a layer is, None for one with a window."""
        return self.global_layers.index(layer) if layer in self.global_layers else None

    @property
    def mlp_sizes(self) -> tuple[int, ...]:
        """The hidden units of an MLP or an expert, of each kind that the layers have."""
        found = {self.experts_of(layer) for layer in range(self.num_layers)}
        sizes = {self.intermediate_size if one is None else one.intermediate_size for one in found}
        return tuple(sorted(sizes | {one.shared_size for one in found if one is not None and one.shared_size}))


def limited(config: ModelConfig, max_positions: int) -> ModelConfig:
    """The configuration of a model that reads texts of at most `max_positions` tokens.

    Where that is no more than the original length of LongRoPE it takes the factors for short texts, as transformers
    does for each text. Raises ValueError for more positions than the model has.
    """
    if not is_count(max_positions, 1) or max_positions > config.max_positions:
        raise ValueError(
            f"max_positions must be a whole number from 1 to the model's {config.max_positions}, got {max_positions!r}."
        )
    rope = config.rope
    if rope is not None and isinstance(rope.scaling, LongScaling) and rope.scaling.short_factors is not None:
        original = rope.scaling.original_max_positions
        if original is not None and max_positions <= original:
            scaling = LongScaling(rope.scaling.short_factors, rope.scaling.attention_factor)
            config = replace(config, rope=replace(rope, scaling=scaling))
    return replace(config, max_positions=max_positions)
