"""Times 64 questions to a context that an engine reads once, against reading it for each.

    python scripts/benchmarks/benchmark_questions.py                              Llama-3.1-8B, 64k tokens, 16 slots
    python scripts/benchmarks/benchmark_questions.py --slots 16 --slots 32

Weights are random, a question has 16 tokens and so has its answer. `clusterkv benchmark --engine` times the same after
its requests; this takes a minute. The first round of an engine compiles and does not count.
"""

import argparse

from benchmark_common import environment

import clusterkv_jax as ckv
from clusterkv_jax.benchmark import own_runner
from clusterkv_jax.benchmark.grid import GridRequest
from clusterkv_jax.benchmark.serving import QUESTIONS, questions_seconds
from clusterkv_jax.presets import preset

ROOM = 100  # tokens of a question and its answer, and some more


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama-3.1-8b", help="'demo', a packaged shape, or a folder")
    parser.add_argument("--method", default="centroidkv", help="a preset that takes a budget")
    parser.add_argument("--ratio", type=float, default=0.2, help="share of the rows")
    parser.add_argument("--tokens", type=int, default=65536, help="of the context")
    parser.add_argument("--slots", type=int, action="append", help="of the engine; repeat it [16]", default=None)
    parser.add_argument("--repeats", type=int, default=2, help="rounds, beside the first")
    options = parser.parse_args()
    method = preset(options.method, ckv.Budget(ratio=options.ratio))
    model = own_runner.the_model(
        GridRequest(options.model, ((options.method, None),), (options.tokens,), (1,), (), 1, ROOM, None)
    )
    print(f"{environment()}, {options.model}, {options.method} {options.ratio:.3g}, {options.tokens} tokens\n")
    print("| slots | reading, s | all questions, s | as fast as reading each time | programs |\n|---|---|---|---|---|")
    for slots in options.slots or [16]:
        engine = ckv.Engine(model, method=method, slots=slots, max_tokens=options.tokens + ROOM, reserve=ROOM)
        rounds = [
            questions_seconds(engine, model.config.vocab_size, options.tokens) for _ in range(1 + options.repeats)
        ]
        for read, rest in rounds[1:]:
            gain = (QUESTIONS * read + rest) / (read + rest)
            print(f"| {slots} | {read:.3f} | {rest:.3f} | {gain:.1f} × | {engine.stats().programs} |", flush=True)
        engine.close()


if __name__ == "__main__":
    main()
