"""Fine-tunes a model through a compressed cache: python scripts/train.py --help."""

import importlib.util
import math
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

import clusterkv_jax as ckv
from clusterkv_jax.checkpoints.loading import save_huggingface
from clusterkv_jax.checkpoints.model_dir import files_beside, locate, nearby
from clusterkv_jax.cli.options import MODEL, parse_budget
from clusterkv_jax.cli.process import RESTART
from clusterkv_jax.cli.terminal import one_sentence_errors
from clusterkv_jax.models.registry import FAMILIES
from clusterkv_jax.presets import completed, preset
from clusterkv_jax.training.examples import read_examples, sizes_of
from clusterkv_jax.training.loop import asked_to_end, progress
from clusterkv_jax.training.trainees import Trainee, of_flax, of_model
from clusterkv_jax.training.tuning import Tuning, measured, tune

HELP = """Fine-tune a model through a compressed cache: it reads a context, a method compresses the cache, and the
answer is learned from what is left.

[bold]Data.[/bold] A .jsonl file has an example on each line:

  {"context": "... a long text ...", "question": " Who kept watch?", "answer": " Tashtego."}

Any other file is plain text: the model learns to continue each piece of it from a compressed cache of the piece.

[bold]What is learned.[/bold] The weights, by the loss of the answers' tokens. They learn to ask a compressed cache, and
with --gradient rows, which reads each context twice, also to write rows that survive compression. What a method
chooses to keep or to merge has no gradient.

[bold]Interruptions.[/bold] Checkpoints are written while training goes on. Kill the run at any time and start it
again: it ends with the same weights, bit for bit. Asked to end (SIGTERM), it saves and leaves with code 75.

  python scripts/train.py --model demo --data facts.jsonl --method gravitykv --budget 0.125 --steps 200 --out tuned
  clusterkv generate --model tuned --prompt-file book.txt --method gravitykv --cache-ratio 0.125 --question "..."
"""


def open_trainee(name: str, dtype: str) -> tuple[Trainee, Any]:
    """A model by its name, or what a function makes: FILE.py:FUNCTION; and the method that the function chose.

    Raises ValueError if the file has no such function, or it makes no compressed Flax model.
    """
    file, _, function = name.rpartition(":")
    if not file.endswith(".py"):
        return of_model(ckv.load(name, dtype="float32"), dtype), None
    if not Path(file).is_file():
        raise ValueError(f"There is no file {file} for --model {name}.")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    if not callable(make := getattr(module, function, None)):
        raise ValueError(f"{file} has no function {function!r} for --model {name}.")
    made: Any = make()
    if not hasattr(made, "as_model"):
        raise ValueError(
            f"{function} of {file} must return what clusterkv_jax.nnx.compressed makes, got {type(made).__name__}."
        )
    if dtype != "float32":
        raise ValueError(f"A Flax model computes as its layers say; --dtype {dtype} is for models of this library.")
    return of_flax(made), made.method


def method_of(name: str | None, budget: str | None, own: Any) -> Any:
    """The method that the options name, or the Flax model's own, or the full cache."""
    if name is None:
        if budget is not None:
            raise ValueError(f"--budget {budget} needs a --method.")
        return own or ckv.Full()
    return preset(name, None if budget is None else parse_budget(budget))


def export(trainee: Trainee, weights: Any, source: str, out: Path) -> None:
    """A folder in Hugging Face format, in float32, with the tokenizer of the model that was trained."""
    folder = locate(source)
    names = [name for name in files_beside(folder) if name.startswith(("tokenizer", "special_tokens", "chat_template"))]
    out.mkdir(parents=True, exist_ok=True)
    with nearby(folder, names) as near:
        for name in names:
            (out / name).write_bytes((near / name).read_bytes())
    save_huggingface(out, weights, trainee.model.config, dtype="float32")


def check_out(trainee: Trainee, out: Path | None) -> None:
    """Raise ValueError, before anything is trained, for a model that is written in no published format."""
    family = trainee.model.config.family
    writable = [name for name, entry in FAMILIES.items() if entry.to_hf is not None]
    if out is not None and family not in writable:
        raise ValueError(
            f"--out writes models of the families {', '.join(writable)}, not {family!r}: leave it out, and take the "
            "weights from the checkpoints in --work."
        )


app = typer.Typer(add_completion=False, rich_markup_mode="rich")


