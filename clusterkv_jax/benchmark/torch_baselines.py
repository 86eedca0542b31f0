"""The same requests through transformers and kvpress, on torch: imported in a process of its own, where they are there.

transformers          its growing cache, a call of the model for each token
transformers-static   its cache of fixed size, the step compiled by torch.compile
kvpress               SnapKV's press while the prompt is read, then as transformers
"""

import contextlib
import gc
import inspect
import json
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.utils import logging

from clusterkv_jax.benchmark.common import random_prompt
from clusterkv_jax.benchmark.grid import PEERS, Cell, GridRequest
from clusterkv_jax.checkpoints.model_dir import locate
from clusterkv_jax.planning.shapes import packaged_shapes
from clusterkv_jax.runtime.extras import versions

WINDOW = 64  # of kvpress's SnapKV
WARM_UP_STEPS = 4  # of a compiled step, which is recorded in the first ones


def open_side(side: str, asked: GridRequest) -> tuple[dict[str, Any], Callable[[Cell, int], dict[str, Any]]]:
    """What a peer is, and how it times a cell. Raises ValueError for a mesh: a peer runs on one device."""
    if asked.mesh is not None:
        raise ValueError(f"{side} runs on one device, not on the mesh {asked.mesh}.")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    model = the_model(asked.model)
    packages = dict.fromkeys(["torch", "transformers", *PEERS[side]])
    return {"versions": versions(packages)}, partial(measure, model, asked.new_tokens)


def the_model(name: str) -> Any:
    """The same weights, or random ones of the same shapes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = packaged_shapes()
    if name not in shapes:
        kind = {} if device == "cuda" else {"dtype": torch.float32}
        model: Any = AutoModelForCausalLM.from_pretrained(locate(name), **kind)
        return model.to(device).eval()
    config = AutoConfig.for_model(**json.loads(Path(shapes[name]).read_text(encoding="utf-8")))
    dtype = torch.float32 if device == "cpu" else config.dtype
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def measure(model: Any, new_tokens: int, cell: Cell, repeat: int) -> dict[str, Any]:
    """One request. Repeat 0 tells what does not change from one to the next, compiling among it.

    Raises MemoryError for a cell that does not fit.
    """
    _forget()
    try:
        with torch.inference_mode():
            return _request(model, new_tokens, cell, repeat)
    except torch.OutOfMemoryError as error:
        raise MemoryError("Out of device memory.") from error
    finally:
        _forget()


def _request(model: Any, new_tokens: int, cell: Cell, repeat: int) -> dict[str, Any]:
    device = model.device
    prompt = torch.tensor([random_prompt(model.config.vocab_size, cell.length)], device=device)
    begin = time.perf_counter()
    cache: Any = DynamicCache(config=model.config)
    with _press(cell, model) as about:
        logits = model(prompt, past_key_values=cache, use_cache=True, logits_to_keep=1, **about).logits
    token = logits[:, -1].argmax(-1, keepdim=True)
    _wait(device)
    ttft = time.perf_counter() - begin

    token = token.repeat_interleave(cell.batch, 0)
    step, compile_s = model.forward, None
    if cell.side == "transformers-static":
        cache = _static(model, cache, cell, new_tokens + WARM_UP_STEPS)
        step = _compiled(model)
    else:
        cache.batch_repeat_interleave(cell.batch)
    one = partial(_step, model, step, cache)
    if cell.side == "transformers-static":
        begin = time.perf_counter()
        for i in range(WARM_UP_STEPS):
            token = one(token, cell.length + i)
        _wait(device)
        compile_s = time.perf_counter() - begin
    first = cell.length + (WARM_UP_STEPS if compile_s is not None else 0)
    begin = time.perf_counter()
    for i in range(new_tokens - 1):
        token = one(token, first + i)
    _wait(device)
    times = {"ttft_s": ttft, "tpot_s": (time.perf_counter() - begin) / max(1, new_tokens - 1)}
    if repeat:
        return times
    cache_bytes = sum(x.nbytes for layer in cache.layers for x in (layer.keys, layer.values))
    facts: dict[str, Any] = {"cache_bytes": cache_bytes, "read_bytes": _weights(model) + cache_bytes}
    if compile_s is not None:
        facts["compile_s"] = compile_s
    if device.type == "cuda":
        facts["peak_bytes"] = torch.cuda.max_memory_allocated()
    return times | facts


def _step(model: Any, step: Callable[..., Any], cache: Any, token: Any, position: int) -> Any:
    """The next token of every sequence."""
    where = torch.full((token.shape[0], 1), position, device=token.device)
    about = {"position_ids": where, "past_key_values": cache, "use_cache": True}
    if "cache_position" in inspect.signature(type(model).forward).parameters:
        about["cache_position"] = where[0]
    torch.compiler.cudagraph_mark_step_begin()
    return step(input_ids=token, **about).logits[:, -1].argmax(-1, keepdim=True).clone()


@contextlib.contextmanager
def _press(cell: Cell, model: Any) -> Iterator[dict[str, Any]]:
    """kvpress's SnapKV where a cell asks for it, and the argument that it wants and newer models do not make."""
    if cell.side != "kvpress":
        yield {}
        return
    import kvpress  # pyright: ignore[reportMissingImports]

    assert cell.budget is not None
    share = cell.budget / cell.length if isinstance(cell.budget, int) else cell.budget
    with kvpress.SnapKVPress(1 - share, window_size=WINDOW)(model):
        yield {"cache_position": torch.arange(cell.length, device=model.device)}


def _static(model: Any, cache: Any, cell: Cell, room: int) -> Any:
    """A cache of fixed size that holds what was read, once for each sequence."""
    keys = cache.layers[0].keys
    static: Any = StaticCache(config=model.config, max_cache_len=cell.length + room)
    static.early_initialization(cell.batch, keys.shape[1], keys.shape[3], keys.dtype, keys.device)
    for full, layer in zip(cache.layers, static.layers, strict=True):
        layer.keys[:, :, : cell.length] = full.keys
        layer.values[:, :, : cell.length] = full.values
        if hasattr(layer, "cumulative_length"):  # newer versions count what is there
            layer.cumulative_length.fill_(cell.length)
    return static


def _compiled(model: Any) -> Callable[..., Any]:
    """The model's step, compiled; its launches are recorded where there is a GPU."""
    if not hasattr(model, "compiled_step"):
        mode = "reduce-overhead" if model.device.type == "cuda" else "default"
        model.compiled_step = torch.compile(model.forward, mode=mode, fullgraph=True)
    return model.compiled_step


def _weights(model: Any) -> int:
    """Bytes of weights that a step reads: the table of embeddings only where it is the head too."""
    tied = model.config.tie_word_embeddings
    table = 0 if tied else model.get_input_embeddings().weight.nbytes
    return sum(x.nbytes for x in model.parameters()) - table


def _wait(device: Any) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def _forget() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
