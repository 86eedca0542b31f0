"""Core time of a token on a CPU, by how weights are held. Other programs on the machine lengthen a clock's time more.

python scripts/benchmarks/core_time.py smollm2
"""

import time
from typing import Annotated, Any

import typer

import clusterkv_jax as ckv

TEXT = "The history of the city begins with a small village on the river. " * 8
HELD: dict[str, dict[str, Any]] = {
    "stored": {"weights": "stored"},
    "bfloat16": {"weights": "dequantised", "dtype": "bfloat16"},
}


def core_seconds(model: Any, tokens: int) -> float:
    """Of a whole call that writes so many tokens. Raises ValueError where the model ends before."""
    start = time.process_time()
    written = len(ckv.generate(model, [TEXT], method=ckv.Full(), max_new_tokens=tokens).tokens[0])
    if written != tokens:
        raise ValueError(f"The model ended after {written} of {tokens} tokens.")
    return time.process_time() - start


def main(
    model: Annotated[str, typer.Argument(help="As load takes it.")],
    tokens: Annotated[int, typer.Option(help="Timed: calls of so many, and of twice as many.", min=1)] = 32,
    repeats: Annotated[int, typer.Option(help="Calls of each; the least counts.", min=1)] = 5,
) -> None:
    """Models in turns: one token's time is the difference of two calls."""
    models = {name: ckv.load(model, **options) for name, options in HELD.items()}
    counts = (tokens, 2 * tokens)
    times: dict[tuple[str, int], list[float]] = {}
    for repeat in range(repeats + 1):
        for name, loaded in models.items():
            for count in counts:
                seconds = core_seconds(loaded, count)
                if repeat:  # the first compiles
                    times.setdefault((name, count), []).append(seconds)
    for name in models:
        short, long = (min(times[name, count]) for count in counts)
        typer.echo(f"{name}: {1e3 * (long - short) / tokens:.1f} ms of a core a token")


if __name__ == "__main__":
    typer.run(main)
