"""Earlier responses and compacted conversations, which a next request may name."""

import asyncio
import logging
from collections.abc import Sequence

from clusterkv_jax.serve.context_files import ContextFiles, read_messages, soon, write_messages
from clusterkv_jax.serve.errors import ApiError
from clusterkv_jax.serve.prompts import Message
from clusterkv_jax.serve.server import Server
from clusterkv_jax.storage.schema import shown

_log = logging.getLogger(__name__)
# Letters of earlier responses that are kept; those that are asked last go last.
MOST_KEPT = 64 * 2**20


def earlier(server: Server, number: str, param: str) -> Sequence[Message]:
    """The messages of an earlier response, its answer last, or of a compacted conversation.

    Raises ApiError for one that is not known, naming the parameter that it came by.
    """
    if number not in server.responses:
        found = None if server.files is None else read_messages(server.files, number)
        if found is not None:
            _hold(server, number, found)
    if number not in server.responses:
        message = f"There is no response {shown(repr(number))}, or it is kept no longer; send the whole conversation."
        raise ApiError(message, 404, param=param)
    server.responses.move_to_end(number)
    return server.responses[number][0]


def keep(server: Server, number: str, messages: Sequence[Message]) -> None:
    """Keep a response; those that were asked longest ago make room, and stay in the folder of contexts."""
    _hold(server, number, messages)
    if server.files is not None:
        soon(server.files, _written(server.files, number, messages))


async def _written(files: ContextFiles, number: str, messages: Sequence[Message]) -> None:
    try:
        await asyncio.to_thread(write_messages, files, number, messages)
    except (ValueError, OSError) as error:
        _log.warning("A response was not written: %s", error)


def _hold(server: Server, number: str, messages: Sequence[Message]) -> None:
    kept = server.responses
    kept[number] = tuple(messages), sum(len(str(message)) for message in messages)
    while len(kept) > 1 and sum(letters for _, letters in kept.values()) > MOST_KEPT:
        kept.popitem(last=False)
