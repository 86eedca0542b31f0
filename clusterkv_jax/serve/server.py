"""What all requests share: the model, its engine in a thread of its own, contexts by their tokens, and counts."""

import contextlib
import time
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from clusterkv_jax import saving
from clusterkv_jax.checkpoints import Model
from clusterkv_jax.engine import AsyncEngine, Engine
from clusterkv_jax.engine.replicated import Hear, LeadingEngine, Tell, follow
from clusterkv_jax.runtime.checks import check_counts
from clusterkv_jax.runtime.errors import check_fields, is_number
from clusterkv_jax.serve.context_files import ContextFiles, open_files
from clusterkv_jax.serve.metrics import Metrics, make_metrics
from clusterkv_jax.serve.prompts import ChatPrompt, of_conversation
from clusterkv_jax.serve.text_keys import TextKey
from clusterkv_jax.storage.schema import MIB
from clusterkv_jax.text.chat import has_template

_OPTIONS: dict[str, Any] = {"keep_short": True}
# Options of an engine that change what a context is.
_READING = {"reading", "window", "chunk", "prefill_chunk", "keep_short"}


@dataclass(frozen=True)
class Settings:
    """How a server is run.

    Attributes:
        model_name: what clients call the model.
        api_keys: any of which a client must send; none lets everybody in.
        max_body_bytes: of a request.
        shared_contexts: most prefixes that are remembered; 0 shares none.
        least_shared: tokens from which on a prefix is remembered.
        context_folder: a folder that exists, for contexts that outlive the server; servers may share it.
        context_folder_bytes: of its files.
        context_days: after its last use in which a file stays.
        shutdown_timeout_s: seconds for answers to end once the server is told to.
    """

    model_name: str
    api_keys: tuple[str, ...] = ()
    max_body_bytes: int = 16 * MIB
    shared_contexts: int = 64
    least_shared: int = 32
    context_folder: Path | None = None
    context_folder_bytes: int = 64 * 2**30
    context_days: float = 7.0
    shutdown_timeout_s: float = 30.0

    def __post_init__(self) -> None:
        check_fields(
            self,
            ("model_name", isinstance(self.model_name, str) and self.model_name != "", "a name that is not empty"),
            ("api_keys", all(isinstance(key, str) and key.strip() for key in self.api_keys), "keys that are not empty"),
            ("context_days", is_number(self.context_days) and self.context_days > 0, "more than 0"),
            ("shutdown_timeout_s", is_number(self.shutdown_timeout_s) and self.shutdown_timeout_s >= 0, "at least 0"),
        )
        check_counts(1, max_body_bytes=self.max_body_bytes, least_shared=self.least_shared)
        check_counts(0, 2**62, context_folder_bytes=self.context_folder_bytes, shared_contexts=self.shared_contexts)


@dataclass(frozen=True, eq=False)
class Server:
    """A running server.

    Attributes:
        model: from `load`.
        engine: of the model; its thread alone steps it.
        served: the engine as other threads use it.
        limits: "max_tokens" of a sequence and "reserve", of a question and its answer.
        settings: how it is run.
        contexts: prefixes that were read, by the keys of their texts, those asked last at the end.
        responses: messages up to a response that a next request may name, and how many letters they have.
        files: of contexts in a folder; None without one.
        metrics: counts for Prometheus.
        started: seconds since the epoch.
    """

    model: Model = field(repr=False)
    engine: Engine = field(repr=False)
    served: AsyncEngine = field(repr=False)
    limits: Mapping[str, int]
    settings: Settings
    contexts: OrderedDict[TextKey, Any] = field(repr=False, default_factory=OrderedDict)
    responses: OrderedDict[str, Any] = field(repr=False, default_factory=OrderedDict)
    files: ContextFiles | None = None
    metrics: Metrics = field(repr=False, default_factory=make_metrics)
    started: int = field(default_factory=lambda: int(time.time()))


def make_server(
    model: Model,
    settings: Settings,
    *,
    max_tokens: int = 8192,
    reserve: int = 1024,
    tell: Tell | None = None,
    **options: Any,
) -> Server:
    """A server with an engine of its own. Short prompts are kept whole.

    Args:
        model: what answers.
        settings: how the server is run.
        max_tokens: as in `Engine`, and so is the next.
        reserve: of a question and its answer.
        tell: takes what other processes' `follow_server` is to hear, where the model lies on their devices too.
        options: of `Engine`.

    Raises ValueError as `Engine`, and for a folder of contexts that does not exist, or with `tell`.
    """
    if tell is not None and settings.context_folder is not None:
        raise ValueError("A context folder needs a server of one process.")
    make = Engine if tell is None else partial(LeadingEngine, tell=tell)
    engine = make(model, max_tokens=max_tokens, reserve=reserve, **_OPTIONS | options)
    most = min(max_tokens, model.config.max_positions)
    limits = {"max_tokens": most, "reserve": min(reserve, most)}
    files = None if settings.context_folder is None else _files(engine, settings, limits, options)
    return Server(model, engine, AsyncEngine(engine), limits, settings, files=files)


def _files(engine: Engine, settings: Settings, limits: Mapping[str, int], options: Mapping[str, Any]) -> ContextFiles:
    """The files of contexts that any server may ask whose engine reads and keeps what this one does."""
    assert settings.context_folder is not None
    how = {name: options[name] for name in _READING & options.keys()}
    made_for = saving.fingerprint(engine.model.config, engine.method), sorted(limits.items()), sorted(how.items())
    room = settings.context_folder_bytes, settings.context_days * 86400
    return open_files(Path(settings.context_folder), repr(made_for), *room)


def follow_server(model: Model, hear: Hear, **options: Any) -> None:
    """What the other processes do, by the same options as `make_server`, until the server ends."""
    follow(model, hear, **{"max_tokens": 8192, "reserve": 1024} | _OPTIONS | options)


def warm_up(server: Server) -> None:
    """Compile what every answer runs, by a short one, so that no client waits for it; nor for the process that renders
    chat templates.
    """
    if has_template(server.model.tokenizer):
        with contextlib.suppress(ValueError):  # one that fails for this says so to who asks
            of_conversation(server.model, ChatPrompt([{"role": "user", "content": "?"}]))

    def answer(engine: Engine) -> None:
        keep = server.settings.shared_contexts > 0
        first = engine.add([0] * 8, max_new_tokens=2, keep=keep)
        engine.run()
        first.result()
        if not keep:
            return
        second = engine.add(first.context, [0], max_new_tokens=2)
        engine.run()
        second.result()

    server.served.call(answer).result()
