"""Libraries of the extra `eval`."""

from functools import partial

from clusterkv_jax.runtime.extras import library as of_extra

library = partial(of_extra, extra="eval")
