"""Answers of transformers under a press of NVIDIA's kvpress; needs torch and kvpress.

A context is read and compressed alone, kvpress's way, and so is its question. Answers are written together: kvpress's
masks of keys have an index of the sequence.
"""

import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import kvpress  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
from kvpress.presses import kvzip_press  # pyright: ignore[reportMissingImports]
from torch.nn.functional import pad  # pyright: ignore[reportMissingImports]
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from clusterkv_jax.checkpoints.loading import Checkpoint
from clusterkv_jax.evaluation.batching import Job
from clusterkv_jax.evaluation.responses import Response
from clusterkv_jax.evaluation.scoring import score
from clusterkv_jax.evaluation.tasks.cases import Case, EncodedPrompt
from clusterkv_jax.storage.weight_files import is_gguf
from clusterkv_jax.text.tokenizer import decode

# Rows that DMS keeps in any case: its 128 are more than a sixteenth of 2,048 tokens.
RECENT = 32

# With kvpress's defaults, by the share that is dropped. Its KVzap models are of other language models.
PRESSES: dict[str, Callable[[float], Any]] = {
    "full": lambda drop: None,
    "kvzip": lambda drop: kvpress.KVzipPress(drop),
    "dms-compactor": lambda drop: kvpress.DMSPress(kvpress.CompactorPress(drop), sliding_window_size=RECENT),
    "expectedattention-adakv": lambda drop: kvpress.AdaKVPress(kvpress.ExpectedAttentionPress(drop, epsilon=1e-2)),
    "snapkv": lambda drop: kvpress.SnapKVPress(drop),
    "compactor": lambda drop: kvpress.CompactorPress(drop),
}


@dataclass(frozen=True)
class Read:
    """A compressed context with its question: the cache, keys that are masked [layer], the next token and its position;
    rows that attention may see of the context, the mean over layers and heads, and bytes of the cache's tensors.
    """

    cache: Any
    masked: list[Any]
    token: int
    position: int
    rows: float
    nbytes: int


