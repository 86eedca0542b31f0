"""What `train_demo.py` can train: the packaged demo model, and a second model of another architecture."""

from dataclasses import dataclass, replace

from clusterkv_jax.models.config import ModelConfig, Rope


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run. `phases` are (tokens a row, rows, steps); `family` is llama or qwen3."""

    phases: tuple[tuple[int, int, int], ...] = ((1024, 128, 1700), (4096, 32, 1100), (8192, 16, 250))
    family: str = "llama"
    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
    rope_theta: float = 5e5
    learning_rate: float = 2e-3
    warmup: int = 200
    weight_decay: float = 0.1
    compute_dtype: str = "bfloat16"
    seed: int = 0
    checkpoint_every: int = 1000

    @property
    def steps(self) -> int:
        """Steps of all phases."""
        return sum(steps for _, _, steps in self.phases)

    @property
    def shapes(self) -> list[tuple[int, int]]:
        """(rows, tokens) of every step; a row has one token more than the model sees, for the targets."""
        return [(rows, length + 1) for length, rows, steps in self.phases for _ in range(steps)]

    @property
    def config(self) -> ModelConfig:
        """The model, with tied embeddings."""
        return ModelConfig(
            family=self.family,
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=max(length for length, _, _ in self.phases),
            rope=Rope(theta=self.rope_theta, dim=self.head_dim),
            qk_norm=self.family == "qwen3",
            tie_embeddings=True,
            bos_id=0,
            eos_ids=(1,),
            pad_id=2,
        )


RECIPES = {
    "demo": Recipe(),
    # 60,833,280 parameters. Half the demo's tokens a step and half its peak rate, for twice its width.
    "qwen3": Recipe(
        phases=((1024, 64, 1600), (4096, 16, 550), (8192, 8, 200)),
        family="qwen3",
        hidden_size=512,
        intermediate_size=2048,
        num_layers=12,
        num_heads=8,
        num_kv_heads=4,
        rope_theta=1e6,
        learning_rate=1e-3,
    ),
}


def tiny(recipe: Recipe) -> Recipe:
    """A toy model of the recipe's architecture, trained for a few steps."""
    return replace(
        recipe,
        phases=((384, 4, 24), (768, 2, 8)),
        vocab_size=512,
        hidden_size=32,
        intermediate_size=64,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        learning_rate=2e-3,
        warmup=4,
        compute_dtype="float32",
        checkpoint_every=10,
    )


def flops_per_token(recipe: Recipe, length: int) -> float:
    """Forward and backward: six per weight, and the causal half of the attention products."""
    attention = recipe.num_heads * recipe.head_dim
    kv = 2 * recipe.num_kv_heads * recipe.head_dim
    layer = recipe.hidden_size * (2 * attention + kv + 3 * recipe.intermediate_size)
    weights = recipe.num_layers * layer + recipe.vocab_size * recipe.hidden_size
    return 6 * weights + 6 * recipe.num_layers * attention * length
