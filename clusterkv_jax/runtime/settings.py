"""JAX's settings while this library works, whatever those of the program are that calls it."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import jax


@contextmanager
def own_settings() -> Iterator[None]:
    """Numbers of 32 bits at most, and transfers, all of which are meant: who forbids them looks for those of his own.

    A block, or a decorator of a function.
    """
    with jax.transfer_guard("allow"):
        if not jax.config.jax_enable_x64:  # pyright: ignore[reportAttributeAccessIssue]
            yield  # what is set anew, though to the same, would distinguish programs
            return
        with jax.enable_x64(False), warnings.catch_warnings():
            # Ids and lengths of 64 bits are checked before they are narrowed.
            warnings.filterwarnings("ignore", "Explicitly requested dtype .*64")
            yield
