"""Models of texts and images: the part of their configuration, and of their tensors, that is of texts."""

from typing import Any

from msgspec import UNSET

from clusterkv_jax.models.hf_fields import Published, declared

# What they hold for images.
OF_IMAGES = tuple(
    prefix + part
    for prefix in ("", "model.")
    for part in ("vision_tower.", "vision_model.", "multi_modal_projector.", "visual.")
)


class Multimodal(Published, kw_only=True):
    """The fields of a model of texts and images; what is of images is not read."""

    without_effect = Published.without_effect | {"vision_config", "image_token_index"}

    text_config: dict[str, Any] | None = None
    tie_word_embeddings: bool | None = False


def text_config(published: dict[str, Any], kind: type[Multimodal], where: str) -> tuple[dict[str, Any], str]:
    """The part of a configuration that is of texts, as one of the whole's family, and what errors call it.

    Files without a part hold its fields themselves.
    """
    file = declared(published, kind, where)
    if file.text_config is None:
        return published, where
    outer = {"model_type": file.model_type, "tie_word_embeddings": file.tie_word_embeddings or False}
    # Its ids come before those of the part, where it has any.
    ids = {name: getattr(file, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    stated = {name: value for name, value in ids.items() if value not in (None, UNSET)}
    return file.text_config | outer | stated, f"{where}, text_config"


def of_texts(name: str) -> str:
    """A tensor of a model of texts and images by its name in one of texts."""
    return name.removeprefix("language_model.").replace("model.language_model.", "model.", 1)
