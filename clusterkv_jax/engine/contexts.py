"""Contexts: prompts that are read once and asked many times, on the device, in the host's memory or on disk.

A store holds their compressed caches, those asked last first. What a place has no room for moves to the next, from the
device to the host, from there to a folder; what no place holds is read once more when it is asked.
"""

import os
import shutil
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import jax
import numpy as np

from clusterkv_jax import saving
from clusterkv_jax.engine.room import ENDLESS
from clusterkv_jax.engine.slot_programs import placed_on_host
from clusterkv_jax.methods.base import Method
from clusterkv_jax.models.config import ModelConfig
from clusterkv_jax.runtime.errors import shown
from clusterkv_jax.storage.files import own_folder

Place = Literal["device", "host", "disk"]
PLACES: tuple[Place, ...] = ("device", "host", "disk")


@dataclass(frozen=True, eq=False)
class Context:
    """A prompt that an engine has read, or what an answer has left: ask it with `Engine.add(context, question)`.

    The engine forgets what nobody holds any more.

    Attributes:
        number: of the context, counted from 0.
        tokens: that its cache has seen; of a saved cache they are not known, unless an answer has left it.
        length: how many there are.
        file: the saved cache that it is, or None.
        fingerprint: of that file as it was read.
        seed: of methods that draw.
        max_new_tokens: what budgets of base "prompt+new" count.
        store: of the engine that read it.
        in_chat: a question's ids within the chat that the prompt is part of; None of one that is in none.
        answered: whether an answer has left it: there are no logits after it, so it is only asked with a question.
    """

    number: int
    tokens: tuple[int, ...] = field(repr=False)
    length: int
    file: Path | None
    fingerprint: str | None = field(repr=False)
    seed: int
    max_new_tokens: int
    store: Any = field(repr=False)
    in_chat: Callable[[str], list[int]] | None = field(default=None, repr=False)
    answered: bool = False


def check_own(context: Any, store: Any) -> None:
    """Raise ValueError for anything but a context of the engine with this store."""
    if not isinstance(context, Context) or context.store is not store:
        raise ValueError(f"context must be one that this engine has read, got {shown(context)}.")


@dataclass(frozen=True, eq=False)
class PrefillResult:
    """What reading a prompt gives: its cache, the logits after it (zeros of a saved cache), rows by layer and head of
    the method and of windows; and how many tokens may follow, which of a prompt is checked beforehand.
    """

    cache: Any
    logits: Any
    rows: tuple[list[list[list[int]]], list[list[list[int]]]]
    room: int = ENDLESS

    @property
    def mean_rows(self) -> float:
        """Rows of a head, on average over all heads that no window limits; of windows where there are no others."""
        held = self.rows[0] or self.rows[1]
        return float(np.mean([count for layer in held for heads in layer for count in heads]))

    @cached_property
    def nbytes(self) -> int:
        """Of all arrays."""
        leaves = jax.tree.leaves((self.cache, self.logits))
        return sum(int(x.size) * x.dtype.itemsize for x in leaves)


