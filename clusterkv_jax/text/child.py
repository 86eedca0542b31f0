"""The process in which a model's own programs are tried: its chat template, and its tokenizer before the first use.

A template is a program, and a tokenizer's files are nearly one: some never end, some take all memory, some make the
library abort. Here that ends this process and no other. Jobs come in as lines of JSON, `[kind, arguments]`; so do
answers go out, `{"answer": ...}` or `{"error": ...}`. A job beyond its limits is an error; a single call that does not
return to Python ends the process by a signal.
"""

import json
import math
import os
import signal
import sys
from pathlib import Path
from typing import Any

MIB = 2**20
# Seconds of computing. A template takes milliseconds, a tokenizer a second for ten megabytes.
RENDER_S, TRY_S = 1, 4
# Memory beside what the process has at its start, and beside what large files take.
MEMORY = 1024 * MIB
# Letters that templates add to messages: a system prompt and descriptions of tools.
MOST_ADDED = MIB


def main() -> None:
    """Answers jobs until there are no more."""
    answers = os.fdopen(os.dup(1), "w", encoding="ascii")
    os.dup2(2, 1)  # what a library prints is no answer
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which then closes the line
    jobs = {"render": _render, "cut": _cut, "try": _try}
    for line in sys.stdin:
        kind, arguments = json.loads(line)
        try:
            answer = {"answer": jobs[kind](**arguments)}
        except MemoryError:
            answer = {"error": "It takes too much memory"}
        except BaseException as error:  # a template raises what it likes; a panic of Rust is no Exception
            answer = {"error": str(error) or type(error).__name__}
        finally:
            _limit(0)
        json.dump(answer, answers)
        answers.write("\n")
        answers.flush()


def _limit(seconds: float, memory: int = MEMORY) -> None:
    """TimeoutError after so many seconds of computing (0: never), a signal soon after; no more memory than this.

    Both times count the system's part, which is most of it where much memory is touched.
    """
    try:
        import resource
    except ModuleNotFoundError:  # Windows has neither limit
        return
    signal.signal(signal.SIGPROF, _late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    used = resource.getrusage(resource.RUSAGE_SELF)
    _at_most(resource.RLIMIT_CPU, math.ceil(used.ru_utime + used.ru_stime + seconds) + 1 if seconds else None)
    statm = Path("/proc/self/statm")
    if statm.exists():
        held = int(statm.read_text().split()[0]) * resource.getpagesize()
        _at_most(resource.RLIMIT_AS, held + memory if seconds else None)


def _at_most(kind: int, most: int | None) -> None:
    """Set a limit of this process; None: as high as it may be."""
    import resource

    highest = resource.getrlimit(kind)[1]
    if most is None or (highest != resource.RLIM_INFINITY and most > highest):
        most = highest
    resource.setrlimit(kind, (most, highest))


def _late(_number: int, _frame: object) -> None:
    raise TimeoutError("It takes too long.")


def _render(template: str, conversations: list[Any], variables: dict[str, Any]) -> list[str]:
    """Conversations in a template, each with the beginning of an answer if the variables say so."""
    from transformers.utils.chat_template_utils import render_jinja_template

    _limit(RENDER_S, MEMORY // 4)
    texts, _ = render_jinja_template(conversations=conversations, chat_template=template, **variables)
    most = 8 * sum(len(json.dumps(conversation)) for conversation in conversations) + MOST_ADDED
    if (letters := sum(map(len, texts))) > most:
        raise ValueError(f"It writes {letters:,} letters, and {most:,} are allowed.")
    return list(texts)


def _cut(
    template: str, conversation: list[Any], number: int, letters: int, mark: str, variables: dict[str, Any]
) -> tuple[str, str, str | None]:
    """A conversation as the template writes it, before and behind a cut after so many letters of a message's content,
    which is marked for that; and all of it without a mark, where that is not both. Where the mark shows other than
    once, nothing stands before the cut.
    """
    content = conversation[number]["content"]
    marked = {**conversation[number], "content": content[:letters] + mark + content[letters:]}
    both = [[*conversation[:number], marked, *conversation[number + 1 :]], conversation]
    with_mark, plain = _render(template, both, variables)
    before, *after = with_mark.split(mark)
    if len(after) != 1:
        return "", plain, None
    return before, after[0], None if before + after[0] == plain else plain


def _try(file: str, nbytes: int) -> None:
    """Load a tokenizer.json of so many bytes, and encode what brings out the worst in it."""
    from clusterkv_jax.text.trial import try_out

    _limit(TRY_S + nbytes / (2 * MIB), MEMORY + 32 * nbytes)
    try_out(file)


if __name__ == "__main__":
    main()
