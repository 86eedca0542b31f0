"""Steps of an optimizer with checkpoints: a run that is killed and started again ends with the same numbers.

A state is `{"params", "opt_state"}`. Batches are a function of their step's number, so that nothing else is remembered.
"""

import math
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from clusterkv_jax.runtime.extras import library
from clusterkv_jax.storage.files import write_whole

optax = library("optax", "Training", "train")
ocp = library("orbax.checkpoint", "Training", "train")

TrainState = dict[str, Any]
CHECKPOINTS = "checkpoints"
# The newest, and the one before it.
MOST_CHECKPOINTS = 2


# --- one step ---


def adamw(steps: int, *, learning_rate: float, warmup: int, weight_decay: float, b2: float = 0.95) -> Any:
    """AdamW with clipping, a warm-up, and a cosine down to zero; nothing of one dimension, such as norms, decays."""
    schedule = optax.warmup_cosine_decay_schedule(0.0, learning_rate, warmup, steps)
    rule = optax.adamw(
        schedule, b2=b2, weight_decay=weight_decay, mask=lambda params: jax.tree.map(lambda p: p.ndim > 1, params)
    )
    return optax.chain(optax.clip_by_global_norm(1.0), rule)


def updated(optimizer: Any, state: TrainState, grads: Any) -> TrainState:
    """The state after a step of the optimizer."""
    with jax.numpy_dtype_promotion("standard"):  # optax counts steps in integers and multiplies floats with them
        updates, opt_state = optimizer.update(grads, state["opt_state"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt_state": opt_state}


# --- the run ---


def claim(file: Path, described: str) -> None:
    """Remember in a file whose checkpoints lie beside it. Raises ValueError if there are another's."""
    file.parent.mkdir(parents=True, exist_ok=True)
    others = file.exists() and file.read_text(encoding="utf-8") != described
    if others and any((file.parent / CHECKPOINTS).glob("*")):
        raise ValueError(
            f"{file} describes another {file.stem} than this run's: choose another --work folder or delete it."
        )
    write_whole(file, described)


def run(
    folder: Path,
    new_state: Callable[[], TrainState],
    step: Callable[[TrainState, Any], tuple[TrainState, Float[Array, " metrics"]]],
    batches: Callable[[int], Iterator[Any]],
    *,
    steps: int,
    save_every: int,
    seconds: float = math.inf,
    asked: Callable[[], bool] = lambda: False,
    report: Callable[[int, Any, Array], None] = lambda number, batch, metrics: None,
    after_step: Callable[[int], None] = lambda number: None,
) -> tuple[TrainState, int]:
    """Train from the newest checkpoint, or from a new state, until the last step, for a time, or until asked to end.

    Args:
        folder: whose `checkpoints` are written, and continued.
        new_state: makes the first state; traced where there is a checkpoint.
        step: of a state, which it may donate, and a batch; returns the next state and numbers to report.
        batches: those from a step on.
        steps: number of the last.
        save_every: steps between checkpoints. They are written while training goes on.
        seconds: after which the run saves and ends.
        asked: whether it shall save and end now.
        report: gets the number of each finished step, its batch and its numbers.
        after_step: as `report`, when a checkpoint of this step has begun.

    Returns:
        the state and the number of steps done, both saved.
    """
    began = time.monotonic()
    options = ocp.CheckpointManagerOptions(max_to_keep=MOST_CHECKPOINTS)
    with ocp.CheckpointManager((folder / CHECKPOINTS).resolve(), options=options) as manager:
        state, number = _restored(manager, new_state)
        for batch in batches(number) if number < steps else ():
            state, metrics = step(state, batch)
            number += 1
            report(number, batch, metrics)
            last = number == steps or asked() or time.monotonic() - began > seconds
            if last or number % save_every == 0:
                # A copy: the next step donates the state, and a CPU's checkpoint is written from these very buffers.
                manager.save(number, args=ocp.args.StandardSave(jax.tree.map(jnp.copy, state)))
            after_step(number)
            if last:
                break
    return state, number


def _restored(manager: Any, new_state: Callable[[], TrainState]) -> tuple[TrainState, int]:
    """The newest checkpoint or a new state, placed alike, so that a resumed run compiles nothing twice."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    step = manager.latest_step()
    if step is None:
        return jax.device_put(new_state(), sharding), 0
    abstract = jax.eval_shape(new_state)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract)
    return dict(manager.restore(step, args=ocp.args.StandardRestore(abstract))), step


@contextmanager
def asked_to_end() -> Iterator[Callable[[], bool]]:
    """Whether the system has asked for the end (SIGTERM) since the block began."""
    signals: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    try:
        yield lambda: bool(signals)
    finally:
        signal.signal(signal.SIGTERM, before)


@contextmanager
def progress(
    console: Console, steps: int, start: int = 0, *, every: int = 100, names: tuple[str, str] = ("loss", "answers")
) -> Iterator[Callable[[int, int, Array], None]]:
    """A bar on a terminal, elsewhere a line every so many steps: the mean loss, a share, and tokens a second.

    Called with a step's number, its tokens and its two numbers, which are read that seldom: reading waits for the
    accelerator.
    """
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("training", total=steps, completed=start)
        recent: list[Array] = []
        mark, count = time.monotonic(), 0

        def report(step: int, tokens: int, metrics: Array) -> None:
            nonlocal mark, count
            recent.append(metrics)
            count += tokens
            if step % every == 0 or step == steps:
                loss, share = np.mean(np.stack(recent), axis=0)
                now = time.monotonic()
                label = f"{names[0]} {loss:.3f} {names[1]} {share:.1%} {count / (now - mark) / 1e6:.2f} M tokens/s"
                bar.update(task, completed=step, description=label)
                if not console.is_terminal:
                    console.print(f"step {step}/{steps} {label}")
                recent.clear()
                mark, count = now, 0

        yield report
