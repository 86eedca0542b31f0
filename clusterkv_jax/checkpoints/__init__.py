"""Models on disk, in without torch and out again: safetensors, Orbax and GGUF."""

from clusterkv_jax.checkpoints.loading import CheckpointError as CheckpointError
from clusterkv_jax.checkpoints.loading import Model as Model
from clusterkv_jax.checkpoints.loading import load as load
