"""Fine-tuning a model through a compressed cache."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from clusterkv_jax.decoding import prefill
from clusterkv_jax.methods import Method
from clusterkv_jax.training import loop
from clusterkv_jax.training.examples import Sizes, TrainingExample, batch_of, batches
from clusterkv_jax.training.objective import TrainingBatch, answer_loss
from clusterkv_jax.training.trainees import Trainee


@dataclass(frozen=True)
class Tuning:
    """What determines a run beside its examples and weights: of the file `run.json` beside the checkpoints."""

    model: str
    method: str
    gradient: str
    data: str
    steps: int
    rows: int
    learning_rate: float
    warmup: int
    weight_decay: float
    dtype: str
    seed: int

    @property
    def optimizer(self) -> Any:
        """AdamW as these numbers say."""
        rates = {"learning_rate": self.learning_rate, "warmup": self.warmup, "weight_decay": self.weight_decay}
        return loop.adamw(self.steps, **rates)


def tune(
    tuning: Tuning,
    trainee: Trainee,
    method: Method,
    examples: Sequence[TrainingExample],
    sizes: Sizes,
    work: Path,
    **options: Any,
) -> tuple[loop.TrainState, int]:
    """Train, from the newest checkpoint in `work` on; `options` are those of `loop.run`.

    Raises ValueError if `work` holds another run's checkpoints, or the method cannot compress one of the contexts.
    """
    check_contexts(trainee, method, examples, sizes)
    config, through_rows = trainee.model.config, tuning.gradient == "rows"
    determined = vars(tuning) | {"parameters": config.weights, "examples": _digest(examples)}
    loop.claim(work / "run.json", json.dumps(determined, indent=2))

    def new_state() -> loop.TrainState:
        return {"params": trainee.weights, "opt_state": tuning.optimizer.init(trainee.weights)}

    @partial(jax.jit, donate_argnums=0)
    def step(state: loop.TrainState, batch: TrainingBatch) -> tuple[loop.TrainState, Float[Array, "2"]]:
        def loss(weights: Any) -> tuple[Array, Array]:
            return answer_loss(trainee.params_of(weights), config, method, batch, through_rows=through_rows)

        (value, hits), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return loop.updated(tuning.optimizer, state, grads), jnp.stack([value, hits])

    def data(start: int) -> Iterator[TrainingBatch]:
        return batches(examples, sizes, tuning.rows, tuning.seed, start)

    return loop.run(work, new_state, step, data, steps=tuning.steps, **options)


def _digest(examples: Sequence[TrainingExample]) -> str:
    found = hashlib.sha256()
    for example in examples:
        found.update(repr(example).encode())
    return found.hexdigest()


def measured(
    trainee: Trainee, weights: Any, method: Method, examples: Sequence[TrainingExample], sizes: Sizes
) -> tuple[float, float]:
    """Loss of the answers, and the share of their tokens that are the likeliest, each answer counting the same."""

    @jax.jit
    def of_one(weights: Any, batch: TrainingBatch) -> tuple[Array, Array]:
        return answer_loss(trainee.params_of(weights), trainee.model.config, method, batch)

    each = np.asarray([of_one(weights, batch_of([example], sizes)) for example in examples])
    return float(each[:, 0].mean()), float(each[:, 1].mean())


def check_contexts(trainee: Trainee, method: Method, examples: Sequence[TrainingExample], sizes: Sizes) -> None:
    """Raise ValueError for a context that the method cannot compress: a step does not know the lengths it is given."""
    lengths = np.unique([len(example.context) for example in examples]).astype(np.int32)
    contexts = np.zeros((len(lengths), sizes.width), np.int32)
    config = trainee.model.config
    room: Any = {"max_new_tokens": sizes.room, "step_tokens": sizes.room}
    jax.eval_shape(lambda params: prefill(params, config, method, contexts, lengths, **room), trainee.model.params)
