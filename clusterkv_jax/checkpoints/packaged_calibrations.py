"""Calibrations that the package holds, for the models that were measured: those with the same parameters."""

from importlib import resources
from pathlib import Path

# By `config.weights`: SmolLM2-135M-Instruct in Q4_1 as float32, bfloat16 and float16, and in float32 by bfloat16.
_FILES: dict[str, str] = dict.fromkeys(
    ("e28e725bde517dd6", "b2ed96b1f5cfad7c", "966697169a9df2d4", "72006b5ce671fe35"), "smollm2.safetensors"
)


def packaged_calibration(weights: str | None) -> Path | None:
    """The file of a model by the fingerprint of its parameters, None for any other model."""
    name = _FILES.get(weights or "")
    return None if name is None else Path(str(resources.files("clusterkv_jax.configs") / "calibrations" / name))
