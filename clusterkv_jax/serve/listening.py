"""The server on a port, until it is told to end."""

import logging
import socket

import uvicorn

from clusterkv_jax.serve.app import make_app
from clusterkv_jax.serve.server import Server

# More connections at once are refused.
MOST_CONNECTIONS = 4096


def bound(host: str, port: int) -> socket.socket:
    """A socket that listens at an address; port 0 takes a free one. Raises ValueError where it cannot."""
    try:
        return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise ValueError(f"Nobody can listen at port {port} of {host}: {error.strerror or error}.") from error


def uvicorn_server(server: Server) -> uvicorn.Server:
    """A uvicorn server of the application: `run(sockets=[...])` serves until SIGTERM or SIGINT, lets answers end, and
    closes the engine.
    """
    config = uvicorn.Config(
        make_app(server),
        log_config=None,
        access_log=False,
        log_level=logging.WARNING,
        server_header=False,
        limit_concurrency=MOST_CONNECTIONS,
        timeout_graceful_shutdown=round(server.settings.shutdown_timeout_s),
    )
    return uvicorn.Server(config)
