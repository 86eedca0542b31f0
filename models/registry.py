"""The families by the `model_type` of their published configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from clusterkv_jax.models import glm, llama, mistral, opt, qwen
from clusterkv_jax.models.config import ModelConfig


@dataclass(frozen=True)
class Family:
    """How a family's configuration is translated, what its tensors are called, and which older names they had."""

    from_hf: Callable[[dict[str, Any]], ModelConfig]
    weights: Mapping[str, str]
    rename: Callable[[str], str] = lambda name: name


FAMILIES = {
    "chatglm": Family(glm.from_chatglm, glm.CHATGLM_WEIGHTS),
    "glm": Family(glm.from_hf, glm.HF_WEIGHTS),
    "llama": Family(llama.from_hf, llama.WEIGHTS),
    "mistral": Family(mistral.from_hf, mistral.WEIGHTS),
    "opt": Family(opt.from_hf, opt.WEIGHTS, opt.rename),
    "qwen2": Family(qwen.from_hf, qwen.WEIGHTS),
    "qwen3": Family(qwen.from_hf, qwen.WEIGHTS),
}


def from_hf(published: dict[str, Any]) -> ModelConfig:
    """Translate a parsed Hugging Face `config.json`.

    Raises ValueError, in one sentence, for whatever the decoder does not implement.
    """
    model_type = published.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"model_type {model_type!r} is not supported; allowed: {', '.join(FAMILIES)}.")
    if quantization := published.get("quantization_config"):
        method = quantization.get("quant_method")
        raise ValueError(f"quantization {method!r} is not supported; allowed: bfloat16, float16 and float32 weights.")
    return FAMILIES[model_type].from_hf(published)
