"""The Flax model of the page on Flax models, and its weights as those of a Llama of ours."""

import contextlib
import io
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import clusterkv_jax as ckv
from clusterkv_jax.models.config import ModelConfig, Rope

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "flax.md"


def documented() -> dict[str, Any]:
    """What the first example of the page defines."""
    code = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)[0]
    names: dict[str, Any] = {"__name__": "toy"}
    with contextlib.redirect_stdout(io.StringIO()):
        exec(compile(code, str(PAGE), "exec"), names)
    return names


def as_llama(model: Any) -> ckv.Model:
    """The same model as one of ours."""

    def heads_first(linear):
        return jnp.transpose(linear.kernel[...], (1, 2, 0))

    def layer(x: Any) -> dict[str, Any]:
        attention = {name: heads_first(getattr(x.attn, name)) for name in "qkv"} | {"o": x.attn.o.kernel[...]}
        mlp = {name: getattr(x, name).kernel[...] for name in ("gate", "up", "down")}
        norms = {"attention_norm": {"scale": x.norm_1.scale[...]}, "mlp_norm": {"scale": x.norm_2.scale[...]}}
        return {"attention": attention, "mlp": mlp, **norms}

    params = {
        "embed": model.embed.embedding[...],
        "layers": tuple(map(layer, model.layers)),
        "final_norm": {"scale": model.norm.scale[...]},
        "lm_head": model.head.kernel[...].T,
    }
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 64, "max_positions": 256, "norm_eps": 1e-6}
    heads = {
        "num_layers": len(model.layers),
        "num_heads": 4,
        "num_kv_heads": params["layers"][0]["attention"]["k"].shape[0],
    }
    config = ModelConfig("llama", **sizes, **heads, head_dim=8, rope=Rope(1e4, 8))
    return ckv.Model(params, config, tokenizer=None, mesh=None, name="toy")


def enlarge(model: Any, factor: float = 3.0) -> Any:
    """The model with larger weights, so that greedy tokens vary."""
    from flax import nnx

    grown = jax.tree.map(lambda x: x * factor if x.ndim > 1 else x, nnx.state(model, nnx.Param))
    nnx.update(model, grown)
    return model
