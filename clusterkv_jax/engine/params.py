"""`SamplingParams`: what a request says of its answer, under the names of vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clusterkv_jax.runtime.errors import check_fields, is_count, is_number
from clusterkv_jax.sampling import Sampling

# Tokens with a bias, and most likely tokens whose log probabilities are told.
MOST_BIASES, MOST_LOGPROBS = 1024, 20


@dataclass(frozen=True)
class SamplingParams:
    """How a request's tokens are drawn, and where they end.

    Attributes:
        n: answers to the same prompt, which is read once; the second draws by the next seed, and so on.
        temperature: as in `Sampling`, and so are the next three; 0 is greedy.
        top_k: most likely tokens that may be drawn.
        top_p: their probability.
        min_p: least share of the most likely token's probability.
        seed: of the draws, which depend on it and on the number of the token alone, and of methods that draw.
        max_tokens: most new tokens of an answer.
        min_tokens: tokens before which nothing ends it.
        stop: texts that end it.
        stop_token_ids: tokens that end it.
        ignore_eos: whether the model's tokens that end texts do not end it.
        frequency_penalty: what is taken off a token's logit for each time that the answer has it, -2 to 2.
        presence_penalty: what is taken off once, -2 to 2.
        repetition_penalty: what divides the logit of a token that stands in the prompt or answer; 1 is none.
        logit_bias: what is added to the logits of tokens, at most 1,024.
        logprobs: most likely tokens of which log probabilities are told beside the drawn one's, 0 to 20; None is none.
            They are the model's, before all of the above.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    max_tokens: int = 64
    min_tokens: int = 0
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        bias = self.logit_bias
        biases = bias is None or (
            isinstance(bias, Mapping) and all(is_count(k) and is_number(v) for k, v in bias.items())
        )
        penalties = ("frequency_penalty", "presence_penalty")
        check_fields(
            self,
            ("n", is_count(self.n, 1), "a whole number of at least 1"),
            ("min_tokens", is_count(self.min_tokens), "a whole number of at least 0"),
            ("ignore_eos", isinstance(self.ignore_eos, bool), "True or False"),
            *((k, is_number(v := getattr(self, k)) and -2 <= v <= 2, "a number from -2 to 2") for k in penalties),
            (
                "repetition_penalty",
                is_number(self.repetition_penalty) and 1e-3 <= self.repetition_penalty <= 1e3,
                "a number from 0.001 to 1,000",
            ),
            (
                "logit_bias",
                biases and len(bias or {}) <= MOST_BIASES,
                f"at most {MOST_BIASES} numbers by token id, or None",
            ),
            (
                "logprobs",
                self.logprobs is None or (is_count(self.logprobs) and self.logprobs <= MOST_LOGPROBS),
                f"a whole number from 0 to {MOST_LOGPROBS}, or None",
            ),
        )
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """What `generate` knows of it."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)

    @property
    def changes_logits(self) -> bool:
        """Whether its draws need more than `sampling`, or are told more of."""
        penalties = self.frequency_penalty, self.presence_penalty, self.repetition_penalty
        return penalties != (0, 0, 1) or bool(self.min_tokens or self.logit_bias) or self.logprobs is not None


def params_of(sampling: Sampling, **others: Any) -> SamplingParams:
    """The parameters of this sampling."""
    filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return SamplingParams(temperature=sampling.temperature, **filters, **others)
