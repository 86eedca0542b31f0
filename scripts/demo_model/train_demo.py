"""Trains small models that retrieve, track and count in contexts of up to 8,192 tokens: the packaged demo model, a
Llama, and by `--recipe qwen3` a second one of another architecture that the package does not hold.
"""

import json
import math
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import demo_data
import jax
import jax.numpy as jnp
import optax
import typer
from demo_recipes import RECIPES, Recipe, flops_per_token, tiny
from jaxtyping import Array, Float, Int, UInt8, UInt16
from rich.console import Console

from clusterkv_jax.checkpoints.loading import save_huggingface
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.decoder import forward_hidden, unembed
from clusterkv_jax.models.parameters import Params, init
from clusterkv_jax.training import loop
from clusterkv_jax.training.loop import TrainState

LOG_EVERY = 100
LOGITS_AT_ONCE = 2**15  # tokens whose V-wide float32 logits exist at a time: 1 GiB


# --- one step ---


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW over all phases."""
    rates = {"learning_rate": recipe.learning_rate, "warmup": recipe.warmup, "weight_decay": recipe.weight_decay}
    return loop.adamw(recipe.steps, **rates)


@partial(jax.jit, static_argnums=0)
def new_state(recipe: Recipe) -> TrainState:
    """Random float32 parameters and the optimizer's state."""
    params = init(jax.random.key(recipe.seed), recipe.config)
    return {"params": params, "opt_state": optimizer(recipe).init(params)}


