"""The cases of `clusterkv evaluate --suite ruler` answered through NVIDIA's kvpress (torch) from the same weights.

    python scripts/studies/kvpress_scores.py answer --model smollm2 --tasks needles --lengths 2048 --limit 100
    python scripts/studies/kvpress_scores.py table

`answer` goes on where it stopped, as often as it is called. With `--only` and `--ratio` processes share the work: each
press and ratio has a folder of its own, as `clusterkv evaluate` writes it. Needs an environment of its own:
`pip install kvpress==0.5.5 'transformers<5.3'`, then `pip install -e '.[gguf]'`.

As in `clusterkv evaluate`, the context is compressed before the question is fed, and decoding is greedy. An answer also
ends where its score can rise no more. kvpress's KVzap models are of other language models: in their place its DMS gets
the scores of Compactor, which needs no training, and the threshold that keeps the share of contexts of another seed.
"""

import platform
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, cast

import jax
import numpy as np
import typer

from clusterkv_jax.checkpoints.loading import Checkpoint, open_checkpoint
from clusterkv_jax.cli.options import split
from clusterkv_jax.cli.terminal import pace
from clusterkv_jax.evaluation import runner
from clusterkv_jax.evaluation.batching import EvaluationBatch, Job, MethodEntry, plan
from clusterkv_jax.evaluation.records import Record
from clusterkv_jax.evaluation.report.table import budget_name, cell_text, notes, summarize
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.settings import settings
from clusterkv_jax.evaluation.tasks import suites
from clusterkv_jax.evaluation.tasks.cases import build_prompt
from clusterkv_jax.models.hf_config import end_ids
from clusterkv_jax.runtime.extras import versions

# Examples of each task that the threshold of DMS is measured on.
MEASURED = 2
# Answers that are written together.
BATCH = 50
PACKAGES = ("clusterkv-jax", "kvpress", "torch", "transformers", "tokenizers", "gguf", "numpy")

Output = Annotated[Path, typer.Option(help="Folder of all answers.")]


def jobs_of(checkpoint: Checkpoint, options: suites.Options) -> list[Job]:
    """RULER's cases and their tokens, as `clusterkv evaluate` makes them."""
    tokenizer, positions = checkpoint.tokenizer(), checkpoint.config.max_positions
    examples = suites.cases("ruler", options, tokenizer, positions)
    return [Job(i, case, build_prompt(case, tokenizer, positions)) for i, case in enumerate(examples)]


def answer(
    model: Annotated[str, typer.Option(help="As `clusterkv evaluate` takes it.")] = "smollm2",
    tasks: Annotated[str, typer.Option(help="RULER's tasks, between commas.")] = "needles",
    lengths: Annotated[int, typer.Option(help="Tokens of an example.")] = 2048,
    limit: Annotated[int, typer.Option(help="Examples of each task.", min=1)] = 100,
    seed: Annotated[int, typer.Option(help="Of what is generated.", min=0)] = 0,
    only: Annotated[list[str], typer.Option(help="A press; again for several. All by default.")] = [],  # noqa: B006
    ratio: Annotated[list[float], typer.Option(help="Share kept; again for several.")] = [0.25, 0.125, 0.0625],  # noqa: B006
    output: Output = Path("results/kvpress"),
) -> None:
    """Answer what is missing, one press and ratio after the other."""
    import kvpress_answers as kvpress

    if unknown := set(only) - set(kvpress.PRESSES):
        raise typer.BadParameter(f"--only {', '.join(unknown)} is unknown; allowed: {', '.join(kvpress.PRESSES)}.")
    if not all(0 < share < 1 for share in ratio):
        raise typer.BadParameter(f"--ratio must be between 0 and 1, got {', '.join(map(str, ratio))}.")
    jax.config.update("jax_platforms", "cpu")  # the accelerator is torch's
    checkpoint = open_checkpoint(model)
    tokenizer, config = checkpoint.tokenizer(), checkpoint.config
    ends = end_ids(config.vocab_size, config.eos_ids, tokenizer=tokenizer.eos_token_id)
    options = suites.Options(split([tasks]), (lengths,), limit, seed=seed)
    jobs, network = jobs_of(checkpoint, options), kvpress.load(checkpoint, tokenizer)
    told = {"suite": "ruler", "model": model, "parameters": checkpoint.fingerprint(np.dtype("bfloat16"))}
    told |= {"dtype": "bfloat16", "query_aware": False, "batch_size": BATCH}
    about = {"command": shlex.join(["python", *sys.argv]), "device": kvpress.device()}
    about |= {"versions": {"python": platform.python_version(), **versions(PACKAGES)}}

    @cache
    def others() -> list[Sequence[int]]:
        return [job.prompt.context for job in jobs_of(checkpoint, replace(options, limit=MEASURED, seed=seed + 1))]

    for name in only or kvpress.PRESSES:
        for share in (1.0,) if name == "full" else ratio:
            print(f"{name} {share}", file=sys.stderr)
            press = kvpress.PRESSES[name](1 - share)
            if name == "dms-compactor":
                press.threshold = kvpress.threshold(network, press.press, share, others())
            respond = kvpress.responder(network, press, tokenizer, ends, jobs)
            with pace(len(jobs), 1, {}) as on_lines:
                folder, entry = output / f"{name}-{share}", MethodEntry(name, str(share), cast(Any, name))
                batches = plan(jobs, [entry], BATCH, lambda *_: True)
                asked = settings(told, jobs, [entry])
                runner.record(folder, asked, about, batches, partial(_in_turn, respond), on_lines=on_lines)


def _in_turn(
    respond: Callable[..., Sequence[Response]], batches: Sequence[EvaluationBatch]
) -> Iterator[tuple[EvaluationBatch, Sequence[Response]]]:
    for batch in batches:
        first = batch.jobs[0].case
        prompts = [job.prompt for job in batch.jobs]
        yield batch, respond(batch.method, prompts, first.max_new_tokens, first.stop)


def table(output: Output = Path("results/kvpress")) -> None:
    """Print scores, bytes held and rows seen as Markdown."""
    run, lines = runner.join(sorted(file.parent for file in output.glob("*/results.jsonl")))
    print(markdown(lines, run["sessions"]))


def markdown(lines: Sequence[Record], sessions: Sequence[Any] = ()) -> str:
    """The table of answers, bytes beside those of the full cache, which must have answered all examples."""
    summary = summarize(lines, sessions)
    full = {line["id"]: line["cache_bytes"] for line in lines if line["method"] == "full"}
    text = ["| press | asked for | score | bytes held | rows seen |", "|---|---:|---:|---:|---:|"]
    for row in sorted(summary.rows, key=lambda row: (-float(row.budget), row.method)):
        own = [line for line in lines if (line["method"], line["budget"]) == (row.method, row.budget)]
        nbytes = sum(line["cache_bytes"] for line in own) / sum(full[line["id"]] for line in own)
        seen = sum(line["rows"] for line in own) / sum(line["tokens"] for line in own)
        cells = [row.method, budget_name(row.budget), cell_text(row.average, False), f"{nbytes:.1%}", f"{seen:.1%}"]
        text.append(f"| {' | '.join(cells)} |")
    return "\n".join([*text, "", *notes(summary)])


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(answer)
    app.command()(table)
    app()
