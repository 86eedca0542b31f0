"""The configuration of a model, which the blocks of its decoder read."""

from clusterkv_jax.blocks.config import ClampedSwiglu as ClampedSwiglu
from clusterkv_jax.blocks.config import Experts as Experts
from clusterkv_jax.blocks.config import LinearScaling as LinearScaling
from clusterkv_jax.blocks.config import Llama3Scaling as Llama3Scaling
from clusterkv_jax.blocks.config import LongScaling as LongScaling
from clusterkv_jax.blocks.config import ModelConfig as ModelConfig
from clusterkv_jax.blocks.config import QueryScaling as QueryScaling
from clusterkv_jax.blocks.config import Rope as Rope
from clusterkv_jax.blocks.config import Scaling as Scaling
from clusterkv_jax.blocks.config import YarnScaling as YarnScaling
from clusterkv_jax.blocks.config import limited as limited
