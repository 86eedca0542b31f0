"""Five turns about one context, through `ckv.Conversation`: what each turn scores, reads and waits for.

    multi_turn     each question follows the model's own answers
    multi_request  each question follows the context alone, in a fork

Contexts and questions are those of the suite `turns`, which has the right answers in the place of the model's own. A
line of `--output` is a turn, and several runs of other methods may share it; a run that was interrupted, or has come to
its `--limit`, goes on behind its last whole conversation.

    python scripts/studies/conversations.py --model smollm2 --methods full,auto,snapkv --output turns.jsonl
"""

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.box import MARKDOWN
from rich.console import Console
from rich.table import Table

import clusterkv_jax as ckv
from clusterkv_jax.evaluation.scoring import score
from clusterkv_jax.evaluation.tasks import sources, turns
from clusterkv_jax.evaluation.tasks.cases import Case, counter
from clusterkv_jax.evaluation.tasks.haystack import book
from clusterkv_jax.presets import find_preset

# Tokens of a question and its answer, in a chat template.
TURN = 160


def contexts(tokenizer: Any, length: int, count: int, seed: int) -> list[list[Case]]:
    """The cases of each context, five for each mode."""

    def count_all(texts: list[str]) -> list[int]:
        return [len(row) for row in tokenizer(texts, add_special_tokens=False)["input_ids"]]

    books = [book(text, count_all) for text in sources.books(None).values()]
    one = counter(tokenizer)
    return [turns.conversation(number, length, one, books[number % len(books)], seed) for number in range(count)]


def spoken(begun: ckv.Conversation, cases: list[Case], modes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What comes of each turn in these modes; all begin where the context was read."""
    talks = {mode: begun.fork() for mode in modes}
    for case in cases:
        mode, _, turn = case.task.rpartition("_")
        if mode not in modes:
            continue
        talk = talks[mode] if mode == "multi_turn" else begun.fork()
        text = "".join(talk.say(case.question.strip()))
        assert talk.result is not None
        told = {"mode": mode, "turn": int(turn), "score": score(case.metric, text, case.answers)}
        told |= {"read": talk.read_tokens, "ttft_s": talk.result.stats.ttft_s, "tokens": talk.tokens}
        yield told | {"rows": talk.rows, "nbytes": talk.nbytes, "text": text}


def table(records: list[dict[str, Any]]) -> Table:
    """Means by method, mode and turn."""
    shown = Table(box=MARKDOWN)
    for name in ("method", "mode", "turn", "score", "tokens read", "first token, ms", "rows", "MB", "conversations"):
        shown.add_column(name, justify="left" if name in ("method", "mode") else "right")
    keys = list(dict.fromkeys((each["method"], each["mode"], each["turn"]) for each in records))
    for key in sorted(keys, key=lambda key: (key[1], key[2])):
        mine = [each for each in records if (each["method"], each["mode"], each["turn"]) == key]

        def mean(name: str, scale: float = 1, mine: list[dict[str, Any]] = mine) -> float:
            return scale * float(np.mean([each[name] for each in mine]))

        worth = f"{mean('score', 100):.1f}", f"{mean('read'):.0f}"
        numbers = *worth, f"{mean('ttft_s', 1e3):.0f}", f"{mean('rows'):.0f}"
        shown.add_row(key[0], key[1], str(key[2]), *numbers, f"{mean('nbytes', 1e-6):.1f}", str(len(mine)))
    return shown


def main(
    model: Annotated[str, typer.Option(help="As of clusterkv generate.")] = "smollm2",
    methods: Annotated[str, typer.Option(help="Presets, between commas.")] = "full,auto,snapkv,streamingllm",
    ratio: Annotated[float, typer.Option(help="The share of the cache that is kept.")] = 0.125,
    length: Annotated[int, typer.Option(help="Tokens of a context.")] = 4096,
    count: Annotated[int, typer.Option(help="Contexts.")] = 20,
    seed: Annotated[int, typer.Option(help="Of the contexts.")] = 42,
    modes: Annotated[str, typer.Option(help="Which of both, between commas.")] = ",".join(turns.GROUPS),
    limit: Annotated[float, typer.Option(help="Seconds after which no other conversation begins.")] = float("inf"),
    output: Annotated[Path | None, typer.Option(help="A file of JSON lines.")] = None,
) -> None:
    """Hold conversations, and print what each turn was worth."""
    end, network = time.monotonic() + limit, ckv.load(model)
    cases = contexts(network.tokenizer, length, count, seed)
    lines = output.read_text().splitlines() if output is not None and output.exists() else []
    records = [json.loads(line) for line in lines]
    chosen = modes.split(",")
    for name in methods.split(","):
        mine = [each for each in records if each["method"] == name and each["mode"] in chosen]
        done = len(mine) // (len(chosen) * turns.TURNS)
        how: Any = {"ratio": ratio} if find_preset(name).takes_budget else {}
        room = length + turns.TURNS * TURN
        begun = ckv.Conversation(network, method=name, max_tokens=room, max_new_tokens=turns.NEW_TOKENS, **how)
        for number, each in enumerate(cases[done:], done):
            if time.monotonic() > end:
                break
            talk = begun.fork()
            talk.read(each[0].context)
            new = [{"method": name, **told} for told in spoken(talk, each, chosen)]
            records += new
            if output is not None:
                with output.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in new)
            print(f"{name}, conversation {number}: {[round(told['score'], 2) for told in new]}", flush=True)
    Console(width=140).print(table(records))


if __name__ == "__main__":
    typer.run(main)
