"""What `Auto` becomes for a model: whether the rows that a budget has no room for are better merged or dropped."""

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from clusterkv_jax.budget import Budget
from clusterkv_jax.calibration import AutoChoice, Calibration
from clusterkv_jax.checkpoints.loading import Model, calibrated
from clusterkv_jax.evaluation.responses import likelihoods, possible
from clusterkv_jax.evaluation.tasks.cases import Prompt
from clusterkv_jax.methods import Auto, Full, Method

# Tokens that are predicted behind each piece, and the share of the cache that they are predicted from.
CONTINUED, SHARE = 128, 1 / 8
# Most pieces, all read together.
PIECES = 4


def with_choice(model: Model, measured: Calibration, pieces: Sequence[Sequence[int]]) -> Calibration:
    """The calibration with the method that loses less of the next tokens, and the losses in its settings, in nats a
    token: each piece is compressed but for its last 128 tokens, which are then predicted.

    Without scores, or with pieces too short for the budget, it stays as it is.
    """
    if measured.surrogate is None or min(map(len, pieces)) <= CONTINUED:
        return measured
    known, auto = calibrated(model, measured), Auto(Budget(ratio=SHARE))
    prompts = [Prompt(tuple(p[:-CONTINUED]), continuation=tuple(p[-CONTINUED:])) for p in pieces[:PIECES]]
    methods: dict[str, Method] = {choice: auto.chosen(choice) for choice in get_args(AutoChoice)}
    if not all(possible(known, method, prompt, 1) for method in methods.values() for prompt in prompts):
        return measured
    losses = {name: _loss(known, method, prompts) for name, method in (methods | {"full": Full()}).items()}
    choice = min(methods, key=lambda name: losses[name])
    settings = {**measured.settings, "auto_losses": {name: round(loss, 4) for name, loss in losses.items()}}
    return replace(measured, auto=choice, settings=settings)


def _loss(model: Model, method: Method, prompts: Sequence[Prompt]) -> float:
    """Mean loss of the prompts' continuations, in nats a token."""
    return -float(np.mean([answer.logprobs for answer in likelihoods(model, method, prompts)]))
