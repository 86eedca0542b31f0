"""Which heads need their rows: those that look single rows up, or those that mix what they read.

    python scripts/studies/lookup_heads.py --limit 4
    python scripts/studies/lookup_heads.py --model runs/qwen3/model --calibration runs/qwen3/calibration.safetensors \\
      --dtype bfloat16 --batch-size 32 --limit 32 --output results/lookup-heads

Lookups are the heads with at least the mean share of the budget, by the model's calibration. First the mixers keep what
the calibration gives them at other budgets, while the lookups stay, and the other way round; KVzap keeps rows as they
are. Then all have one budget, and OrbitKV merges more and more of the rows of its lookups. The questions are RULER's
eight needle tasks, unseen by what compresses. A run that was stopped goes on in its folder.
"""

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from jaxtyping import Float

import clusterkv_jax as ckv
from clusterkv_jax.calibration import Calibration, as_table, read
from clusterkv_jax.checkpoints.loading import calibrated
from clusterkv_jax.cli.terminal import one_sentence_errors, pace, plain_console
from clusterkv_jax.evaluation import batching, manifest, responses, runner
from clusterkv_jax.evaluation.report import table
from clusterkv_jax.evaluation.tasks import cases, suites
from clusterkv_jax.presets import described
from clusterkv_jax.storage.files import write_whole

TASKS = (
    *("niah_single_1", "niah_single_2", "niah_single_3"),
    *("niah_multikey_1", "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "niah_multiquery"),
)


def entries(
    measured: Calibration, budget: float, others: list[float], merged: list[float]
) -> list[batching.MethodEntry]:
    """The rows of the table."""
    looks_up = np.asarray(measured.kept_shares(budget)) >= 1
    rows: dict[str, Any] = {}
    for part in others:
        for who, whose in (("mixers", ~looks_up), ("lookups", looks_up)):
            if part != budget:
                parts = np.where(whose, kept(measured, part), kept(measured, budget))
                rows[f"{who} as at {part:.4g}"] = ckv.KVzap(spread(parts))
    given = spread(kept(measured, budget))
    rows |= {"kvzap": ckv.KVzap(given)}
    rows |= {f"orbitkv, {part:.4g} of lookups merged": ckv.OrbitKV(given, merged=part) for part in merged}
    return [batching.MethodEntry(name, f"{method.budget.ratio:.4f}", method) for name, method in rows.items()]


def kept(measured: Calibration, budget: float) -> Float[np.ndarray, "L K"]:
    """The part of its rows that each head keeps of a budget."""
    return np.minimum(1.0, budget * np.asarray(measured.kept_shares(budget)))


def spread(parts: Float[np.ndarray, "L K"]) -> ckv.Budget:
    """The budget that has each head keep this part of its rows."""
    return ckv.Budget(ratio=float(parts.mean()), shares=as_table(parts))


def main(
    model: Annotated[str, typer.Option(help="'demo' or a folder.")] = "demo",
    calibration: Annotated[str | None, typer.Option(help="Of the model; the demo model has its own.")] = None,
    budget: Annotated[float, typer.Option(help="Share of the cache that the heads in question do not leave.")] = 0.0625,
    others: Annotated[str, typer.Option(help="Shares that one kind of head leaves it for, between commas.")] = (
        "0.25,0.5,1"
    ),
    merged: Annotated[str, typer.Option(help="Parts of the lookups' free rows that merge, between commas.")] = (
        "0,0.15,0.3,0.6,1"
    ),
    length: Annotated[int, typer.Option(help="Tokens of an example.")] = 4096,
    limit: Annotated[int, typer.Option(help="Examples of each task.")] = 100,
    batch_size: Annotated[int, typer.Option(help="Most examples answered together.")] = 16,
    dtype: Annotated[str | None, typer.Option(help="Type of the parameters.", show_default="as stored")] = None,
    output: Annotated[Path, typer.Option(help="Folder of the answers.")] = Path("results/lookup-heads"),
) -> None:
    """Answer, and print the table."""
    with one_sentence_errors(False):
        network = ckv.load(model, dtype=dtype)
        network = network if calibration is None else calibrated(network, read(calibration))
        if network.calibration is None:
            raise ValueError(f"{model} has no calibration: give the file that clusterkv calibrate wrote for it.")
        numbers = [[float(part) for part in text.split(",") if part] for text in (others, merged)]
        asked = entries(network.calibration, budget, *numbers)
        options = suites.Options(tasks=TASKS, lengths=(length,), limit=limit)
        positions = network.config.max_positions
        examples = suites.cases("ruler", options, network.tokenizer, positions)
        prompts = [cases.build_prompt(case, network.tokenizer, positions) for case in examples]
        jobs = [batching.Job(i, *pair) for i, pair in enumerate(zip(examples, prompts, strict=True))]
        config = {"suite": "ruler", "model": model, "parameters": network.config.weights, "dtype": dtype}
        config = runner.settings(config, jobs, asked, partial(described, network))
        batches = batching.plan(jobs, asked, batch_size)
        answers = responses.responder(network, batches, batch_size)
        with pace(len(jobs) * len(asked), 1, {}) as on_lines:
            lines = runner.record(output, config, manifest.about(None, None), batches, answers, on_lines=on_lines)
        text = table.markdown(table.summarize(lines))
        write_whole(output / "table.md", text)
        plain_console(width=240).print(text)


if __name__ == "__main__":
    typer.run(main)
