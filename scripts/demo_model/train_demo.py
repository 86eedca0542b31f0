"""Trains the packaged demo model: a small Llama that retrieves, tracks and counts in contexts of up to 8,192 tokens."""

import json
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import demo_data
import demo_evaluation
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import typer
from jaxtyping import Array, Float, Int, UInt8, UInt16
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clusterkv_jax.checkpoints import save_huggingface
from clusterkv_jax.models.config import ModelConfig, Rope
from clusterkv_jax.models.transformer import Params, forward_hidden, init, unembed

LOG_EVERY = 100
LOGITS_AT_ONCE = 2**15  # tokens whose V-wide float32 logits exist at a time: 1 GiB

State = dict[str, Any]  # params, opt_state: all float32


@dataclass(frozen=True)
class Recipe:
    """Everything that determines a run. `phases` are (tokens a row, rows, steps)."""

    phases: tuple[tuple[int, int, int], ...] = ((1024, 128, 1700), (4096, 32, 1100), (8192, 16, 250))
    vocab_size: int = 8192
    hidden_size: int = 256
    intermediate_size: int = 768
    num_layers: int = 6
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 128
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
        """The model, Llama's architecture with tied embeddings."""
        return ModelConfig(
            family="llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            max_positions=max(length for length, _, _ in self.phases),
            rope=Rope(theta=5e5, dim=self.head_dim),
            tie_embeddings=True,
            bos_id=0,
            eos_ids=(1,),
            pad_id=2,
        )


TINY = Recipe(
    phases=((384, 4, 24), (768, 2, 8)),
    vocab_size=512,
    hidden_size=32,
    intermediate_size=64,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    warmup=4,
    compute_dtype="float32",
    checkpoint_every=10,
)


# --- one step ---


def optimizer(recipe: Recipe) -> optax.GradientTransformation:
    """AdamW with a cosine schedule over all phases; norms are not decayed."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, recipe.learning_rate, recipe.warmup, recipe.steps)
    return optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(
            schedule,
            b2=0.95,
            weight_decay=recipe.weight_decay,
            mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params),
        ),
    )


@partial(jax.jit, static_argnums=0)
def new_state(recipe: Recipe) -> State:
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
    recipe: Recipe, state: State, tokens: UInt16[Array, "B N"], weights: UInt8[Array, "B N"]
) -> tuple[State, Float[Array, "2"]]:
    """One AdamW step; returns the new state and (loss, answer accuracy). The old state is donated."""
    dtype = jnp.dtype(recipe.compute_dtype)
    grad = jax.value_and_grad(loss_and_accuracy, has_aux=True)
    (loss, accuracy), grads = grad(state["params"], recipe.config, tokens, weights, dtype)
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and multiplies floats with them
        updates, opt_state = optimizer(recipe).update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}, jnp.stack(
        [loss, accuracy]
    )


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
) -> tuple[State, int]:
    """Trains from the newest checkpoint in `work` (or from scratch) until the recipe's end or `seconds` are over.

    Returns the state and the number of steps done, both saved. `after_step` sees each finished step's number. Raises
    ValueError if `work` holds checkpoints of another recipe.
    """
    began = time.monotonic()
    _claim(work, recipe)
    with ocp.CheckpointManager((work / "checkpoints").resolve()) as manager:
        state, step = _restore(manager, recipe)
        stream = demo_data.batches(corpus, recipe.shapes, recipe.seed, step, workers)
        with _progress(console or Console(quiet=True), recipe, step) as report:
            for tokens, weights in stream:
                state, metrics = train_step(recipe, state, tokens, weights)
                step += 1
                report(step, tokens.size, metrics)
                late = time.monotonic() - began > seconds
                if step % recipe.checkpoint_every == 0 or step == recipe.steps or late:
                    manager.save(step, args=ocp.args.StandardSave(state))
                    manager.wait_until_finished()  # the next step donates these buffers
                after_step(step)
                if late:
                    break
    return state, step


def _claim(work: Path, recipe: Recipe) -> None:
    """Remembers whose checkpoints these are."""
    work.mkdir(parents=True, exist_ok=True)
    path, described = work / "recipe.json", json.dumps(asdict(recipe), indent=2)
    if path.exists() and path.read_text() != described:
        raise ValueError(f"{path} describes another recipe than this run's: choose another --work folder or delete it")
    path.write_text(described)


def _restore(manager: ocp.CheckpointManager, recipe: Recipe) -> tuple[State, int]:
    """The newest checkpoint or a new state, placed alike, so that a resumed run compiles nothing twice."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = manager.latest_step()
    if step is None:
        return jax.device_put(new_state(recipe), sharding), 0
    abstract = jax.eval_shape(partial(new_state, recipe))
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    return dict(manager.restore(step, args=ocp.args.StandardRestore(abstract))), step


