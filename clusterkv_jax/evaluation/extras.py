"""Libraries of the extra `eval`."""

from functools import partial

from clusterkv_jax import extras

library = partial(extras.library, extra="eval")
