"""Five turns over one context, in the two modes of SCBench (Li et al., 2024), whose data sets this generates anew.

multi_turn     earlier questions with their right answers stand behind the compressed context, in the cache
multi_request  every question meets the compressed context alone

A context is the same in both modes, and so are its questions: RULER's, each for another number hidden in a book.
"""

from dataclasses import replace

import numpy as np

from clusterkv_jax.evaluation.tasks import synthetic
from clusterkv_jax.evaluation.tasks.cases import Case
from clusterkv_jax.evaluation.tasks.haystack import Book, TokenCounter
from clusterkv_jax.evaluation.tasks.ruler import from_example, room_beside
from clusterkv_jax.evaluation.tasks.synthetic import Needles

TURNS = 5
GROUPS = {mode: tuple(f"{mode}_{turn + 1}" for turn in range(TURNS)) for mode in ("multi_turn", "multi_request")}
TASKS = tuple(task for tasks in GROUPS.values() for task in tasks)
NEW_TOKENS = 64
# Tokens of an earlier question and its answer, in a chat template.
TURN_ROOM = 96


def conversation(number: int, length: int, count: TokenCounter, book: Book, seed: int) -> list[Case]:
    """The cases of one context of `length` tokens, all turns included: a case for each task.

    Raises ValueError for a length without room for the turns.
    """
    rng = np.random.default_rng([seed, length, number])
    room = room_beside(NEW_TOKENS + (TURNS - 1) * TURN_ROOM, length, "turns")
    examples = synthetic.niah(rng, room, count, Needles("book", keys=TURNS), book, questions=TURNS, split="valid")
    said = tuple((each.question, each.answer_prefix + each.reply) for each in examples)
    return [
        replace(
            from_example(example, f"{mode}/{length}/{number}/{turn + 1}", {"length": length}),
            task=GROUPS[mode][turn],
            earlier=said[:turn] if mode == "multi_turn" else (),
            max_new_tokens=NEW_TOKENS,
        )
        for mode in GROUPS
        for turn, example in enumerate(examples)
    ]
