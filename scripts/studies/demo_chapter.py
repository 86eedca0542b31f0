"""The chapter of a book that the studies compress, and needles hidden in it."""

import re
from pathlib import Path
from typing import Any

import numpy as np

from clusterkv_jax.evaluation.tasks import haystack, synthetic

FILE = Path(__file__).parents[2] / "configs" / "demo" / "mast_head.txt"
NEEDLES = synthetic.Needles(keys=4)


def contexts(
    tokenizer: Any, tokens: int, count: int, seed: int, needles: synthetic.Needles = NEEDLES, questions: int = 4
) -> list[tuple[synthetic.Example, ...]]:
    """`count` contexts of `tokens` tokens with needles in the chapter, each as an example per question."""

    def tokens_of(text: str) -> int:
        return len(tokenizer.encode(text, add_special_tokens=False))

    text = FILE.read_text(encoding="utf-8").split("\n")[1]
    chapter = re.sub(r" One of the special magic numbers for \S+ is: \d+\.", "", text)
    book = haystack.book(chapter, lambda texts: [tokens_of(text) for text in texts])
    rngs = (np.random.default_rng([seed, i]) for i in range(count))
    return [synthetic.niah(rng, tokens, tokens_of, needles, book, questions=questions, split="valid") for rng in rngs]
