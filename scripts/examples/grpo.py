"""Group-relative policy optimisation of a Flax model whose rollouts read from a compressed cache.

A context is made of symbols, most of one class. The reward of a rollout is the share of its symbols that are of that
class, so that a model is rewarded for what only the context says. A step has several contexts. Each is read once and
compressed, and a group of rollouts is drawn from copies of that cache. A rollout's advantage is its reward beside those
of its group, and the policy's gradient goes through the same compressed cache.

The policy is the toy transformer of the page on Flax models, or a tiny Qwen3 of google-tunix where that is installed.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import typer
from flax import nnx
from jaxtyping import Array, Float, Int

import clusterkv_jax as ckv
from clusterkv_jax.cache.layers import copy_sequences
from clusterkv_jax.training.objective import TrainingBatch, logits_of, logprobs, read

CLASSES = 4
SYMBOLS = 60  # of the toy's 61 tokens; symbol s is of class s mod CLASSES


@dataclass(frozen=True)
class Task:
    """Sizes of a step: contexts, rollouts of each, symbols of a context and of a rollout."""

    contexts: int = 8
    group: int = 8
    context_tokens: int = 48
    new_tokens: int = 8

    def draw(self, seed: int, step: int) -> tuple[Int[np.ndarray, "B N"], Int[np.ndarray, " B"]]:
        """Contexts of a step, and the class of each: three symbols in four are of it."""
        rng = np.random.default_rng([seed, step])
        classes = rng.integers(CLASSES, size=self.contexts)
        symbols = rng.integers(SYMBOLS, size=(self.contexts, self.context_tokens))
        of_class = symbols - symbols % CLASSES + classes[:, None]
        mine = rng.random(symbols.shape) < 0.75
        return np.where(mine, of_class, symbols).astype(np.int32), classes


def reward(rollouts: Int[Array, "R T"], classes: Int[Array, " R"]) -> Float[Array, " R"]:
    """The share of a rollout's symbols that are of its context's class."""
    return jnp.mean((rollouts % CLASSES == classes[:, None]).astype(jnp.float32), axis=1)


def advantages(rewards: Float[Array, " R"], group: int) -> Float[Array, " R"]:
    """Rewards beside those of the same group, in its standard deviations."""
    grouped = rewards.reshape(-1, group)
    apart = grouped - grouped.mean(axis=1, keepdims=True)
    return (apart / (grouped.std(axis=1, keepdims=True) + 1e-3)).reshape(-1)


def rollouts(small: Any, task: Task, contexts: Int[Array, "B N"], key: Array) -> Int[Array, "R T"]:
    """A group of samples for each context, all from copies of its one compressed cache."""
    lengths = jnp.full(task.contexts, task.context_tokens, jnp.int32)
    cache, logits = small.prefill(contexts, lengths, reserve=task.new_tokens)
    numbers = jnp.repeat(jnp.arange(task.contexts), task.group)
    cache, logits = copy_sequences((cache, logits), numbers)
    tokens = []
    for number in range(task.new_tokens):
        tokens.append(jax.random.categorical(jax.random.fold_in(key, number), logits[:, :SYMBOLS]))
        if number + 1 < task.new_tokens:
            cache, logits = small.decode_step(cache, tokens[-1].astype(jnp.int32))
    return jnp.stack(tokens, axis=1).astype(jnp.int32)


def policy_loss(
    small: Any, task: Task, contexts: Int[Array, "B N"], drawn: Int[Array, "R T"], worth: Float[Array, " R"]
) -> Float[Array, ""]:
    """Minus the advantage-weighted log-likelihood of rollouts, given the compressed caches that they were drawn from.

    Each group is drawn from this very policy, so that GRPO's ratio to the old one is 1 and its clipping never acts.
    """
    lengths = jnp.full(task.contexts, task.context_tokens, jnp.int32)
    counts = jnp.full(drawn.shape[0], task.new_tokens, jnp.int32)
    batch = TrainingBatch(contexts, lengths, jnp.zeros((task.contexts, task.new_tokens), jnp.int32), counts, drawn > -1)
    params, config, method = small.params, small.config, small.method
    cache, first = read(params, config, method, batch, through_rows=True)
    cache, first = copy_sequences((cache, first), jnp.repeat(jnp.arange(task.contexts), task.group))
    logits = logits_of(params, config, method, cache, first, drawn, counts)[..., :SYMBOLS]
    return -jnp.mean(jnp.mean(logprobs(logits, drawn), axis=1) * worth)


def train(
    small: Any, task: Task, *, steps: int, learning_rate: float, seed: int, show: Callable[[int, float, float], None]
) -> list[float]:
    """The mean reward of each step; `show` gets its number, reward and loss. What `small` holds is trained."""
    optimizer = nnx.Optimizer(small.model, optax.adam(learning_rate), wrt=nnx.Param)

    @nnx.jit
    def step(small: Any, optimizer: Any, contexts: Array, classes: Array, key: Array) -> tuple[Array, Array]:
        drawn = rollouts(small, task, contexts, key)
        rewards = reward(drawn, classes)
        worth = advantages(rewards, task.group)

        def loss(model: nnx.Module) -> Array:
            return policy_loss(_around(small, model), task, contexts, drawn, worth)

        value, grads = nnx.value_and_grad(loss)(small.model)
        with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and multiplies floats with them
            optimizer.update(small.model, grads)
        return rewards.mean(), value

    history = []
    for number in range(steps):
        contexts, classes = task.draw(seed, number)
        each = jnp.repeat(jnp.asarray(classes), task.group)
        key = jax.random.fold_in(jax.random.key(seed), number)
        mean, value = step(small, optimizer, jnp.asarray(contexts), each, key)
        history.append(float(mean))
        show(number + 1, float(mean), float(value))
    return history


def _around(small: Any, model: nnx.Module) -> Any:
    """The same compressed model with another in its place: the one that a gradient is taken of."""
    return type(small)(model, small.method, small.config, small.tokenizer, small.mesh)


# --- the command ---


def toy(seed: int) -> nnx.Module:
    """The model that the page on Flax models defines: two layers, 61 tokens."""
    page = Path(__file__).parents[2] / "docs" / "guides" / "flax.md"
    found = re.search(r"^```python\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert found is not None
    names: dict[str, Any] = {"__name__": "toy"}
    exec(found[1], names)
    return names["Toy"](nnx.Rngs(seed))


def tunix(seed: int) -> nnx.Module:
    """A Qwen3 of two layers with random weights. Raises ValueError where google-tunix is not installed."""
    if find_spec("tunix") is None:
        raise ValueError("--model tunix needs google-tunix: pip install google-tunix.")
    model = import_module("tunix.models.qwen3.model")
    sizes = {"num_layers": 2, "vocab_size": SYMBOLS + 1, "embed_dim": 32, "hidden_dim": 64, "num_heads": 4}
    config = model.ModelConfig(**sizes, head_dim=8, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6)
    return model.Qwen3(config, rngs=nnx.Rngs(seed))


MODELS = {"toy": toy, "tunix": tunix}


def main(
    model: Annotated[str, typer.Option(help="'toy', or 'tunix' (pip install google-tunix).")] = "toy",
    steps: Annotated[int, typer.Option(help="Steps.")] = 60,
    ratio: Annotated[float, typer.Option(help="Share of the context's rows that SnapKV keeps.")] = 0.25,
    learning_rate: Annotated[float, typer.Option(help="Of Adam.")] = 1e-2,
    seed: Annotated[int, typer.Option(help="Of weights, contexts and rollouts.")] = 0,
) -> None:
    """Train a policy whose rollouts read from a compressed cache, and print the curve of its reward."""
    if model not in MODELS:
        raise typer.BadParameter(f"{model!r} is no model; allowed: {', '.join(MODELS)}", param_hint="--model")
    try:
        policy = MODELS[model](seed)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="--model") from None
    method = ckv.Composed(ckv.SnapKV(ckv.Budget(ratio=ratio), window=4), ckv.Full())
    small = ckv.nnx.compressed(policy, method)

    def show(number: int, mean: float, value: float) -> None:
        if number == 1 or number % 10 == 0:
            bar = "#" * round(40 * mean)
            print(f"step {number:4d}  reward {mean:.3f}  loss {value:+.3f}  {bar}", flush=True)

    train(small, Task(), steps=steps, learning_rate=learning_rate, seed=seed, show=show)


if __name__ == "__main__":
    typer.run(main)
