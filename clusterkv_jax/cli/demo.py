"""`clusterkv demo`: one question about a chapter, from the full cache and from an eighth of it."""

from importlib import resources
from typing import Annotated

import typer

from clusterkv_jax.cli.generate import generate
from clusterkv_jax.cli.options import CompilationCache


def demo(
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Ask a chapter of Moby-Dick for a hidden number: the full cache, and an eighth of it by two methods."""
    from clusterkv_jax.text.demo import FILE, QUESTION

    with resources.as_file(FILE) as chapter:
        generate(
            [str(chapter)],
            question=[QUESTION],
            methods=["full", "snapkv", "auto"],
            cache_ratio=0.125,
            max_new_tokens=32,
            compilation_cache=compilation_cache,
            debug=debug,
        )
