"""GGUF files: what llama.cpp's converter makes of a model is the model again, whole or not at all."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import clusterkv_jax as ckv
from clusterkv_jax.models.rope import cosines_and_sines
from tests.support import checkpoint_files, gguf_writer
from tests.support.families import PARITY

NAMES = [
    name
    for name in PARITY
    if PARITY[name]["model_type"]
    in {*gguf_writer.ARCHITECTURES, "llama", "qwen2", "qwen3", "gemma2", "phi3", "granite", "olmo2"}
    # What no GGUF file says: YaRN's other factors, a window of some layers or of all, shares that do not add up to 1.
    and name not in ("llama-yarn", "llama-yarn-mscale", "qwen2-window", "qwen3-moe-window", "qwen3-moe-shares")
    and name not in ("mistral-v0.1", "mixtral-window", "qwen3-moe-dense")
]
# Norms of Gemma are stored with 1 added.
CLOSE = {"gemma2": 1e-6, "gemma3": 1e-6}


def published(name):
    """A small configuration of a family as transformers writes it."""
    tokens = {"eos_token_id": [2], "bos_token_id": 1, "pad_token_id": 0}
    known = {  # of what a GGUF file leaves to the architecture
        "gemma2": {"query_pre_attn_scalar": 24},
        "gemma3": {"query_pre_attn_scalar": 24},
        "gpt-oss": {"swiglu_limit": 7.0},
    }
    given = {"rms_norm_eps": 1e-5, **PARITY[name], **tokens, **known.get(name, {})}
    return {**given, "norm_topk_prob": True} if given["model_type"] == "qwen3_moe" else given


@pytest.mark.parametrize("name", NAMES)
def test_a_family(tmp_path, name):
    """The parameters and the configuration are those of the Hugging Face folder that was converted."""
    given = published(name)
    tensors = checkpoint_files.random_tensors(given)
    folder = ckv.load(checkpoint_files.write(tmp_path / "hf", given, tensors))
    single = given | {"eos_token_id": 2}
    file = ckv.load(gguf_writer.write(tmp_path / "model.gguf", single, tensors))
    places = jax.tree.leaves_with_path(folder.params)
    for (path, wanted), found in zip(places, jax.tree.leaves(file.params), strict=True):
        np.testing.assert_allclose(np.asarray(found), np.asarray(wanted), atol=CLOSE.get(name, 0), err_msg=str(path))
    for part in ("rope", "local_rope"):
        mine, theirs = (getattr(model.config, part) for model in (file, folder))
        assert (mine is None) == (theirs is None)
        if mine is not None:  # Llama 3.1's scaling is a list of factors there
            for x, y in zip(*(cosines_and_sines(jnp.arange(64)[None], rope) for rope in (mine, theirs)), strict=True):
                np.testing.assert_allclose(x, y, atol=1e-5)
    same = {"rope": None, "local_rope": None, "family": "", "sliding_layers": (), "window": None}
    assert replace(file.config, **same) == replace(folder.config, **same)
    assert file.config.sliding_layers == folder.config.sliding_layers
    assert file.config.window == folder.config.window