@app.command(help=HELP)
def main(
    data: Annotated[Path, typer.Option(help="What is learned: a .jsonl file, or plain text; .gz too.")],
    model: Annotated[
        str, typer.Option(help=f"{MODEL} Or FILE.py:FUNCTION that returns clusterkv_jax.nnx.compressed(...).")
    ] = "demo",
    method: Annotated[
        str | None, typer.Option(help="A method or preset ('clusterkv methods').", show_default="the full cache")
    ] = None,
    budget: Annotated[str | None, typer.Option(help="A share of the cache (0.25) or rows (1024).")] = None,
    gradient: Annotated[str, typer.Option(help="'answers', or 'rows' for the reading of contexts too.")] = "rows",
    valid: Annotated[Path | None, typer.Option(help="Held-out data, measured before and after.")] = None,
    work: Annotated[Path, typer.Option(help="Checkpoints; a run continues what it finds.")] = Path("runs/train"),
    out: Annotated[Path | None, typer.Option(help="Where the trained model goes, in Hugging Face format.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps in all.")] = 200,
    rows: Annotated[int, typer.Option(min=1, help="Examples a step.")] = 4,
    learning_rate: Annotated[float, typer.Option(min=0.0, help="Peak; a cosine goes down to 0.")] = 1e-4,
    warmup: Annotated[
        int | None, typer.Option(min=0, help="Steps up to the peak; 10, or all but one of fewer, by default.")
    ] = None,
    weight_decay: Annotated[float, typer.Option(min=0.0, help="Of all but norms and biases.")] = 0.0,
    context_tokens: Annotated[int, typer.Option(min=16, help="Plain text: tokens that are compressed.")] = 1024,
    answer_tokens: Annotated[int, typer.Option(min=1, help="Plain text: tokens behind them that are learned.")] = 64,
    dtype: Annotated[str, typer.Option(help="Computed in float32 or bfloat16; weights are float32.")] = "float32",
    save_every: Annotated[int, typer.Option(min=1, help="Steps between checkpoints.")] = 50,
    minutes: Annotated[
        float, typer.Option(help="Stop cleanly after this time; the same command continues.")
    ] = math.inf,
    seed: Annotated[int, typer.Option(min=0, help="Of the order of examples.")] = 0,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Fine-tune a model through a compressed cache."""
    console = Console(markup=False, soft_wrap=True, highlight=False)
    with one_sentence_errors(debug), asked_to_end() as asked:
        check_one_of("gradient", gradient, "answers", "rows")
        check_one_of("dtype", dtype, "float32", "bfloat16")
        warmup = min(10, steps - 1) if warmup is None else warmup
        if warmup >= steps:
            raise ValueError(f"--warmup must be less than --steps, got {warmup} and {steps}.")
        trainee, own = open_trainee(model, dtype)
        check_out(trainee, out)
        chosen = completed(trainee.model, method_of(method, budget, own))
        cut = {"context_tokens": context_tokens, "answer_tokens": answer_tokens}
        examples = read_examples(data, trainee.model, **cut)
        held_out = [] if valid is None else read_examples(valid, trainee.model, **cut)
        sizes = sizes_of([*examples, *held_out], trainee.model)
        names: Any = {"model": model, "method": repr(chosen), "gradient": gradient, "data": str(data), "dtype": dtype}
        rates: Any = {"learning_rate": learning_rate, "warmup": warmup, "weight_decay": weight_decay}
        tuning = Tuning(**names, steps=steps, rows=rows, seed=seed, **rates)
        console.print(f"{len(examples)} examples, contexts of up to {sizes.width} tokens, {chosen}")

        def measure(when: str, weights: Any) -> None:
            if held_out:
                loss, share = measured(trainee, weights, chosen, held_out, sizes)
                console.print(f"{when}: loss {loss:.4f}, {share:.1%} of held-out answers' tokens are the likeliest")

        measure("before", trainee.weights)
        with progress(console, steps, every=min(10, steps)) as report:
            state, done = tune(
                tuning,
                trainee,
                chosen,
                examples,
                sizes,
                work,
                save_every=save_every,
                seconds=60 * minutes,
                asked=asked,
                report=lambda number, batch, metrics: report(number, batch.contexts.size, metrics),
            )
        again = asked()
        if again:
            console.print(f"Asked to end after step {done} of {steps}; the same command continues.")
        else:
            measure("after", state["params"])
            if out is not None:
                export(trainee, state["params"], model, out)
            console.print(f"{done} of {steps} steps done, weights in {work / 'checkpoints' if out is None else out}")
    if again:
        raise typer.Exit(RESTART)


def check_one_of(option: str, value: str, *allowed: str) -> None:
    """Raise ValueError for a value that an option does not know."""
    if value not in allowed:
        raise ValueError(f"--{option} must be {' or '.join(allowed)}, got {value!r}.")


if __name__ == "__main__":
    app()