def loss_and_accuracy(
    params: Params, config: ModelConfig, tokens: UInt16[Array, "B N"], weights: UInt8[Array, "B N"], dtype: Any
) -> tuple[Float[Array, ""], Float[Array, ""]]:
    """Weighted mean cross-entropy of the next tokens, and the share of answer tokens that are predicted exactly."""
    computed = jax.tree.map(lambda p: p.astype(dtype), params)
    ids = jnp.asarray(tokens, jnp.int32)
    hidden = forward_hidden(computed, config, ids[:, :-1])
    rows = (hidden, ids[:, 1:], weights[:, 1:].astype(jnp.float32))
    # The V-wide logits exist for a few rows at a time only.
    at_once = max(1, LOGITS_AT_ONCE // hidden.shape[1])
    sums = jax.lax.map(jax.checkpoint(lambda row: _sums(computed, config, *row)), rows, batch_size=at_once)
    loss, weight, correct, answers = (part.sum() for part in sums)
    return loss / jnp.maximum(weight, 1.0), correct / jnp.maximum(answers, 1.0)


def _sums(
    params: Params, config: ModelConfig, hidden: Float[Array, "N M"], targets: Int[Array, " N"], weights: Array
) -> tuple[Array, Array, Array, Array]:
    logits = unembed(params, config, hidden)
    picked = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
    loss = (jax.nn.logsumexp(logits, axis=-1) - picked) * weights
    answers = (weights >= demo_data.ANSWER_WEIGHT).astype(jnp.float32)
    correct = (picked >= logits.max(axis=-1)).astype(jnp.float32) * answers
    return loss.sum(), weights.sum(), correct.sum(), answers.sum()


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def train_step(
    recipe: Recipe, state: TrainState, tokens: UInt16[Array, "B N"], weights: UInt8[Array, "B N"]
) -> tuple[TrainState, Float[Array, "2"]]:
    """One AdamW step; returns the new state and (loss, answer accuracy). The old state is donated."""
    dtype = jnp.dtype(recipe.compute_dtype)
    grad = jax.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = grad(state["params"], recipe.config, tokens, weights, dtype)
    return loop.updated(optimizer(recipe), state, grads), jnp.stack([loss, accuracy])


# --- the run ---


def train(
    recipe: Recipe,
    work: Path,
    corpus: Path,
    *,
    workers: int = 0,
    seconds: float = math.inf,
    console: Console | None = None,
    after_step: Callable[[int], None] = lambda step: None,
) -> tuple[TrainState, int]:
    """Trains from the newest checkpoint in `work` (or from scratch) until the recipe's end or `seconds` are over.

    Returns the state and the number of steps done, both saved. `after_step` sees each finished step's number. Raises
    ValueError if `work` holds checkpoints of another recipe.
    """
    loop.claim(work / "recipe.json", json.dumps(asdict(recipe), indent=2))
    with loop.progress(console or Console(markup=False, quiet=True), recipe.steps, every=LOG_EVERY) as report:
        return loop.run(
            work,
            partial(new_state, recipe),
            lambda state, batch: train_step(recipe, state, *batch),
            lambda start: demo_data.batches(corpus, recipe.shapes, recipe.seed, start, workers),
            steps=recipe.steps,
            save_every=recipe.checkpoint_every,
            seconds=seconds,
            report=lambda step, batch, metrics: report(step, batch[0].size, metrics),
            after_step=after_step,
        )


def prepare(data: Path, work: Path, recipe: Recipe) -> Path:
    """Tokenizer and tokenised books in `work`, made once; returns the corpus file."""
    path = work / "corpus.pkl"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        texts = demo_data.read_texts(data)
        tokenizer = demo_data.train_tokenizer(texts, recipe.vocab_size)
        demo_data.save_corpus(demo_data.make_corpus(texts, tokenizer), path)
    return path


def export(state: TrainState, recipe: Recipe, corpus: Path, folder: Path) -> None:
    """The folder that transformers and `clusterkv_jax.load` read: bf16 weights, configurations, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_huggingface(folder, state["params"], recipe.config, dtype="bfloat16")
    demo_data.save_tokenizer(demo_data.load_corpus(corpus).tokenizer, folder, recipe.config.max_positions)


app = typer.Typer(add_completion=False)


@app.command()
def main(
    data: Annotated[
        Path, typer.Option(help="Folder with gutenberg_train.jsonl.gz (or a `corpus` folder with it).")
    ] = Path("../shared/data"),
    recipe: Annotated[str, typer.Option(help=f"What is trained: {', '.join(RECIPES)}.")] = "demo",
    work: Annotated[
        Path | None,
        typer.Option(
            help="Checkpoints and the tokenised corpus; a run continues what it finds.", show_default="runs/RECIPE"
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Where the finished model goes, in Hugging Face layout.",
            show_default="models/demo, or WORK/model for another recipe",
        ),
    ] = None,
    minutes: Annotated[
        float, typer.Option(help="Stop cleanly after this time; the same command continues.")
    ] = math.inf,
    workers: Annotated[int, typer.Option(help="Processes that make the data; 0 makes it in this one.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of parameters and data.")] = 0,
    scale: Annotated[float, typer.Option(help="Multiplies the steps of every phase.")] = 1.0,
    toy: Annotated[
        bool, typer.Option("--tiny", help="A toy model for a few steps: tries the whole path in seconds on a CPU.")
    ] = False,
) -> None:
    """Train the packaged demo model (8 M parameters) or a Qwen3 of 61 M.

    The model reads public-domain books with facts, variables and word counts hidden in them and answers questions in
    RULER's wording. Rows of 1,024 tokens teach it to retrieve, rows of 4,096 and 8,192 to do so over long texts. A row
    depends on the seed and the step alone: kill the run at any time, start it again, and it ends with the same model.

    One H200 takes about 5 minutes for the demo model with --workers 14. Try the path first:
    python scripts/demo_model/train_demo.py --tiny --work runs/tiny --out runs/tiny/model
    """
    if recipe not in RECIPES:
        raise typer.BadParameter(f"{recipe!r} is no recipe; allowed: {', '.join(RECIPES)}", param_hint="--recipe")
    work = work or Path("runs") / recipe
    out = out or (Path("models/demo") if recipe == "demo" else work / "model")
    console = Console(markup=False)
    plan = _scaled(tiny(RECIPES[recipe]) if toy else RECIPES[recipe], seed, scale)
    try:
        corpus = prepare(data, work, plan)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
    for length, rows, steps in plan.phases:
        total = flops_per_token(plan, length) * length * rows * steps
        console.print(f"{steps} steps of {rows} x {length} tokens, {total / 1e15:.2f} PFLOP")
    state, step = train(plan, work, corpus, workers=workers, seconds=60 * minutes, console=console)
    export(state, plan, corpus, out)
    console.print(f"{step} of {plan.steps} steps done, model in {out}")


def _scaled(recipe: Recipe, seed: int, scale: float) -> Recipe:
    phases = tuple((length, rows, max(1, round(steps * scale))) for length, rows, steps in recipe.phases)
    return replace(recipe, seed=seed, phases=phases)


if __name__ == "__main__":
    app()
