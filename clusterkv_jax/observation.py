"""A model on a plain text, layer by layer: what calibration measures and inspection draws."""

import hashlib
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from clusterkv_jax.blocks.causal_attention import causal_attention
from clusterkv_jax.budget import Budget
from clusterkv_jax.cache.layers import groups
from clusterkv_jax.calibration import Calibration, as_table, choose_outliers, in_steps, least_scores, outlier_share
from clusterkv_jax.checkpoints.loading import Model
from clusterkv_jax.learned import reconstruction
from clusterkv_jax.learned.repetition import instruction, prompts
from clusterkv_jax.learned.ridge import SurrogateFit, add_products, check_rows, fit_ridge
from clusterkv_jax.methods import AdaKV
from clusterkv_jax.models import decoder
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.models.parameters import Params
from clusterkv_jax.storage.files import replacing
from clusterkv_jax.tensors import compress

# Rows at the start of a text that take attention whatever they say.
SINKS = 4
# Rows of a sequence, evenly spread, whose hidden states are kept until the surrogate is fitted.
SAMPLE = 512
# Least time from one writing of the sums to the next, and that in units of what the writing takes.
SAVE_SECONDS, SAVE_EACH = 60, 20
# Of a score, so that rows that nothing looks at have a logarithm.
LEAST_SCORE = 1e-12


@dataclass(frozen=True)
class Observed:
    """One layer on one text: post-RoPE queries [1,H,N,D], keys and values [1,K,N,D], and what enters the attention.

    `ahead` are the queries that the layer makes of what the layer before it read; None in the first. `soft_cap` and
    `sink_logits` are the model's.
    """

    queries: Float[Array, "1 H N D"]
    keys: Float[Array, "1 K N D"]
    values: Float[Array, "1 K N D"]
    hidden: Float[Array, "1 N M"]
    ahead: Float[Array, "1 H N D"] | None = None
    soft_cap: float | None = None
    sink_logits: Float[Array, " H"] | None = None


def observe_layers(model: Model, tokens: Sequence[int]) -> Iterator[Observed]:
    """Queries, keys and values of every layer that sees all tokens, in turn: the layers that methods compress."""
    ids = jnp.asarray([tokens], jnp.int32)
    positions = jnp.arange(len(tokens), dtype=jnp.int32)[None]
    hidden = decoder.embed(model.params, model.config, ids, positions)
    before, ahead = hidden, None
    for number, weights in enumerate(model.params["layers"]):
        config, is_seen = model.config.of_layer(number), number in model.config.global_layers
        if number and is_seen:
            ahead = jnp.swapaxes(_queries(weights, config, before, positions), 1, 2)
        before = hidden
        hidden, entering, *qkv = _layer(weights, config, hidden, positions)
        if is_seen:
            queries, keys, values = (jnp.swapaxes(x, 1, 2) for x in qkv)
            sinks = decoder.sink_logits(weights, config)
            yield Observed(queries, keys, values, entering, ahead, config.soft_cap, sinks)


@partial(jax.jit, static_argnames=("config",))
def _layer(weights: Params, config: ModelConfig, hidden: Float[Array, "1 N M"], positions: Int[Array, "1 N"]):
    q, k, v, _ = decoder.attention_in(weights, config, hidden, positions)
    entering = decoder.attention_input(weights, config, hidden)
    sinks = decoder.sink_logits(weights, config)
    attended = causal_attention(q, k, v, window=config.window, soft_cap=config.soft_cap, sink_logits=sinks)
    return decoder.attention_out_and_mlp(weights, config, hidden, attended), entering, q, k, v


@partial(jax.jit, static_argnames=("config",))
def _queries(weights: Params, config: ModelConfig, hidden: Float[Array, "1 N M"], positions: Int[Array, "1 N"]):
    return decoder.attention_in(weights, config, hidden, positions)[0]


