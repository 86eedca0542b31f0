"""Clustered KV caches for long-context decoding in JAX."""

from clusterkv_jax import learned
from clusterkv_jax.attention import attend
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache import HeadGroups, KVCache, LayerCache, PagedHeads
from clusterkv_jax.checkpoints import CheckpointError, Model, load
from clusterkv_jax.decoding import decode_step, prefill
from clusterkv_jax.generation import Result, Stats, generate
from clusterkv_jax.methods import (
    H2O,
    AdaKV,
    CaM,
    CentroidKV,
    Chelsea,
    ChunkKV,
    ClusterKV,
    Compactor,
    Composed,
    DropKV,
    ExpectedAttention,
    Full,
    GravityKV,
    InfiniGen,
    KeyDiff,
    LagKV,
    PyramidKV,
    Quest,
    SnapKV,
    StreamingLLM,
)
from clusterkv_jax.sampling import Sampling
from clusterkv_jax.saving import load as load_cache
from clusterkv_jax.saving import save as save_cache
from clusterkv_jax.tensors import build_index, compress, select

__all__ = [
    "H2O",
    "AdaKV",
    "Budget",
    "CaM",
    "CentroidKV",
    "CheckpointError",
    "Chelsea",
    "ChunkKV",
    "ClusterKV",
    "Compactor",
    "Composed",
    "DropKV",
    "ExpectedAttention",
    "Full",
    "GravityKV",
    "HeadGroups",
    "InfiniGen",
    "KVCache",
    "KeyDiff",
    "LagKV",
    "LayerCache",
    "Model",
    "PagedHeads",
    "PyramidKV",
    "Quest",
    "Result",
    "Sampling",
    "SnapKV",
    "Stats",
    "StreamingLLM",
    "attend",
    "build_index",
    "compress",
    "decode_step",
    "generate",
    "learned",
    "load",
    "load_cache",
    "prefill",
    "save_cache",
    "select",
]