def load(checkpoint: Checkpoint, tokenizer: Any) -> Any:
    """The model in transformers, in bfloat16; a GGUF file is dequantised. kvpress gets this tokenizer."""
    logging.disable_progress_bar()
    # KVzip loads a tokenizer for every context, which a GGUF file's folder has not.
    kvzip_press.AutoTokenizer = SimpleNamespace(from_pretrained=lambda _: tokenizer)
    file = checkpoint.folder
    place: dict[str, Any] = {"gguf_file": file.name} if is_gguf(file) else {}
    folder = file.parent if place else file
    model: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.bfloat16, **place)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def device() -> str:
    """What torch computes on."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"


def threshold(model: Any, scorer: Any, ratio: float, contexts: Sequence[Sequence[int]]) -> float:
    """The score from which on DMS keeps rows, so that of these contexts together this share stays."""
    scores = []

    class Watch(kvpress.BasePress):
        def compress(self, module: Any, hidden_states: Any, keys: Any, values: Any, attentions: Any, kwargs: Any):
            found = scorer.score(module, hidden_states, keys, values, attentions, kwargs)
            scores.append(found.float().cpu().flatten(0, 1))
            return keys, values

    torch.manual_seed(0)
    for context in contexts:
        _prefill(model, Watch(), context)
    count = round(ratio * sum(found.numel() for found in scores)) - RECENT * sum(len(found) for found in scores)
    if count < 1:
        raise ValueError(f"ratio = {ratio} keeps less than the {RECENT} recent rows that DMS keeps in any case.")
    older = torch.cat([found[:, :-RECENT].flatten() for found in scores])
    return float(older.sort(descending=True).values[count - 1])


@torch.no_grad()
def _prefill(model: Any, press: Any, context: Sequence[int]) -> Any:
    """The cache of a context under a press."""
    cache = DynamicCache()
    with nullcontext() if press is None else press(model):
        model.model(input_ids=torch.tensor([context], device=model.device), past_key_values=cache)
    return cache


@torch.no_grad()
def read(model: Any, press: Any, prompt: EncodedPrompt) -> Read:
    """Compress a context and feed its question at its true positions."""
    cache = _prefill(model, press, prompt.context)
    modules = [layer.self_attn for layer in model.model.layers]
    masked = [getattr(module, "masked_key_indices", None) for module in modules]
    heads = sum(layer.keys.shape[1] for layer in cache.layers)
    rows = sum(layer.keys.shape[1] * layer.keys.shape[2] for layer in cache.layers)
    rows -= sum(len(index[0]) for index in masked if index is not None)
    nbytes = sum(part.numel() * part.element_size() for layer in cache.layers for part in (layer.keys, layer.values))
    total = len(prompt.context) + len(prompt.question)
    places = torch.arange(len(prompt.context), total, device=model.device)[None]
    asked = torch.tensor([prompt.question], device=model.device)
    out = model(asked, past_key_values=cache, position_ids=places, logits_to_keep=1)
    return Read(cache, masked, int(out.logits[0, -1].argmax()), total, rows / heads, nbytes)


def _joined(model: Any, each: Sequence[Read]) -> tuple[Any, Any]:
    """One cache of all, padded at the front, and the mask of what is no padding; masked keys go to the model."""
    lengths = [one.cache.get_seq_length() for one in each]
    spare = [max(lengths) - length for length in lengths]
    cache = DynamicCache()
    for i, layer in enumerate(model.model.layers):
        parts = [(one.cache.layers[i].keys, one.cache.layers[i].values) for one in each]
        keys, values = (
            torch.cat([pad(part[kind], (0, 0, more, 0)) for part, more in zip(parts, spare, strict=True)])
            for kind in (0, 1)
        )
        cache.update(keys, values, i)
        indices = [
            torch.stack([torch.full_like(at[1], number), at[1], at[2] + more]).to(model.device)
            for number, (one, more) in enumerate(zip(each, spare, strict=True))
            if (at := one.masked[i]) is not None
        ]
        layer.self_attn.masked_key_indices = tuple(torch.cat(indices, dim=1)) if indices else None
    mask = torch.arange(max(lengths), device=model.device) >= torch.tensor(spare, device=model.device)[:, None]
    return cache, mask.long()


@torch.no_grad()
def write(model: Any, each: Sequence[Read], ends: Callable[[int, list[int]], bool]) -> list[list[int]]:
    """Greedy tokens of each, until ends(number, tokens)."""
    cache, mask = _joined(model, each)
    texts, live = [[one.token] for one in each], set(range(len(each)))
    positions = torch.tensor([[one.position] for one in each], device=model.device)
    latest = torch.tensor([[one.token] for one in each], device=model.device)
    while live := {number for number in live if not ends(number, texts[number])}:
        mask = pad(mask, (0, 1), value=1)
        out = model(latest, past_key_values=cache, attention_mask=mask, position_ids=positions)
        latest, positions = out.logits[:, -1:].argmax(-1), positions + 1
        for number, (token,) in enumerate(latest.tolist()):
            if number in live:
                texts[number].append(token)
    return texts


def is_complete(case: Case, text: str) -> bool:
    """Whether no longer text has a higher score: it contains all that is looked for."""
    return case.metric.startswith("string_match") and score(case.metric, text, case.answers) == 1


def responder(model: Any, press: Any, tokenizer: Any, end_ids: Sequence[int], jobs: Sequence[Job]) -> Callable:
    """respond(...) of `runner.run`."""
    by_prompt = {job.prompt: job for job in jobs}

    def respond(_: Any, prompts: Sequence[EncodedPrompt], max_new_tokens: int, stop: Sequence[str]) -> list[Response]:
        begin, asked, each = time.perf_counter(), [by_prompt[prompt] for prompt in prompts], []
        for job in asked:
            torch.manual_seed(job.number)  # Compactor draws a sketch
            each.append(read(model, press, job.prompt))

        def text(tokens: list[int]) -> str:
            return decode(tokenizer, tokens[:-1] if tokens[-1] in end_ids else tokens)

        def ended(number: int, tokens: list[int]) -> bool:
            long = len(tokens) == max_new_tokens or tokens[-1] in end_ids
            return long or is_complete(asked[number].case, text(tokens))

        texts = map(text, write(model, each, ended))
        seconds = (time.perf_counter() - begin) / len(each)
        told = zip(texts, each, strict=True)
        return [Response(said, rows=one.rows, cache_bytes=one.nbytes, seconds=seconds) for said, one in told]

    return respond
