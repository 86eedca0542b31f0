"""Every method, a line each: the package, its presets and its commands find them here."""

import inspect

from clusterkv_jax.methods.adakv import AdaKV as AdaKV
from clusterkv_jax.methods.auto import Auto as Auto
from clusterkv_jax.methods.cam import CaM as CaM
from clusterkv_jax.methods.centroidkv import CentroidKV as CentroidKV
from clusterkv_jax.methods.chelsea import Chelsea as Chelsea
from clusterkv_jax.methods.chunkkv import ChunkKV as ChunkKV
from clusterkv_jax.methods.clusterkv import ClusterKV as ClusterKV
from clusterkv_jax.methods.compactor import Compactor as Compactor
from clusterkv_jax.methods.composed import Composed as Composed
from clusterkv_jax.methods.dropkv import DropKV as DropKV
from clusterkv_jax.methods.expected_attention import ExpectedAttention as ExpectedAttention
from clusterkv_jax.methods.full import Full as Full
from clusterkv_jax.methods.gravitykv import GravityKV as GravityKV
from clusterkv_jax.methods.h2o import H2O as H2O
from clusterkv_jax.methods.infinigen import InfiniGen as InfiniGen
from clusterkv_jax.methods.keydiff import KeyDiff as KeyDiff
from clusterkv_jax.methods.knorm import Knorm as Knorm
from clusterkv_jax.methods.kvzap import KVzap as KVzap
from clusterkv_jax.methods.kvzip import KVzip as KVzip
from clusterkv_jax.methods.lagkv import LagKV as LagKV
from clusterkv_jax.methods.matched import Matched as Matched
from clusterkv_jax.methods.orbitkv import OrbitKV as OrbitKV
from clusterkv_jax.methods.pyramidkv import PyramidKV as PyramidKV
from clusterkv_jax.methods.quest import Quest as Quest
from clusterkv_jax.methods.snapkv import SnapKV as SnapKV
from clusterkv_jax.methods.streamingllm import StreamingLLM as StreamingLLM
from clusterkv_jax.methods.tova import TOVA as TOVA

METHODS = {
    name: value for name, value in sorted(globals().items(), key=lambda item: item[0].lower()) if inspect.isclass(value)
}
