"""`clusterkv serve`: a model over HTTP, for clients of OpenAI and Anthropic."""

import logging
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from clusterkv_jax.cli.chat import loaded
from clusterkv_jax.cli.options import (
    CALIBRATION,
    MODEL,
    Chunk,
    CompilationCache,
    CoordinatorAddress,
    Distributed,
    NumProcesses,
    ProcessId,
    Reading,
    Weights,
    Window,
    cache_dtype_option,
)
from clusterkv_jax.cli.terminal import one_sentence_errors, plain_console, use_compilation_cache

EXAMPLES = """[bold]Examples[/bold]

A server that keeps an eighth of each prompt's cache, on port 8000:

  clusterkv serve smollm2

A model of your own, for those who have a key, on all interfaces:

  CLUSTERKV_API_KEY=secret clusterkv serve ./my-llama --host 0.0.0.0 \\
    --slots 16 --max-tokens 32768 --reserve 4096

One model over the devices of two hosts, each of which gets this command, with
its own number:

  clusterkv serve ./my-llama --host 0.0.0.0 --distributed \\
    --coordinator-address host-0:8476 --num-processes 2 --process-id 0

Ask it:

  curl localhost:8000/v1/chat/completions \\
    -d '{"messages": [{"role": "user", "content": "Who are you?"}]}'
"""

_cache = partial(typer.Option, rich_help_panel="Cache")
_room = partial(typer.Option, rich_help_panel="Room", min=1)
_where = partial(typer.Option, rich_help_panel="Where it runs")
_door = partial(typer.Option, rich_help_panel="Who may ask")


def serve(
    model: Annotated[str, typer.Argument(metavar="MODEL", help=MODEL)],
    host: Annotated[str, _door(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, _door(help="The port; 0 takes a free one.", min=0, max=65535)] = 8000,
    api_key: Annotated[
        list[str] | None, _door(help="A key that clients must send; repeatable.", envvar="CLUSTERKV_API_KEY")
    ] = None,
    served_model_name: Annotated[
        str | None, _door(help="What clients call the model.", show_default="the last part of MODEL")
    ] = None,
    max_body_mib: Annotated[int, _door(help="Largest request, in MiB.", min=1)] = 16,
    method: Annotated[str, _cache(help="A method, a preset, its .yaml file, or FILE.py:Class.")] = "auto",
    cache_ratio: Annotated[
        float | None, _cache(help="The share of a prompt's KV pairs to keep.", show_default="0.125")
    ] = None,
    cache_tokens: Annotated[int | None, _cache(help="Or how many of each head, such as 1024.")] = None,
    cache_dtype: Annotated[str | None, cache_dtype_option(rich_help_panel="Cache")] = None,
    calibration: Annotated[str | None, _cache(help=CALIBRATION)] = None,
    weights: Weights = None,
    slots: Annotated[int, _room(help="Answers that are written together.")] = 8,
    max_tokens: Annotated[int, _room(help="Most tokens of a prompt with its answer.")] = 8192,
    reserve: Annotated[int, _room(help="Most tokens of a question and its answer, behind what is compressed.")] = 1024,
    max_waiting: Annotated[int, _room(help="Most requests that wait; others are told to come back.")] = 256,
    context_folder: Annotated[
        Path | None, _room(help="A folder for contexts, which then outlive the server; servers may share it.")
    ] = None,
    context_folder_gib: Annotated[int, _room(help="Most GiB of the folder; what was asked longest ago goes.")] = 64,
    context_days: Annotated[float, _room(help="Days that a context stays there unasked.")] = 7.0,
    reading: Reading = "whole",
    window: Window = 4096,
    chunk: Chunk = 2048,
    prefill_chunk: Annotated[int | None, _room(help="Read a prompt in pieces of so many tokens.")] = None,
    mesh: Annotated[
        str | None,
        _where(help="Axes of a mesh of all devices, such as data=2,model=4.", show_default="one device, or all heads"),
    ] = None,
    distributed: Distributed = False,
    coordinator_address: CoordinatorAddress = None,
    num_processes: NumProcesses = None,
    process_id: ProcessId = None,
    shutdown_timeout: Annotated[
        float, typer.Option(help="Seconds that answers have to end, after SIGTERM.", min=0)
    ] = 30.0,
    compilation_cache: CompilationCache = True,
    debug: Annotated[bool, typer.Option("--debug", help="Show the whole traceback of an error.")] = False,
) -> None:
    """Serve a model: /v1/chat/completions, /v1/completions, /v1/responses, /v1/messages, and a page at /."""
    with one_sentence_errors(debug):
        from clusterkv_jax.runtime.extras import library

        for needed in ("starlette", "uvicorn", "prometheus_client"):
            library(needed, "clusterkv serve", "serve")
        use_compilation_cache(compilation_cache)
        import jax

        from clusterkv_jax.cli import followers

        if distributed:
            followers.join(coordinator_address, num_processes, process_id)
            mesh = mesh or f"model={jax.device_count()}"
        elif (coordinator_address, num_processes, process_id) != (None, None, None):
            raise ValueError("--coordinator-address, --num-processes and --process-id need --distributed.")
        if distributed and context_folder is not None:
            raise ValueError("--context-folder needs a server of one process.")
        from clusterkv_jax.serve import Settings, bound, follow_server, make_server, uvicorn_server, warm_up
        from clusterkv_jax.storage.schema import MIB

        name = served_model_name or Path(model).name or model
        limits: Any = {"max_body_bytes": max_body_mib * MIB, "shutdown_timeout_s": shutdown_timeout}
        limits |= {"context_folder": context_folder, "context_days": context_days}
        limits |= {"context_folder_bytes": context_folder_gib * 2**30}
        limits |= {"shared_contexts": 0} if distributed else {}  # what an answer leaves is in no process alone
        settings = Settings(name, tuple(api_key or ()), **limits)
        room: Any = {"slots": slots, "max_tokens": max_tokens, "reserve": reserve, "max_waiting": max_waiting}
        room |= {"prefill_chunk": prefill_chunk, "reading": reading, "window": window, "chunk": chunk}
        how = model, method, cache_ratio, cache_tokens, cache_dtype, calibration, weights, mesh
        if distributed and jax.process_index() != 0:
            network, kept = loaded(*how)
            follow_server(network, followers.hearer(), method=kept, **room)
            return
        with bound(host, port) as listener:
            network, kept = loaded(*how)
            tell = followers.teller() if distributed else None
            server = make_server(network, settings, method=kept, tell=tell, **room)
            console = plain_console(stderr=True, highlight=False, soft_wrap=True)
            with console.status("Compiling ..."):
                warm_up(server)
            _log_to_standard_error()
            address = f"http://{host}:{listener.getsockname()[1]}"
            console.print(f"{name} · {method} · {slots} slots · {address}", style="dim", markup=False)
            uvicorn_server(server).run(sockets=[listener])


def _log_to_standard_error() -> None:
    """A line for each request."""
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    logger = logging.getLogger("clusterkv_jax.serve")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
