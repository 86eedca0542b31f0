"""A model's configuration alone, without its weights."""

import json
import os
from importlib import resources
from pathlib import Path

from clusterkv_jax.checkpoints.loading import CheckpointError, load_config
from clusterkv_jax.models import registry
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.storage import hub
from clusterkv_jax.storage.schema import shown
from clusterkv_jax.storage.weight_files import is_gguf


def packaged_shapes() -> dict[str, Path]:
    """Files of `configs/models/` by name: published configurations, in Hugging Face format."""
    folder = Path(str(resources.files("clusterkv_jax.configs") / "models"))
    return {file.stem: file for file in sorted(folder.glob("*.json"))}


def model_config(name: str) -> ModelConfig:
    """The configuration of "demo", a packaged shape, a folder with a `config.json`, a hub id, or a GGUF file.

    Raises CheckpointError (a ValueError), in one sentence, for what is none of them or not supported.
    """
    shapes = packaged_shapes()
    if name in shapes:
        return registry.from_hf(json.loads(shapes[name].read_text(encoding="utf-8")), str(shapes[name]))
    if name == "demo":
        return load_config(Path(str(resources.files("clusterkv_jax.models") / "demo")))
    folder = Path(os.path.expanduser(name))
    if folder.is_dir() or (is_gguf(folder) and folder.is_file()):
        return load_config(folder)
    named = hub.parse(name)
    if named is None:
        raise CheckpointError(
            f"There is no folder {shown(repr(name))}; allowed: 'demo', {', '.join(shapes)}, a folder with a "
            "config.json, a hub id 'owner/name', or a GGUF file."
        )
    try:
        return load_config(hub.snapshot(*named, ["config.json"]))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(
            f"There is no local folder {name!r}, and the hub did not deliver its config.json: {error}"
        ) from error