class ContextStore:
    """What was read, by the number of their context, within so many bytes a place; 0 switches a place off."""

    def __init__(
        self, config: ModelConfig, method: Method, limits: dict[Place, int], folder: str | os.PathLike[str] | None
    ) -> None:
        self.config, self.method, self.limits = config, method, limits
        self._folder, self._lock = (None, None) if folder is None else own_folder(Path(folder), "contexts-")
        self._held: dict[Place, OrderedDict[int, PrefillResult]] = {place: OrderedDict() for place in PLACES}
        # Contexts on their way to the host, in a thread that takes one array after the other: tokens of streams, which
        # come the same way, pass between two of them.
        self._leaving: OrderedDict[int, tuple[PrefillResult, Future[Any]]] = OrderedDict()
        self._mover = ThreadPoolExecutor(1, "clusterkv-contexts")
        # Of contexts that are garbage, which any thread may collect; who leads other processes drops them for all.
        self.unreachable: deque[int] = deque()
        self.drops_unreachable = True

    def get(self, number: int) -> PrefillResult | None:
        """A context's cache on the device, now the one asked last; None if no place holds it."""
        for place in PLACES:
            if (held := self._held[place].pop(number, None)) is not None:
                if (result := self._on_device(number, held, place)) is not None:
                    self.put(number, result)
                return result
        return None

    def peek(self, number: int) -> PrefillResult | None:
        """A context's cache where it is in memory, on the device or in the host's; None elsewhere."""
        held = self._held
        return held["device"].get(number) or held["host"].get(number)

    def put(self, number: int, result: PrefillResult) -> None:
        """Hold what is on the device; others make room."""
        while self.drops_unreachable and self.unreachable:
            self.drop(self.unreachable.popleft())
        self._held["device"][number] = result
        self._make_room()

    def add(self, context: Context, result: PrefillResult) -> None:
        """Hold a new context until it is garbage."""
        weakref.finalize(context, self.unreachable.append, context.number).atexit = False
        self.put(context.number, result)

    def drop(self, number: int) -> None:
        """Forget a context."""
        for place in PLACES:
            if self._held[place].pop(number, None) is not None and place == "disk":
                self._path(number).unlink(missing_ok=True)

    def close(self) -> None:
        """Forget all contexts and remove their folder."""
        for held in self._held.values():
            held.clear()
        for _, moving in self._leaving.values():
            moving.cancel()
        self._leaving.clear()
        if self._folder is not None and self._lock is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._lock.release()
            self.limits = self.limits | {"disk": 0}

    def counts(self) -> dict[Place, int]:
        """Contexts by place."""
        return {place: len(held) for place, held in self._held.items()}

    def nbytes(self) -> dict[Place, int]:
        """Bytes by place."""
        return {place: sum(result.nbytes for result in tuple(held.values())) for place, held in self._held.items()}

    def _make_room(self) -> None:
        self._let_go()
        for place, below in zip(PLACES, (*PLACES[1:], None), strict=True):
            held = self._held[place]
            total = sum(result.nbytes for result in held.values())
            while held and total > self.limits[place]:
                number, result = held.popitem(last=False)
                total -= result.nbytes
                if place == "disk":
                    self._path(number).unlink(missing_ok=True)
                elif below is not None and self.limits[below] >= result.nbytes:
                    self._lower(number, result, below)
                elif place == "device" and self.limits["disk"] >= result.nbytes:
                    self._lower(number, result, "disk")

    def _lower(self, number: int, result: PrefillResult, place: Place) -> None:
        if place == "host":
            self._held["host"][number] = result
            moving = self._mover.submit(jax.tree.map, np.asarray, (result.cache, result.logits))
            self._leaving[number] = result, moving
            return
        try:
            saving.save(self._path(number), result.cache, self.config, self.method)
        except (ValueError, OSError):  # numbers that are not finite have no file; a disk may be full
            return
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), result.cache)
        self._held["disk"][number] = replace(result, cache=shapes, logits=jax.tree.map(np.asarray, result.logits))

    def _let_go(self) -> None:
        """Let go of device arrays that are on the host by now; of as many as the device has room for nobody waits."""
        held, left = self._held["host"], sum(result.nbytes for result, _ in self._leaving.values())
        for number, (result, moving) in list(self._leaving.items()):
            if moving.done() or left > self.limits["device"]:
                cache, logits = moving.result()
                if held.get(number) is result:
                    held[number] = replace(result, cache=cache, logits=logits)
                left -= result.nbytes
                del self._leaving[number]

    def _on_device(self, number: int, result: PrefillResult, place: Place) -> PrefillResult | None:
        """What was read, on the device; None if its file is gone or damaged."""
        if place == "device":
            return result
        if place == "disk":
            try:
                cache = saving.load(self._path(number), self.config, self.method)
            except (ValueError, OSError):
                return None
            finally:
                self._path(number).unlink(missing_ok=True)
            return replace(result, cache=cache, logits=jax.tree.map(jax.numpy.asarray, result.logits))
        cache, logits = jax.tree.map(jax.numpy.asarray, (result.cache, result.logits))
        return replace(result, cache=placed_on_host(cache, self.method), logits=logits)

    def _path(self, number: int) -> Path:
        assert self._folder is not None
        return self._folder / f"context-{number}.safetensors"
