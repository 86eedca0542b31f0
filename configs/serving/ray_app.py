"""Replicas under Ray Serve, with the model in CLUSTERKV_MODEL: `serve run ray_app:app` in this folder."""

import os

from ray import serve  # pyright: ignore[reportMissingImports]  (no dependency of ours)
from starlette.applications import Starlette

import clusterkv_jax as ckv
from clusterkv_jax.serve import Settings, make_app, make_server, warm_up


def build() -> Starlette:
    """The application of one replica, whose engine is its own."""
    name = os.environ.get("CLUSTERKV_MODEL", "smollm2")
    keys = tuple(filter(None, os.environ.get("CLUSTERKV_API_KEY", "").split(",")))
    settings = Settings(name.rsplit("/", 1)[-1], keys)
    server = make_server(ckv.load(name), settings, method="auto", ratio=0.125, slots=16)
    warm_up(server)
    return make_app(server)


deployment = serve.deployment(
    serve.ingress(build)(),
    name="clusterkv",
    num_replicas=2,
    max_ongoing_requests=256,
    graceful_shutdown_timeout_s=120,
    health_check_timeout_s=60,
)
app = deployment.bind()
