"""`SamplingParams`: what a request says of its answer, under the names of vLLM."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from clusterkv_jax.runtime.errors import check_fields, is_count
from clusterkv_jax.sampling import Sampling


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
        stop: texts that end it.
        stop_token_ids: tokens that end it.
    """

    n: int = 1
    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int = 0
    max_tokens: int = 64
    stop: Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()

    def __post_init__(self) -> None:
        check_fields(self, ("n", is_count(self.n, 1), "a whole number of at least 1"))
        _ = self.sampling

    @property
    def sampling(self) -> Sampling:
        """What `generate` knows of it."""
        return Sampling(self.temperature, self.top_k, self.top_p, self.min_p)


def params_of(sampling: Sampling, **others: Any) -> SamplingParams:
    """The parameters of this sampling."""
    filters = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
    return SamplingParams(temperature=sampling.temperature, **filters, **others)
