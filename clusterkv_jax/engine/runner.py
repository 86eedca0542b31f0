"""`ModelRunner`: the slots on the device, and calls of the programs that change them."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np

from clusterkv_jax.cache.layers import KVCache, take_sequences
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.engine import continuation, slot_programs
from clusterkv_jax.engine.contexts import PrefillResult
from clusterkv_jax.engine.layout import EngineLayout
from clusterkv_jax.engine.logits import Logprobs
from clusterkv_jax.engine.requests import Request
from clusterkv_jax.engine.sampling import SamplingState
from clusterkv_jax.engine.scheduler import MOST_STEPS, RunningSequence, next_sampling
from clusterkv_jax.methods.base import Method
from clusterkv_jax.runtime.sharding import fetch


class ModelRunner:
    """Runs the model for all slots. Which of them are in use it is told by each call."""

    def __init__(self, model: Model, method: Method, layout: EngineLayout) -> None:
        self.model, self.method, self.layout = model, method, layout
        self._slots = slot_programs.empty(layout.one, layout.logits, layout.slots, method)
        self._questions_compiled = self._return_compiled = False

    def insert(self, slot: int, result: PrefillResult) -> None:
        """Put a prompt's cache and logits into a slot."""
        number = np.asarray(slot, np.int32)
        self._slots = slot_programs.insert(self.method, self._slots, result.cache, result.logits, number)

    def append_questions(self, requests: Mapping[int, Request]) -> None:
        """Feed the questions of slots, as many tokens at a time as `generate` would."""
        asked = {slot: (request.question, request.batch.step_tokens) for slot, request in requests.items()}
        width = self.layout.limits.step_tokens
        # Without contexts hardly ever do all slots ask at once: that program is compiled when they do.
        if self.layout.context_bytes and not self._questions_compiled and any(map(itemgetter(0), asked.values())):
            slot_programs.compile_questions(self.model, self.method, self._slots, width)
            self._questions_compiled = True
        self._slots = slot_programs.append_questions(self.model, self.method, self._slots, asked, width)

    def sample_first(
        self, running: Sequence[RunningSequence | None], new: Sequence[int], masks: dict[int, np.ndarray]
    ) -> tuple[np.ndarray, Logprobs | None]:
        """Draw the first tokens of new slots: i32 [slots, 1], and their log probabilities where one asks."""
        state = self._sampling(running, masks)
        slots, chosen = self._slots, _mask(new, len(running))
        token, logprobs = slot_programs.sample_first(slots.logits, slots.token, state, chosen)
        self._slots = replace(slots, token=token)
        tokens, logprobs = fetch((token, logprobs))
        return tokens[:, None], jax.tree.map(lambda x: x[:, None], logprobs)

    def decode(
        self,
        running: Sequence[RunningSequence | None],
        active: Sequence[int],
        masks: dict[int, np.ndarray],
        most: int,
        fewest: int,
    ) -> tuple[np.ndarray, Logprobs | None, int]:
        """One call of the decode program: at most so many steps, while at least `fewest` slots are active.

        Returns the tokens, i32 [slots, MOST_STEPS], -1 where a slot was not active, their log probabilities where one
        asks, and the number of steps.
        """
        config = self.model.config
        left = np.asarray([0 if sequence is None else sequence.left for sequence in running], np.int32)
        self._slots, *found = slot_programs.decode(
            self.model.params,
            config,
            self.method,
            self._slots,
            self._sampling(running, masks),
            _mask(active, len(running)),
            left,
            np.asarray(min(most, int(left.max())), np.int32),
            np.asarray(fewest, np.int32),
            eos_ids=config.eos_ids,
            steps=MOST_STEPS,
        )
        tokens, logprobs, steps, late = fetch(tuple(found))
        self._slots = slot_programs.recompressed(self.model, self.method, self._slots, late)
        return tokens, logprobs, int(steps)

    def _sampling(self, running: Sequence[RunningSequence | None], masks: dict[int, np.ndarray]) -> SamplingState:
        return next_sampling(running, masks, self.model.config.vocab_size, self.layout.limits.reserve)

    def left_behind(self, slot: int, length: int, max_new_tokens: int) -> PrefillResult:
        """What the sequence in a slot, of so many tokens, leaves for those that go on from it."""
        if self.method.storage == "host":
            cache = take_sequences(self._slots.cache, jnp.asarray([slot]))
        else:
            cache = slot_programs.extract(self.method, self._slots, np.asarray(slot, np.int32)).cache
        if not self._return_compiled:
            continuation.compile_return(self.model, self.method, cache)
            self._return_compiled = True
        return continuation.left_behind(self.model, self.method, self.layout, cache, length, max_new_tokens)

    def statistics(self, slot: int) -> KVCache:
        """What statistics look at, of one slot."""
        return slot_programs.statistics_of_slot(self._slots.cache, slot)


def _mask(chosen: Sequence[int], count: int) -> np.ndarray:
    return np.isin(np.arange(count), chosen)
