"""A server in a thread of this process, and what a client of it needs."""

import contextlib
import threading
import time
from collections.abc import Iterator

from clusterkv_jax.serve import Server, bound, uvicorn_server

# Every message behind its role; a conversation ends where the next answer begins.
TEMPLATE = (
    "{% if tools %}[{{ tools[0].function.name }}]{% endif %}{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for call in m.tool_calls or [] %}({{ call.function.name }}{% for key in call.function.arguments %} {{ key }}"
    "{% endfor %}){% endfor %}{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


@contextlib.contextmanager
def running(server: Server) -> Iterator[str]:
    """The address of a server while it runs."""
    with bound("127.0.0.1", 0) as listener:
        told = uvicorn_server(server)
        thread = threading.Thread(target=told.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            wait_for(lambda: told.started)
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            told.should_exit = True
            thread.join()


def wait_for(condition, seconds: float = 60) -> None:
    """Return when a condition holds; AssertionError if it does not within so many seconds."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "It has not come to that."
        time.sleep(0.01)
