"""What `Auto` becomes for a model at each budget: whether the rows that it has no room for are merged, and with which
weight, or dropped.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
from jaxtyping import Float

from clusterkv_jax.auto_choice import AutoAt, AutoChoice, Nats
from clusterkv_jax.budget import Budget
from clusterkv_jax.calibration import Calibration
from clusterkv_jax.checkpoints.loading import Model, calibrated
from clusterkv_jax.evaluation.responses import likelihoods, possible
from clusterkv_jax.evaluation.tasks.cases import EncodedPrompt, Tokens
from clusterkv_jax.methods import Auto, Full, Method
from clusterkv_jax.text.tokenizer import encode

# Shares of the cache that are measured, and those where it must be quick: merging fails between them, where it does.
SHARES, QUICK_SHARES = (0.5, 0.25, 0.125, 0.0625), (0.25, 0.125)
# Tokens that are fed behind each piece, and how many of those that are repeated only say which passage.
FED, CUE = 128, 16
# Most pieces, and most tokens of each.
PIECES, TOKENS = 16, 2048

# Losses of each piece, in nats a token: of what continues it, and of the passage that is repeated.
Losses = Float[np.ndarray, "2 pieces"]


def with_choice(
    model: Model,
    measured: Calibration,
    pieces: Sequence[Sequence[int]],
    shares: Sequence[float] = SHARES,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Calibration:
    """The calibration with the choice for each share of the cache, and the losses that it rests on: each piece is
    compressed but for its last 128 tokens. These are then predicted, and a passage of the piece is repeated.

    Shares for which the pieces are too short are left out; without scores, or any share, the calibration stays as it
    is. `progress` is called with how many methods of all are measured.
    """
    pieces = [piece[:TOKENS] for piece in pieces[:PIECES]]
    if measured.surrogate is None or min(map(len, pieces)) <= 2 * FED:
        return measured
    known, cue = calibrated(model, measured), _cue(model)
    prompts = [_continuing(piece) for piece in pieces] + [_repeating(piece, cue) for piece in pieces]
    by_share = {share: _candidates(share) for share in shares}
    by_share = {share: methods for share, methods in by_share.items() if _fit(known, methods.values(), prompts)}
    if not by_share:
        return measured
    total, done, found = 1 + sum(map(len, by_share.values())), 1, []
    full = _losses(known, Full(), prompts, len(cue))
    progress(done, total)
    for share, methods in by_share.items():
        above: dict[AutoChoice, Losses] = {}
        for name, method in methods.items():
            above[name] = _losses(known, method, prompts, len(cue)) - full
            progress(done := done + 1, total)
        found.append(AutoAt(share, best(above), _means(above, 0), _means(above, 1)))
    return replace(measured, auto=tuple(found))


def best(losses: Mapping[AutoChoice, Losses]) -> AutoChoice:
    """The choice whose two losses have the smallest sum. Of those that are worse by at most one standard error of their
    difference over the pieces it is the first in the order of `AutoChoice`.
    """
    sums = {name: loss.sum(axis=0) for name, loss in losses.items()}
    least = min(sums.values(), key=np.mean)
    error = {name: np.std(each - least) / np.sqrt(least.size) for name, each in sums.items()}
    return next(name for name in get_args(AutoChoice) if np.mean(sums[name] - least) <= error[name])


def _means(losses: Mapping[AutoChoice, Losses], which: int) -> Nats:
    return {name: round(float(loss[which].mean()), 4) for name, loss in losses.items()}


def _candidates(share: float) -> dict[AutoChoice, Method]:
    return {choice: Auto(Budget(ratio=share)).chosen(choice) for choice in get_args(AutoChoice)}


def _fit(model: Model, methods: Iterable[Method], prompts: Sequence[EncodedPrompt]) -> bool:
    return all(possible(model, method, prompt, 1) for method in methods for prompt in prompts)


def _cue(model: Model) -> Tokens:
    """What stands between a piece and its repetition."""
    return tuple(encode(model.tokenizer, "\n\n"))


def _continuing(piece: Sequence[int]) -> EncodedPrompt:
    return EncodedPrompt(tuple(piece[:-FED]), continuation=tuple(piece[-FED:]))


def _repeating(piece: Sequence[int], cue: Tokens) -> EncodedPrompt:
    """A passage from a third of the piece on, of which the first tokens are given."""
    context = tuple(piece[:-FED])
    start = len(context) // 3
    return EncodedPrompt(context, continuation=(*cue, *context[start:])[:FED])


def _losses(model: Model, method: Method, prompts: Sequence[EncodedPrompt], cue: int) -> Losses:
    """Of prompts that are continued, and as many behind them that are repeated."""
    losses = [-np.asarray(answer.logprobs) for answer in likelihoods(model, method, prompts)]
    half = len(prompts) // 2
    return np.stack([np.mean(losses[:half], axis=1), np.mean(np.stack(losses[half:])[:, cue + CUE :], axis=1)])
