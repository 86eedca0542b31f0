"""Compiled programs in a folder, where the next process finds them: jax's compilation cache, on by default.

`jax_compilation_cache_dir` (JAX_COMPILATION_CACHE_DIR) names another folder, and `jax_enable_compilation_cache`
(JAX_ENABLE_COMPILATION_CACHE=0) switches it off, as they do in jax.
"""

import os
from pathlib import Path
from typing import Any

import jax
import platformdirs

from clusterkv_jax.storage.buckets import place
from clusterkv_jax.storage.schema import AnyPath


def keep_programs(folder: str | os.PathLike[str] | None = None) -> None:
    """Keep compiled programs in a folder or bucket, however soon they were compiled: by default where jax was told to
    keep them, else in the user's cache folder, if it can be written.
    """
    config: Any = jax.config  # whose values no type names
    if not config.jax_enable_compilation_cache or (folder is None and config.jax_compilation_cache_dir):
        return
    programs = place(folder or platformdirs.user_cache_path("clusterkv_jax", appauthor=False) / "programs")
    if folder is None and not _writable(programs):
        return
    config.update("jax_compilation_cache_dir", str(programs))
    if not isinstance(programs, Path):  # XLA, which would keep what it measures of kernels, opens no bucket
        config.update("jax_persistent_cache_enable_xla_caches", "none")
    config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def _writable(folder: AnyPath) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(folder, os.W_OK)