@contextmanager
def _progress(console: Console, recipe: Recipe, start: int) -> Iterator[Callable[[int, int, Array], None]]:
    """A bar, and a line every LOG_EVERY steps. Metrics are read that seldom: reading waits for the accelerator."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=recipe.steps, completed=start)
        recent: list[Array] = []
        mark, count = time.monotonic(), 0

        def report(step: int, tokens: int, metrics: Array) -> None:
            nonlocal mark, count
            recent.append(metrics)
            count += tokens
            if step % LOG_EVERY == 0 or step == recipe.steps:
                loss, accuracy = np.mean(np.stack(recent), axis=0)
                now = time.monotonic()
                label = f"loss {loss:.3f} answers {accuracy:.1%} {count / (now - mark) / 1e6:.2f} M tokens/s"
                bar.update(task, completed=step, description=label)
                if not console.is_terminal:
                    console.print(f"step {step}/{recipe.steps} {label}")
                recent.clear()
                mark, count = now, 0

        yield report


def prepare(data: Path, work: Path, recipe: Recipe) -> Path:
    """Tokenizer and tokenised books in `work`, made once; returns the corpus file."""
    path = work / "corpus.pkl"
    if not path.exists():
        work.mkdir(parents=True, exist_ok=True)
        texts = demo_data.read_texts(data)
        tokenizer = demo_data.train_tokenizer(texts, recipe.vocab_size)
        demo_data.save_corpus(demo_data.make_corpus(texts, tokenizer), path)
    return path


def export(state: State, recipe: Recipe, corpus: Path, folder: Path) -> None:
    """The folder that transformers and `clusterkv_jax.load` read: bf16 weights, configurations, tokenizer."""
    folder.mkdir(parents=True, exist_ok=True)
    save_huggingface(folder, state["params"], recipe.config, dtype="bfloat16")
    demo_data.save_tokenizer(demo_data.load_corpus(corpus).tokenizer, folder, recipe.config.max_positions)


def _flops_per_token(recipe: Recipe, length: int) -> float:
    """Forward and backward: six per weight, and the causal half of the attention products."""
    attention = recipe.num_heads * recipe.head_dim
    kv = 2 * recipe.num_kv_heads * recipe.head_dim
    layer = recipe.hidden_size * (2 * attention + kv + 3 * recipe.intermediate_size)
    weights = recipe.num_layers * layer + recipe.vocab_size * recipe.hidden_size
    return 6 * weights + 6 * recipe.num_layers * attention * length


app = typer.Typer(add_completion=False)


@app.command()
def main(
    data: Annotated[
        Path, typer.Option(help="Folder with gutenberg_train.jsonl.gz (or a `corpus` folder with it).")
    ] = Path("../shared/data"),
    work: Annotated[
        Path, typer.Option(help="Checkpoints and the tokenised corpus; a run continues what it finds.")
    ] = Path("runs/demo"),
    out: Annotated[Path, typer.Option(help="Where the finished model goes, in Hugging Face layout.")] = Path(
        "models/demo"
    ),
    minutes: Annotated[
        float, typer.Option(help="Stop cleanly after this time; the same command continues.")
    ] = math.inf,
    workers: Annotated[int, typer.Option(help="Processes that make the data; 0 makes it in this one.")] = 0,
    seed: Annotated[int, typer.Option(help="Seed of parameters and data.")] = 0,
    scale: Annotated[float, typer.Option(help="Multiplies the steps of every phase.")] = 1.0,
    tiny: Annotated[
        bool, typer.Option(help="A toy model for a few steps: tries the whole path in seconds on a CPU.")
    ] = False,
    evaluate: Annotated[
        bool, typer.Option(help="Only measure the model in --out, on held-out books and keys.")
    ] = False,
    cases: Annotated[int, typer.Option(help="Cases per task and length of the evaluation.")] = 64,
) -> None:
    """Train the packaged demo model (8 M parameters), or measure it with --evaluate.

    The model reads public-domain books with facts, variables and word counts hidden in them and answers questions in
    RULER's wording. Rows of 1,024 tokens teach it to retrieve, rows of 4,096 and 8,192 to do so over long texts. A row
    depends on the seed and the step alone: kill the run at any time, start it again, and it ends with the same model.

    One H200 takes about 5 minutes with --workers 14. Try the path first:
    python scripts/demo_model/train_demo.py --tiny --work runs/tiny --out runs/tiny/model
    """
    console = Console()
    if evaluate:
        demo_evaluation.run(out, data, cases, console)
        return
    recipe = _recipe(tiny, seed, scale)
    try:
        corpus = prepare(data, work, recipe)
    except FileNotFoundError as error:
        raise typer.BadParameter(str(error), param_hint="--data") from None
    for length, rows, steps in recipe.phases:
        total = _flops_per_token(recipe, length) * length * rows * steps
        console.print(f"{steps} steps of {rows} x {length} tokens, {total / 1e15:.2f} PFLOP")
    state, step = train(recipe, work, corpus, workers=workers, seconds=60 * minutes, console=console)
    export(state, recipe, corpus, out)
    console.print(f"{step} of {recipe.steps} steps done, model in {out}")


def _recipe(tiny: bool, seed: int, scale: float) -> Recipe:
    base = TINY if tiny else Recipe()
    phases = tuple((length, rows, max(1, round(steps * scale))) for length, rows, steps in base.phases)
    return replace(base, seed=seed, phases=phases)


if __name__ == "__main__":
    app()
