"""What gated reading costs beside compression afterwards: needles found, and the loss of the text that follows.

    python scripts/studies/gated_reading.py
    python scripts/studies/gated_reading.py --model smollm2 --tokens 4096,8192 --text book.txt --dtype bfloat16

Each context is a chapter with four needles at random depths (RULER's wording). It is read once, without any question;
then it is asked for each of the four numbers. A hit holds the right value. The loss is that of the `FOLLOWING` tokens
behind `tokens` of the text, in nats a token, above that of the full cache. Rows with a window are gated; "-" is read
whole.
"""

from pathlib import Path
from typing import Annotated, Any

import demo_chapter
import jax
import jax.numpy as jnp
import numpy as np
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.progress import track
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.decoding import append_step_jit
from clusterkv_jax.generation.batch import Gate
from clusterkv_jax.generation.gated_reading import gated_prefill
from clusterkv_jax.presets import completed, preset
from clusterkv_jax.text.chat import has_template

REPLY = 32  # tokens: a uuid and the end of the sentence
FOLLOWING = 256  # tokens of a text behind what is read


def hits(model: ckv.Model, method: Any, examples: list[tuple[Any, ...]], name: str, **reading: Any) -> float:
    """Share of questions whose answer holds the right value."""
    found, chat = [], has_template(model.tokenizer)
    for some in track(examples, name, console=Console(stderr=True), transient=True):
        questions = [example.question + ("" if chat else example.answer_prefix) for example in some]
        asked: Any = {"questions": questions, "method": method, "max_new_tokens": REPLY, "chat": chat, **reading}
        texts = ckv.generate(model, [example.context for example in some], **asked).texts
        found += [example.answers[0] in text for text, example in zip(texts, some, strict=True)]
    return float(np.mean(found))


def loss(model: ckv.Model, method: Any, ids: list[int], tokens: int, gate: Gate | None) -> float:
    """Nats a token of what follows the first `tokens`, all of which but the last one are read."""
    read, rest = np.asarray([ids[: tokens - 1]], np.int32), np.asarray([ids[tokens - 1 : tokens + FOLLOWING]], np.int32)
    sizes: Any = {"max_new_tokens": FOLLOWING, "step_tokens": FOLLOWING}
    args = model.params, model.config, completed(model, method)
    lengths = np.asarray([tokens - 1], np.int32)
    if gate is None:
        cache, _ = ckv.prefill(*args, read, lengths, **sizes)
    else:
        cache, _ = gated_prefill(*args, read, lengths, gate=gate, **sizes)
    at, counts = jnp.arange(FOLLOWING, dtype=jnp.int32)[None], jnp.asarray([FOLLOWING], jnp.int32)
    _, logits = append_step_jit(*args, cache, jnp.asarray(rest[:, :-1]), counts, at)
    likely = jax.nn.log_softmax(logits[0].astype(jnp.float32))
    return -float(jnp.mean(jnp.take_along_axis(likely, jnp.asarray(rest[0, 1:, None]), axis=1)))


def main(
    model: Annotated[str, typer.Option(help="'demo', 'smollm2' or a folder.")] = "demo",
    methods: Annotated[str, typer.Option(help="Presets, between commas.")] = "auto,kvzap,centroidkv",
    share: Annotated[float, typer.Option(help="Of the cache.")] = 0.125,
    tokens: Annotated[str, typer.Option(help="Of a context, between commas.")] = "3584",
    windows: Annotated[str, typer.Option(help="Between commas.")] = "1024,512,256",
    chunk: Annotated[int, typer.Option(help="At most the smallest window.")] = 256,
    cases: Annotated[int, typer.Option(help="Contexts; each is asked four questions.")] = 24,
    text: Annotated[Path, typer.Option(help="What the loss is taken of.")] = demo_chapter.FILE,
    dtype: Annotated[str, typer.Option(help="Of the model; float32 answers alike on every platform.")] = "float32",
) -> None:
    """Measure and print the table."""
    network = ckv.load(model, dtype=dtype)
    ids = network.tokenizer.encode(text.read_text(encoding="utf-8"), add_special_tokens=True)
    title = f"{cases * demo_chapter.NEEDLES.keys} questions, {share:.1%} kept"
    table = Table("tokens", "method", "window", "needles", "nats above full", title=title, box=MARKDOWN)
    for count in map(int, tokens.split(",")):
        if len(ids) < count + FOLLOWING:
            raise ValueError(f"--text holds {len(ids)} tokens; {count + FOLLOWING} are needed for --tokens {count}.")
        examples = demo_chapter.contexts(network.tokenizer, count, cases, 0)
        full = loss(network, ckv.Full(), ids, count, None)
        table.add_row(str(count), "full", "-", f"{hits(network, ckv.Full(), examples, 'full'):.3f}", "0")
        for name in methods.split(","):
            one = preset(name, ckv.Budget(ratio=share))
            for size in (None, *map(int, windows.split(","))):
                gate = None if size is None else Gate(size, chunk)
                how: Any = {} if gate is None else {"reading": "gated", "window": gate.window, "chunk": gate.chunk}
                found = hits(network, one, examples, f"{count} {name} {size or '-'}", **how)
                above = loss(network, one, ids, count, gate) - full
                table.add_row(str(count), name, str(size or "-"), f"{found:.3f}", f"{above:.4f}")
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
