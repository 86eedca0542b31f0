"""A text, or a question about it, as a user's message in the model's chat template."""

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from clusterkv_jax.schema import shown

# A template takes milliseconds.
SECONDS = 10

# Characters without a meaning; one that occurs nowhere else marks the cut.
_PRIVATE = range(0xF0000, 0xFFFFE)


def turn(tokenizer: Any, content: str) -> str:
    """A user's message in the template, and the beginning of the answer. Raises ValueError if the template fails."""
    message = [{"role": "user", "content": content}]
    try:
        with _in_time():
            return tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # a template is a program, which may raise whatever it likes
        raise ValueError(f"The model's chat template fails: {shown(error) or type(error).__name__}.") from error


@contextmanager
def _in_time() -> Iterator[None]:
    """Ends a template's loops after `SECONDS`; transformers' sandbox bounds what they may touch, not how long they run.

    Lines of a template are lines of Python to the interpreter, which shows them to a function of ours one by one.
    """
    end = time.monotonic() + SECONDS

    def on_line(frame: FrameType, event: str, value: Any) -> Any:
        if frame.f_code.co_filename != "<template>":
            return None
        if time.monotonic() > end:
            raise TimeoutError(f"Its loops run for more than {SECONDS} seconds.")
        return on_line

    before = sys.gettrace()
    sys.settrace(on_line)
    try:
        yield
    finally:
        sys.settrace(before)


def cut_turn(tokenizer: Any, text: str, question: str) -> tuple[str, str]:
    """A message of a text and a question, as what comes before the question, and the question with what follows it.

    The first part is the same for every question, so that it can be compressed before the question is known.

    Raises:
        ValueError: one sentence, if the template fails, or shows a message other than once and whole.
    """
    used = set(f"{text}{question}{tokenizer.chat_template}")
    mark = next(chr(number) for number in _PRIVATE if chr(number) not in used)
    parts = turn(tokenizer, text + mark + question).split(mark)
    same = parts[0] == turn(tokenizer, text + mark).split(mark)[0]
    whole = len(parts) == 2 and "".join(parts) == turn(tokenizer, text + question) and question.strip() in parts[1]
    if not (same and whole):
        raise ValueError("The model's chat template must show a message once and whole to be cut before a question.")
    return parts[0], parts[1]
