"""Compression methods: a short file per paper, and the pieces that a method of your own is made of."""

from clusterkv_jax.methods.adakv import AdaKV
from clusterkv_jax.methods.auto import Auto
from clusterkv_jax.methods.base import Compressed, Method, Protected, Rows, Schedule, every
from clusterkv_jax.methods.cam import CaM
from clusterkv_jax.methods.centroidkv import CentroidKV
from clusterkv_jax.methods.chelsea import Chelsea
from clusterkv_jax.methods.chunkkv import ChunkKV
from clusterkv_jax.methods.clusterkv import ClusterKV
from clusterkv_jax.methods.compactor import Compactor
from clusterkv_jax.methods.composed import Composed
from clusterkv_jax.methods.dropkv import DropKV
from clusterkv_jax.methods.expected_attention import ExpectedAttention
from clusterkv_jax.methods.families.clustering import Clustering
from clusterkv_jax.methods.families.eviction import Eviction, Scoped, Windowed, window_of
from clusterkv_jax.methods.families.recall import Recall
from clusterkv_jax.methods.families.scored import Scored
from clusterkv_jax.methods.full import Full
from clusterkv_jax.methods.gravitykv import GravityKV
from clusterkv_jax.methods.h2o import H2O
from clusterkv_jax.methods.infinigen import InfiniGen
from clusterkv_jax.methods.keydiff import KeyDiff
from clusterkv_jax.methods.knorm import Knorm
from clusterkv_jax.methods.kvzap import KVzap
from clusterkv_jax.methods.kvzip import KVzip
from clusterkv_jax.methods.lagkv import LagKV
from clusterkv_jax.methods.matched import Matched
from clusterkv_jax.methods.orbitkv import OrbitKV
from clusterkv_jax.methods.pyramidkv import PyramidKV
from clusterkv_jax.methods.quest import Quest
from clusterkv_jax.methods.snapkv import SnapKV
from clusterkv_jax.methods.streamingllm import StreamingLLM
from clusterkv_jax.methods.tova import TOVA

__all__ = [
    "H2O",
    "TOVA",
    "AdaKV",
    "Auto",
    "CaM",
    "CentroidKV",
    "Chelsea",
    "ChunkKV",
    "ClusterKV",
    "Clustering",
    "Compactor",
    "Composed",
    "Compressed",
    "DropKV",
    "Eviction",
    "ExpectedAttention",
    "Full",
    "GravityKV",
    "InfiniGen",
    "KVzap",
    "KVzip",
    "KeyDiff",
    "Knorm",
    "LagKV",
    "Matched",
    "Method",
    "OrbitKV",
    "Protected",
    "PyramidKV",
    "Quest",
    "Recall",
    "Rows",
    "Schedule",
    "Scoped",
    "Scored",
    "SnapKV",
    "StreamingLLM",
    "Windowed",
    "every",
    "window_of",
]
