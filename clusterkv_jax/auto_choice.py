"""What the method `Auto` becomes with a share of the cache, and the losses that say so."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Literal

from msgspec import Meta

# What the method `Auto` may become; of those that measures do not tell apart the first.
AutoChoice = Literal["orbitkv-half", "kvzap", "orbitkv"]
Nats = Mapping[AutoChoice, Annotated[float, Meta(ge=-(2**10), le=2**10)]]


@dataclass(frozen=True)
class AutoAt:
    """What the method `Auto` becomes with a share of the cache.

    Attributes:
        ratio: the share.
        choice: the method.
        continuing: loss of the next tokens of texts above the full cache's, in nats a token, by method.
        repeating: loss of a passage of the texts, which is repeated.
    """

    ratio: Annotated[float, Meta(gt=0, le=1)]
    choice: AutoChoice
    continuing: Nats = field(default_factory=dict)
    repeating: Nats = field(default_factory=dict)
