"""The families by the `model_type` of their published configuration."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from msgspec import Struct

from clusterkv_jax.models import (
    cohere,
    ernie,
    exaone,
    gemma,
    glm,
    gpt_oss,
    granite,
    helium,
    llama,
    llama4,
    mistral,
    mixtral,
    olmo,
    opt,
    phi,
    qwen,
    seed,
    smollm,
)
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.hf_fields import Published
from clusterkv_jax.models.hf_multimodal import OF_IMAGES, of_texts
from clusterkv_jax.models.hf_quantization import PackedWords, Quantization, quantization
from clusterkv_jax.storage.schema import checked, shown


@dataclass(frozen=True)
class Family:
    """The models that have it, how its configuration is translated, and what its tensors are called.

    `file` declares the fields of the configuration. `rename` gives tensors of other names those. Tensors whose names
    begin with one of `others` are not read; `{layers}` in it is the number of layers. `to_hf` is None for a family that
    is read only.
    """

    models: str
    file: type[Published]
    from_hf: Callable[[dict[str, Any], str], ModelConfig]
    weights: Mapping[str, str]
    rename: Callable[[str], str] = lambda name: name
    to_hf: Callable[[ModelConfig], dict[str, Any]] | None = None
    others: tuple[str, ...] = ()


FAMILIES = {
    "chatglm": Family("GLM-4 as first published", glm.ChatFile, glm.from_chatglm, glm.CHATGLM_WEIGHTS),
    "cohere2": Family("Command R7B, Command A", cohere.File, cohere.from_hf, cohere.WEIGHTS),
    "ernie4_5": Family("Ernie 4.5 without experts", ernie.File, ernie.from_hf, ernie.WEIGHTS),
    "exaone4": Family("EXAONE 4", exaone.File, exaone.from_hf, exaone.WEIGHTS),
    "gemma": Family("Gemma 1", gemma.File1, gemma.from_gemma, llama.WEIGHTS),
    "gemma2": Family("Gemma 2", gemma.File2, gemma.from_gemma2, gemma.WEIGHTS),
    "gemma3": Family(
        "Gemma 3 from 4B on, texts alone",
        gemma.Multimodal,
        gemma.from_multimodal,
        gemma.WEIGHTS,
        of_texts,
        others=OF_IMAGES,
    ),
    "gemma3_text": Family("Gemma 3 1B and 270M", gemma.File3, gemma.from_gemma3, gemma.WEIGHTS),
    "glm": Family("GLM-4", glm.File, glm.from_hf, glm.HF_WEIGHTS),
    "glm4": Family("GLM-4-0414", glm.File, glm.from_glm4, glm.WEIGHTS_0414),
    "glm4_moe": Family("GLM-4.5, GLM-4.6", glm.MoeFile, glm.from_moe, glm.MOE_WEIGHTS, others=glm.OF_MORE_TOKENS),
    "gpt_oss": Family("gpt-oss", gpt_oss.File, gpt_oss.from_hf, gpt_oss.WEIGHTS),
    "granite": Family("Granite 3", granite.File, granite.from_hf, granite.WEIGHTS),
    "granitemoehybrid": Family(
        "Granite 4 without experts and Mamba layers", granite.File4, granite.from_granite4, granite.WEIGHTS_4
    ),
    "helium": Family("Helium 1", helium.File, helium.from_hf, helium.WEIGHTS),
    "llama": Family(
        "Llama 2, 3, 3.1 and 3.2, TinyLlama, SmolLM2", llama.File, llama.from_hf, llama.WEIGHTS, to_hf=llama.to_hf
    ),
    "llama4": Family(
        "Llama 4, texts of one chunk alone",
        llama4.Multimodal,
        llama4.from_multimodal,
        llama4.WEIGHTS,
        of_texts,
        others=OF_IMAGES,
    ),
    "llama4_text": Family("Llama 4, texts of one chunk", llama4.File, llama4.from_hf, llama4.WEIGHTS),
    "ministral": Family("Ministral", mistral.File, mistral.from_hf, mistral.WEIGHTS),
    "ministral3": Family("Ministral 3", mistral.File3, mistral.from_ministral3, mistral.WEIGHTS),
    "mistral": Family("Mistral", mistral.File, mistral.from_hf, mistral.WEIGHTS),
    "mistral3": Family(
        "Mistral Small 3.1 and later, Ministral 3, texts alone",
        mistral.Multimodal,
        mistral.from_multimodal,
        mistral.WEIGHTS,
        of_texts,
        others=OF_IMAGES,
    ),
    "mixtral": Family("Mixtral", mixtral.File, mixtral.from_hf, mixtral.WEIGHTS),
    "olmo2": Family("OLMo 2", olmo.File, olmo.from_hf, olmo.WEIGHTS),
    "olmo3": Family("OLMo 3", olmo.File3, olmo.from_olmo3, olmo.WEIGHTS),
    "opt": Family("OPT", opt.File, opt.from_hf, opt.WEIGHTS, opt.rename),
    "phi3": Family("Phi-3, Phi-3.5, Phi-4", phi.File, phi.from_hf, phi.WEIGHTS),
    "qwen2": Family("Qwen2, Qwen2.5", qwen.File, qwen.from_hf, qwen.WEIGHTS),
    "qwen2_5_vl": Family(
        "Qwen2.5-VL, texts alone", qwen.ImageFile, qwen.from_qwen25_vl, qwen.WEIGHTS, of_texts, others=OF_IMAGES
    ),
    "qwen2_moe": Family("Qwen1.5 and Qwen2 with experts", qwen.Moe2File, qwen.from_qwen2_moe, qwen.MOE2_WEIGHTS),
    "qwen3": Family("Qwen3", qwen.File3, qwen.from_qwen3, qwen.WEIGHTS, to_hf=qwen.to_hf),
    "qwen3_moe": Family("Qwen3 with experts", qwen.MoeFile, qwen.from_moe, qwen.MOE_WEIGHTS),
    "qwen3_vl": Family(
        "Qwen3-VL, texts alone", qwen.ImageFile, qwen.from_qwen3_vl, qwen.WEIGHTS, of_texts, others=OF_IMAGES
    ),
    "seed_oss": Family("Seed-OSS", seed.File, seed.from_hf, seed.WEIGHTS),
    "smollm3": Family("SmolLM3", smollm.File, smollm.from_hf, smollm.WEIGHTS),
}


class _Kind(Struct):
    model_type: str | None = None
    quantization_config: dict[str, Any] | None = None


def from_hf(published: dict[str, Any], where: str = "config.json") -> ModelConfig:
    """Translate a parsed Hugging Face `config.json`, which errors call `where`.

    Raises ValueError, in one sentence, for whatever the decoder does not implement.
    """
    kind = checked(published, _Kind, where)
    if kind.model_type not in FAMILIES:
        near = get_close_matches(kind.model_type or "", FAMILIES, n=1)
        nearest = f", the nearest that is: {near[0]!r}" if near else ""
        raise ValueError(
            f"model_type {shown(repr(kind.model_type))} is not supported{nearest}; allowed: {', '.join(FAMILIES)}."
        )
    quantization_of(published, where)
    return FAMILIES[kind.model_type].from_hf(published, where)


def quantization_of(published: dict[str, Any], where: str = "config.json") -> Quantization | PackedWords | None:
    """How a configuration says that its weights are quantised. Raises ValueError for what is not dequantised."""
    stated = checked(published, _Kind, where).quantization_config
    return quantization(stated, where) if stated else None
