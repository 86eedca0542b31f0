"""Clients of a server, in a process of their own so that they do not slow it: `benchmark_http.py` starts it.

Standard input is one JSON object: "port", "limit", and "asks", each with "path", "body" and "at". Those with a time are
sent then, in seconds from the beginning, each in a connection of its own; those without, one after the other. Standard
output has a line for each, in their order: "sent", "done", and the times of the pieces that brought a word, all in
seconds from the beginning; and "reply", the whole answer, or the last event of a stream. What has not ended after
`limit` seconds is cut off, and has no "reply". Of many at once each says on standard error when it has ended.
"""

import asyncio
import itertools
import json
import sys
import time
from typing import Any


async def ask(port: int, path: str, body: dict[str, Any], begin: float, limit: float) -> dict[str, Any]:
    """One request."""
    raw, lines = json.dumps(body).encode(), list[tuple[float, bytes]]()
    sent = time.perf_counter() - begin
    cut = False
    try:
        async with asyncio.timeout(begin + limit - time.perf_counter()):
            status = await exchanged(port, path, raw, begin, lines)
    except TimeoutError:
        cut, status = True, 200
    done = time.perf_counter() - begin
    if status != 200:
        raise RuntimeError(f"{path} answers {status}: {lines}")
    if cut and not lines:
        return {"sent": sent, "done": done, "times": []}
    events = [(at, json.loads(line[6:])) for at, line in lines if line.startswith(b"data: {")]
    times = [at for at, event in events if brings_words(event)]
    if cut:
        return {"sent": sent, "done": done, "times": times}
    reply = events[-1][1] if events else json.loads(b"".join(line for _, line in lines))
    if "error" in reply and reply["error"] is not None:
        raise RuntimeError(f"{path} answers {reply['error']}")
    return {"sent": sent, "done": done, "times": times, "reply": reply}


async def exchanged(port: int, path: str, raw: bytes, begin: float, lines: list[tuple[float, bytes]]) -> int:
    """The status of an answer, whose lines are put beside the others as they come."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=2**24)
    try:
        head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(raw)}\r\n\r\n"
        writer.write(head.encode() + raw)
        status = int((await reader.readline()).split()[1])
        while (await reader.readline()).strip():
            pass
        async for line in reader:
            lines.append((time.perf_counter() - begin, line))
        return status
    finally:
        writer.close()


def brings_words(event: dict[str, Any]) -> bool:
    """Whether a chunk of a chat completion has content."""
    return any(choice["delta"].get("content") for choice in event.get("choices", ()))


async def ask_all(port: int, asks: list[dict[str, Any]], limit: float) -> list[dict[str, Any]]:
    """All requests, at their times or one after the other."""
    begin, ended = time.perf_counter(), itertools.count(1)

    async def at_its_time(one: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(begin + one["at"] - time.perf_counter())
        answer = await ask(port, one["path"], one["body"], begin, limit)
        print(f"{next(ended)} of {len(asks)} after {answer['done']:.1f} s", file=sys.stderr, flush=True)
        return answer

    if all(one["at"] is not None for one in asks):
        return await asyncio.gather(*map(at_its_time, asks))
    return [await ask(port, one["path"], one["body"], begin, limit) for one in asks]


if __name__ == "__main__":
    plan = json.load(sys.stdin)
    for answer in asyncio.run(ask_all(plan["port"], plan["asks"], plan["limit"])):
        print(json.dumps(answer))
