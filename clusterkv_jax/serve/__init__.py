"""An HTTP server over one engine: the interfaces of OpenAI and Anthropic, and a page to look at it."""

from clusterkv_jax.serve.app import make_app
from clusterkv_jax.serve.listening import bound, uvicorn_server
from clusterkv_jax.serve.server import Server, Settings, follow_server, make_server, warm_up

__all__ = ["Server", "Settings", "bound", "follow_server", "make_app", "make_server", "uvicorn_server", "warm_up"]
