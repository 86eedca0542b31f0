"""What gated reading costs beside compression afterwards: needles found, and the loss of the text that follows.

    python scripts/studies/gated_reading.py
    python scripts/studies/gated_reading.py --model smollm2 --tasks needles --cases 40 --tokens 4096,2048 \
        --windows 1024,512 --text clusterkv_jax/evaluation/tasks/books/1342.txt.gz --dtype bfloat16

Each context is read once, without its question, which is asked afterwards. Tasks are four needles in the demo model's
chapter, or "needles", RULER's eight. The loss is that of the `FOLLOWING` tokens behind `tokens` of `passages` of the
text, in nats a token, above that of the full cache; its second number is the standard error over passages. Rows with a
window are gated; the others are read whole. Each number is printed when it is known. With `--cases 0`, or without
`--stretches`, only the other half is measured.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import demo_chapter
import jax
import jax.numpy as jnp
import numpy as np
import typer

import clusterkv_jax as ckv
from clusterkv_jax.decoding import prefill
from clusterkv_jax.decoding.appending import append_to_layer, enter, leave, through_layers
from clusterkv_jax.evaluation.scoring import score
from clusterkv_jax.evaluation.tasks import ruler, sources, suites
from clusterkv_jax.evaluation.tasks.cases import Case, build_prompt
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_reading import gated_prefill
from clusterkv_jax.presets import completed, preset

REPLY = 32  # tokens of an answer in the chapter: a uuid and the end of the sentence
FOLLOWING = 256  # tokens of a text behind what is read

_enter = jax.jit(enter, static_argnums=1)
_leave = jax.jit(leave, static_argnums=1)


def examples(model: ckv.Model, tasks: str, tokens: int, cases: int) -> list[Case]:
    """Questions about contexts of about so many tokens, tasks in turns, so that batches are of about one width."""
    if tasks == "chapter":
        contexts = demo_chapter.contexts(model.tokenizer, tokens, cases, 0)
        listed = [
            ruler.from_example(each, f"{i}/{j}", {}) for i, some in enumerate(contexts) for j, each in enumerate(some)
        ]
        return [replace(case, max_new_tokens=REPLY) for case in listed]
    options = suites.Options(tasks=(tasks,), lengths=(tokens,), limit=cases)
    listed = suites.cases("ruler", options, model.tokenizer, model.config.max_positions)
    return sorted(listed, key=lambda case: int(case.id.rsplit("/", 1)[1]))


def hits(model: ckv.Model, method: Any, cases: Sequence[Case], batch: int, **reading: Any) -> float:
    """Mean score of the answers, `batch` of them at a time."""
    points = []
    for start in range(0, len(cases), batch):
        some = cases[start : start + batch]
        prompts = [build_prompt(case, model.tokenizer, model.config.max_positions) for case in some]
        asked: Any = {"questions": [list(prompt.question) for prompt in prompts], **reading}
        new = max(case.max_new_tokens for case in some)
        contexts = [list(prompt.context) for prompt in prompts]
        texts = ckv.generate(model, contexts, method=method, max_new_tokens=new, **asked).texts
        points += [score(case.metric, text, case.answers) for text, case in zip(texts, some, strict=True)]
    return float(np.mean(points))


def losses(model: ckv.Model, method: Any, texts: np.ndarray, gate: Gate | None, batch: int) -> np.ndarray:
    """Nats a token, of each text, of its last `FOLLOWING` tokens behind the others, all but one of which are read."""
    found, params, config, method = [], model.params, model.config, completed(model, method)
    for start in range(0, len(texts), batch):
        some = texts[start : start + batch]
        read, rest = some[:, : -FOLLOWING - 1], some[:, -FOLLOWING - 1 :]
        sizes: Any = {"max_new_tokens": FOLLOWING, "step_tokens": FOLLOWING}
        args = params, config, method, read, np.full(len(read), read.shape[1], np.int32)
        cache, _ = prefill(*args, **sizes) if gate is None else gated_prefill(*args, gate=gate, **sizes)
        counts = jnp.full(len(some), FOLLOWING, jnp.int32)
        at = jnp.broadcast_to(jnp.arange(FOLLOWING), (len(some), FOLLOWING))
        ends = {name: part for name, part in params.items() if name != "layers"}
        entered = _enter(ends, config, cache.position, jnp.asarray(rest[:, :-1]), counts)
        steps = lambda _, *args: append_to_layer(*args)  # noqa: E731
        hidden, cache = through_layers(params, config, method, cache, entered, steps, shape_alone=True)
        logits = _leave(ends, config, cache, hidden, counts, at).astype(jnp.float32)
        likely = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(rest[:, 1:, None]), axis=2)
        found.append(-np.asarray(jnp.mean(likely[..., 0], axis=1)))
    return np.concatenate([np.zeros(0), *found])


def passages(ids: Sequence[int], length: int, count: int) -> np.ndarray:
    """So many stretches of a text, spread over all of it. Raises ValueError for a text that is shorter than one."""
    if len(ids) < length:
        raise ValueError(f"--text holds {len(ids)} tokens; {length} are needed.")
    starts = np.linspace(0, len(ids) - length, count).astype(int)
    return np.asarray([ids[start : start + length] for start in starts], np.int32).reshape(count, length)


def main(
    model: Annotated[str, typer.Option(help="'demo', 'smollm2' or a folder.")] = "demo",
    methods: Annotated[str, typer.Option(help="Presets, between commas.")] = "full,auto,kvzap,centroidkv",
    share: Annotated[float, typer.Option(help="Of the cache.")] = 0.125,
    tasks: Annotated[str, typer.Option(help="'chapter', or RULER's.")] = "chapter",
    tokens: Annotated[str, typer.Option(help="Of a context, between commas.")] = "3584",
    windows: Annotated[str, typer.Option(help="Between commas; 0 reads whole.")] = "0,1024,512,256",
    chunk: Annotated[int, typer.Option(help="At most the smallest window.")] = 256,
    cases: Annotated[int, typer.Option(help="Contexts of the chapter, or examples of each task.")] = 24,
    batch: Annotated[int, typer.Option(help="Questions at once.")] = 4,
    text: Annotated[Path, typer.Option(help="What the loss is taken of.")] = demo_chapter.FILE,
    stretches: Annotated[int, typer.Option(help="Passages of it.")] = 4,
    dtype: Annotated[str, typer.Option(help="Of the model; float32 answers alike on every platform.")] = "float32",
) -> None:
    """Measure and print the table."""
    network = ckv.load(model, dtype=dtype)
    (book, *_) = sources.books(str(text)).values()
    ids = network.tokenizer.encode(book, add_special_tokens=False)
    print("| tokens | method | window | needles | nats above full | ± |\n|---|---|---|---|---|---|", flush=True)
    for count in map(int, tokens.split(",")):
        asked = examples(network, tasks, count, cases) if cases else []
        texts = passages(ids, count + FOLLOWING, stretches)
        full = losses(network, ckv.Full(), texts, None, batch)
        for name in methods.split(","):
            one = preset(name, ckv.Budget(ratio=share))
            for size in map(int, "0" if name == "full" else windows.split(",")):
                gate = Gate(size, chunk) if size else None
                how: Any = {} if gate is None else {"reading": "gated", "window": gate.window, "chunk": gate.chunk}
                print(f"| {count} | {name} | {size or '-'} |", end="", flush=True)
                print(f" {hits(network, one, asked, batch, **how):.4f} |" if asked else " |", end="", flush=True)
                above = losses(network, one, texts, gate, batch) - full
                line = f" {np.mean(above):.4f} | {np.std(above) / len(above) ** 0.5:.4f} |" if stretches else " | |"
                print(line, flush=True)


if __name__ == "__main__":
    typer.run(main)
