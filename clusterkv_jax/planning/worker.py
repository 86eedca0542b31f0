"""`python -m clusterkv_jax.planning.worker`: a question from standard input, measures as JSON lines to standard output.

A process of its own, since libtpu reads its settings from the environment once, and since a compiler may abort.
"""

import json
import sys
from dataclasses import asdict
from typing import Any

import msgspec

from clusterkv_jax.planning.plan_types import PlanRequest


def say(**message: Any) -> None:
    """One message to the process that waits."""
    print(json.dumps(message), flush=True)


def main() -> None:
    """Progress as it comes, then measures or an error."""
    question = msgspec.json.decode(sys.stdin.read(), type=PlanRequest)
    from clusterkv_jax.planning.compile_stats import compiled_measures

    try:
        say(measures=asdict(compiled_measures(question, lambda doing: say(progress=doing))))
    except ValueError as error:
        say(error=str(error))


if __name__ == "__main__":
    main()
