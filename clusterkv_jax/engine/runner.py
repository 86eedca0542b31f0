"""`ModelRunner`: the slots on the device, and calls of the programs that change them."""

from collections.abc import Mapping, Sequence

import numpy as np

from clusterkv_jax.cache.layers import KVCache
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine import slot_programs
from clusterkv_jax.engine.contexts import PrefillResult
from clusterkv_jax.engine.layout import Layout
from clusterkv_jax.engine.requests import Request
from clusterkv_jax.engine.scheduler import RunningSequence, next_sampling
from clusterkv_jax.methods.base import Method
from clusterkv_jax.runtime.sharding import fetch

# Most steps of one call of the decode program; between two, requests enter and leave.
MOST_STEPS = 32


class ModelRunner:
    """Runs the model for all slots. Which of them are in use it is told by each call."""

    def __init__(self, model: Model, method: Method, layout: Layout) -> None:
        self.model, self.method, self.layout = model, method, layout
        self._slots = slot_programs.empty(layout.one, layout.logits, layout.slots, method)
        self._questions_compiled = False

    def insert(self, slot: int, result: PrefillResult) -> None:
        """Put a prompt's cache and logits into a slot."""
        number = np.asarray(slot, np.int32)
        self._slots = slot_programs.insert(self.method, self._slots, result.cache, result.logits, number)

    def append_questions(self, requests: Mapping[int, Request]) -> None:
        """Feed the questions of slots, as many tokens at a time as `generate` would."""
        asked = {slot: (request.question, request.batch.step_tokens) for slot, request in requests.items()}
        width = self.layout.limits.step_tokens
        if not self._questions_compiled and any(question for question, _ in asked.values()):
            slot_programs.compile_questions(self.model, self.method, self._slots, width)
            self._questions_compiled = True
        self._slots = slot_programs.append_questions(self.model, self.method, self._slots, asked, width)

    def sample_first(self, running: Sequence[RunningSequence | None], new: Sequence[int]) -> np.ndarray:
        """Draw the first tokens of new slots; i32 [slots]."""
        state = next_sampling(running, self.model.config.vocab_size)
        self._slots, tokens = slot_programs.sample_first(self._slots, state, _mask(new, len(running)))
        return fetch(tokens)

    def decode(
        self, running: Sequence[RunningSequence | None], active: Sequence[int], most_steps: int, fewest: int
    ) -> tuple[np.ndarray, int]:
        """One call of the decode program: at most so many steps, while at least `fewest` slots are active.

        Returns the tokens, i32 [slots, MOST_STEPS], -1 where a slot was not active, and the number of steps.
        """
        config = self.model.config
        left = np.asarray([0 if sequence is None else sequence.left for sequence in running], np.int32)
        self._slots, tokens, steps = slot_programs.decode(
            self.model.params,
            config,
            self.method,
            self._slots,
            next_sampling(running, config.vocab_size),
            _mask(active, len(running)),
            left,
            np.asarray(min(most_steps, int(left.max())), np.int32),
            np.asarray(fewest, np.int32),
            eos_ids=config.eos_ids,
            steps=MOST_STEPS,
        )
        tokens, steps = fetch((tokens, steps))
        return tokens, int(steps)

    def statistics(self, slot: int) -> KVCache:
        """What statistics look at, of one slot."""
        return slot_programs.statistics_of_slot(self._slots.cache, slot)


def _mask(chosen: Sequence[int], count: int) -> np.ndarray:
    return np.isin(np.arange(count), chosen)