def calibrate(
    model: Model,
    sequences: Sequence[Sequence[int]],
    *,
    outliers: float = 0.04,
    whole_layers: tuple[int, ...] = (),
    chunk: int = 256,
    threshold: float = 0.8,
    ratio: float = 0.25,
    surrogate: Literal["linear", "mlp"] = "linear",
    progress: Callable[[int, int], None] | None = None,
    resume: Path | None = None,
) -> Calibration:
    """Run the statistics over token sequences of equal length, one sequence and layer at a time.

    A model without tokenizer cannot be asked to repeat a text; its calibration has no scores.

    Args:
        model: from `load`.
        sequences: token ids, some thousand each.
        outliers: share of all heads that become outlier heads, those of `whole_layers` first.
        whole_layers: layers all of whose heads are outliers (Chelsea keeps Llama-2's layer 0).
        chunk, threshold: of the outlier statistic.
        ratio: the share of the cache that AdaKV spreads over a layer's heads.
        surrogate: what predicts the scores: a linear map, or one with an inner layer, which wants many sequences.
        progress: called as progress(layers done, `layers_read` of all sequences).
        resume: a file that keeps what is measured so far, at most once a minute and a twentieth of the time; a later
            call with the same arguments goes on from there, and reads the pieces that are done once more, which takes
            a fraction of measuring them.

    Raises:
        ValueError: if the text is too short to fit a surrogate, or every layer has a window.
    """
    if not model.config.global_layers:
        raise ValueError(f"Every layer of {model.name} has a window, so that no method compresses one to be measured.")
    config, learns = model.config, model.tokenizer is not None
    if learns:
        check_rows(len(sequences) * (len(sequences[0]) - SINKS), config.hidden_size)
    settings = {
        "sequences": len(sequences),
        "tokens": len(sequences[0]),
        "chunk": chunk,
        "threshold": threshold,
        "outliers": outliers,
        "whole_layers": list(whole_layers),
        "ratio": ratio,
    }
    text = hashlib.sha256(repr((config, settings, [list(map(int, tokens)) for tokens in sequences])).encode())
    sums = _started(config, len(sequences), resume, text.hexdigest())
    for i in range(int(sums["sequences"])):
        _add_hidden(model, sequences[i], sums, i)
    saved, saving, total = time.monotonic(), 0.0, layers_read(model, sequences)
    for i in range(int(sums["sequences"]), len(sequences)):

        def done(layers, i=i):
            return progress and progress(i * (total // len(sequences)) + layers, total)

        _add(model, sequences[i], sums, i, AdaKV(Budget(ratio=ratio)), chunk, threshold, done)
        if resume is not None and (begin := time.monotonic()) - saved > max(SAVE_SECONDS, SAVE_EACH * saving):
            _keep(resume, sums, text.hexdigest())
            saved = time.monotonic()
            saving = saved - begin
    shares, rows = sums["outlier_share"] / len(sequences), sums["rows"] / len(sequences)
    fits = _fits(sums, surrogate) if learns else None
    result = Calibration(
        _public_name(model.name),
        as_table(np.round(shares, 4)),
        choose_outliers(shares, outliers, whole_layers),
        in_steps(rows),
        settings,
        None if fits is None else _expected(fits, sums["hidden"]),
        None if fits is None else as_table(np.round([fit.explained for fit in fits], 4)),
        None if fits is None else tuple(fit.arrays for fit in fits),
    )
    if resume is not None:
        resume.unlink(missing_ok=True)
    return result


def _started(config: ModelConfig, sequences: int, resume: Path | None, text: str) -> dict[str, Any]:
    """Sums over the sequences: of nothing, or what a call with the same arguments kept."""
    layers, heads, width = len(config.global_layers), config.num_kv_heads, config.hidden_size
    columns = width + 1 + heads
    sums = {
        "sequences": np.zeros((), np.int64),
        "outlier_share": np.zeros((layers, heads)),
        "rows": np.zeros((layers, heads)),
        # On the device: to bring a layer's matrix to the host for every sequence would take longer than all else.
        "products": [jnp.zeros((columns, columns), jnp.float32) for _ in range(layers)],
        "hidden": np.zeros((layers, sequences, SAMPLE, width), np.float32),
        "scores": np.zeros((layers, sequences, SAMPLE, heads), np.float32),
    }
    return sums if resume is None else sums | _kept(resume, text)


def _kept(resume: Path, text: str) -> dict[str, Any]:
    """What `_keep` left of the same call: nothing where there is no file, or another one."""
    try:
        with safe_open(resume, framework="np") as file:
            if (file.metadata() or {}).get("text") == text:
                sums = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
                return sums | {"products": [jnp.asarray(each) for each in sums["products"]]}
    except (FileNotFoundError, SafetensorError):
        pass
    return {}


def _keep(resume: Path, sums: dict[str, Any], text: str) -> None:
    """All but the hidden states, which are most of the bytes and are soon read again."""
    small = {name: x for name, x in sums.items() if name != "hidden"} | {"products": np.stack(sums["products"])}
    with replacing(resume) as temporary:
        save_file(small, temporary, metadata={"text": text})


def _add(
    model: Model,
    tokens: Sequence[int],
    sums: dict[str, Any],
    number: int,
    method: AdaKV,
    chunk: int,
    threshold: float,
    done: Callable[[int], Any],
) -> None:
    """What one sequence adds to the sums, in place."""
    assert method.budget.ratio is not None
    read = 0
    scores = None
    if model.tokenizer is not None:
        read = len(model.config.global_layers)
        scores = repetition_scores(model, tokens, on_part=lambda part: done(int(part * read)))
        done(read)
    places = _places(tokens)
    for i, layer in enumerate(observe_layers(model, tokens)):
        sums["outlier_share"][i] += np.asarray(outlier_share(layer.keys, chunk=chunk, threshold=threshold)[0])
        after = groups(compress(method, layer.queries, layer.keys, layer.values))[0]
        sums["rows"][i] += np.asarray(after.length[0]) / int(method.budget.ratio * len(tokens))
        if scores is not None:
            total = sums["products"][i]
            sums["products"][i] = add_products(total, layer.hidden[0, SINKS:], jnp.asarray(scores[i]))
            sums["hidden"][i, number] = np.asarray(layer.hidden[0, places], np.float32)
            sums["scores"][i, number] = scores[i].T[places - SINKS]
        done(read + i + 1)
    sums["sequences"] += 1


def _places(tokens: Sequence[int]) -> Int[np.ndarray, " rows"]:
    """The rows of a sequence whose hidden states are kept."""
    return np.linspace(SINKS, len(tokens) - 1, SAMPLE).astype(int)


def _add_hidden(model: Model, tokens: Sequence[int], sums: dict[str, Any], number: int) -> None:
    """The hidden states of a sequence of which all else has been measured."""
    for i, layer in enumerate(observe_layers(model, tokens)):
        sums["hidden"][i, number] = np.asarray(layer.hidden[0, _places(tokens)], np.float32)


def _public_name(name: str) -> str:
    """A model's name without the folders in which it lies, which are no one else's business."""
    return Path(name).expanduser().resolve().name if Path(name).expanduser().is_dir() else name


def _fits(sums: dict[str, Any], kind: str) -> list[SurrogateFit]:
    """The surrogate of each layer."""
    heads = sums["scores"].shape[-1]
    if kind == "linear":
        return [fit_ridge(np.asarray(each, np.float64), heads) for each in sums["products"]]
    try:
        from clusterkv_jax.learned.mlp import fit_mlp
    except ModuleNotFoundError as error:
        raise ValueError("A surrogate with an inner layer needs optax: pip install 'clusterkv-jax[train]'.") from error
    flat = [x.reshape(len(x), -1, x.shape[-1]) for x in (sums["hidden"], sums["scores"])]
    return [fit_mlp(hidden, scores) for hidden, scores in zip(*flat, strict=True)]


def _expected(fits: list[SurrogateFit], hidden: Float[np.ndarray, "L sequences rows M"]) -> tuple[Any, ...]:
    """`Calibration.least_scores`: heads compete by the scores that are expected of their rows, since by these a method
    must choose; a score that only the repetition knows is none that it could go by.
    """
    scores = [fit.expected(x.reshape(-1, x.shape[-1])) for fit, x in zip(fits, hidden, strict=True)]
    return tuple(as_table(np.round(layer, 3)) for layer in least_scores(np.stack(scores)))


def layers_read(model: Model, sequences: Sequence[Sequence[int]]) -> int:
    """Layers that `calibrate` reads, those of the repetition too; without a tokenizer nothing can be asked for."""
    return len(sequences) * len(model.config.global_layers) * (1 if model.tokenizer is None else 2)


def repetition_scores(
    model: Model, tokens: Sequence[int], chunk: int = 2048, on_part: Callable[[float], Any] = lambda part: None
) -> Float[np.ndarray, "L K R"]:
    """Logarithms of the KVzip+ scores of a text's rows behind the first four, which every method keeps, of the layers
    that see every token. `on_part` is called with the part of the work that is done.
    """
    ids = jnp.asarray([tokens], jnp.int32)
    prompts = repeat_prompts(model.tokenizer, tokens, chunk)
    layers = len(prompts) * (model.config.num_layers + 1)
    run = _counting(lambda calls: on_part(min(calls / layers, 1)))
    scores = reconstruction(model.params, model.config, ids, chunk=chunk, prompts=prompts, normalize=True, call=run)
    seen = [np.asarray(scores[number][0, :, SINKS:]) for number in model.config.global_layers]
    return np.log(np.maximum(seen, LEAST_SCORE))


def _counting(on_call: Callable[[int], Any]) -> Callable[..., Any]:
    """Calls programs, and says after each how many have ended."""
    calls = 0

    def run(program: Any, *args: Any) -> Any:
        nonlocal calls
        result, calls = jax.block_until_ready(program(*args)), calls + 1
        on_call(calls)
        return result

    return run


def repeat_prompts(tokenizer: Any, tokens: Sequence[int], chunk: int) -> list[Int[Array, "1 n"]]:
    """What asks a model to repeat each piece of a text, as KVzip words it."""
    return prompts(instruction(tokenizer), jnp.asarray([tokens]), chunk)
